"""Finds the first step, module and tensor whose values deviate between two recorded runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import final

from msgspec.structs import replace

from shardscope.errors import DiffError
from shardscope.record import (
    Gap,
    Recording,
    RunComparison,
    RunDeviation,
    ValueKind,
    ValueSample,
)
from shardscope.report.runs.full_values import FullValue, Reading, list_readings, merge_calls
from shardscope.report.runs.noise_limits import NoiseLimits, find_roundoff
from shardscope.report.runs.run_causes import describe_difference, find_problems, has_random_numbers
from shardscope.report.runs.tensor_comparison import (
    AgreementTally,
    Comparison,
    list_losses,
    make_deviation,
    measure,
    measure_numbers,
    rank_comparison,
    read_local,
)
from shardscope.report.runs.value_tables import (
    Key,
    find_order,
    find_renumbered,
    find_usual_rms,
    flatten,
    format_key,
    format_steps,
    is_within,
    make_table,
    read_layout,
)

_MAX_DEVIATIONS = 500
_MAX_NAMED = 3
_MATMUL_PRECISION = "unit roundoff of float32 matmul"
_PARTIAL_KINDS = (ValueKind.OUTPUT, ValueKind.OUTPUT_GRADIENT, ValueKind.BUFFER)
_PARAMETER_KINDS = (ValueKind.GRADIENT, ValueKind.CLIPPED)


def compare_values(
    a: Recording, b: Recording, *, titles: tuple[str, str] = ("A", "B"), tolerance: float = 0.0
) -> Recording:
    """Compare the sampled values of two runs, and return a recording of the comparison.

    Args:
        a: The recording of a run, of all of its ranks.
        b: That of the other run, which may have another layout and another number of ranks.
        titles: How the runs are called.
        tolerance: A relative deviation that is accepted in any tensor.

    Examples:
        >>> compare_values(load("one.json.gz"), load("two.json.gz")).findings
    """
    comparer = _Comparer(a, b, titles, tolerance)
    result = comparer.compare()
    run = replace(b.run, instruments=("compare",), skipped_checks=())
    recording = Recording(run=run, gaps=(*comparer.find_gaps(),), comparisons=(result,))
    return replace(recording, findings=find_problems(result, a, b))


@final
class _Comparer:
    """Compares two runs tensor by tensor, in the order of execution."""

    def __init__(
        self, a: Recording, b: Recording, titles: tuple[str, str], tolerance: float
    ) -> None:
        self._a, self._b = a, b
        self._titles = titles
        self._tables = make_table(a, titles[0]), make_table(b, titles[1])
        self._limits = NoiseLimits(least=tolerance)
        self._steps = sorted(self._tables[0].keys() & self._tables[1].keys())
        if not self._steps:
            sides = (
                f"{title} has {format_steps(table)}"
                for title, table in zip(titles, self._tables, strict=True)
            )
            raise DiffError(
                f"the runs have no sampled step in common: {'; '.join(sides)}. "
                "Sample the same steps in both: trace(model, values=range(1, 11))."
            )
        self._is_same_layout = read_layout(a) == read_layout(b)
        self._renumbered = find_renumbered(*self._tables)
        self._deviations: list[RunDeviation] = []
        self._agreed: list[str] = []
        self._gaps: dict[str, list[str]] = defaultdict(list)
        self._num_compared = self._num_equal = 0
        self._incomparable = ""
        # The module whose output, like those since, agrees only as a sum of the ranks' tensors.
        self._partial = ""
        self._last_step = 0
        self._usual_rms = 0.0  # of the gradients of parameters
        self._begin()

    def _begin(self) -> None:
        """What is known of the current step."""
        self._gradients: dict[str, tuple[float, int]] = {}  # norm, number of elements
        self._rates: list[float] = []
        self._is_scaled = True
        self._factor: float | None = None  # between gradients of outputs
        self._tally = AgreementTally()

    def compare(self) -> RunComparison:
        """Compare all steps up to the end of the first that deviates."""
        for step in self._steps:
            self._compare_step(step)
            self._last_step = step
            if self._deviations or self._incomparable:
                break
        if not self._num_compared and not self._incomparable:
            raise DiffError(
                "the runs have no sampled tensor in common that can be compared: their modules "
                "have other names, or ranks are missing. Name all recordings of the ranks of each "
                "run, and give trace() the same model in both."
            )
        kept = self._deviations[:_MAX_DEVIATIONS]
        return RunComparison(
            run_a=self._titles[0],
            run_b=self._titles[1],
            world_size_a=self._a.run.world_size,
            world_size_b=self._b.run.world_size,
            steps=tuple(step for step in self._steps if step <= self._last_step),
            num_compared=self._num_compared,
            num_equal=self._num_equal,
            num_deviating=len(self._deviations),
            deviations=tuple(kept),
            agreed=tuple(self._agreed),
            incomparable=self._incomparable,
        )

    def _compare_step(self, step: int) -> None:
        self._begin()
        self._limits.begin_step()
        self._usual_rms = find_usual_rms(self._tables[0][step])
        tables = self._tables[0][step], self._tables[1][step]
        for key in self._list_keys(tables):
            if not self._incomparable:
                self._compare_key(step, key, tables[0][key], tables[1][key])
        self._limits.end_step()
        is_complete = not self._deviations and not self._incomparable
        self._agreed.append(self._tally.describe(step, is_complete=is_complete))

    def _list_keys(self, tables: tuple[dict[Key, dict[int, list[ValueSample]]], ...]) -> list[Key]:
        """The tensors of both runs in the order of run A; those of one run only become gaps."""
        first, second = tables
        for title, own, others in (
            (self._titles[0], first, second),
            (self._titles[1], second, first),
        ):
            missing = [key for key in own if key not in others and key[1] not in self._renumbered]
            for kind, name, path in missing:
                self._gaps[f"sampled in {title} only"].append(format_key(kind, name, path))
        common = [key for key in first if key in second]
        for kind, name, path in common:
            if is_within(name, self._renumbered):
                fact = "modules of the same number are not the same in both runs"
                self._gaps[fact].append(format_key(kind, name, path))
        kept = [key for key in common if not is_within(key[1], self._renumbered)]
        orders = {key: find_order(first[key]) for key in kept}
        return sorted(kept, key=lambda key: (key[0] is not ValueKind.WEIGHT, orders[key]))

    def _compare_key(
        self,
        step: int,
        key: Key,
        calls_a: dict[int, list[ValueSample]],
        calls_b: dict[int, list[ValueSample]],
    ) -> None:
        kind, name, _ = key
        if kind is ValueKind.LOSS and not self._is_same_layout:
            self._compare_losses(step, key, calls_a, calls_b)
            return
        if kind is ValueKind.SETTING and name == _MATMUL_PRECISION:
            for sample in (*flatten(calls_a), *flatten(calls_b)):
                self._limits.note_precision(sample.sum or 0.0)
            return
        results: list[tuple[int, Comparison | None]] = []
        if calls_a.keys() == calls_b.keys():
            results = [
                (call, self._compare_samples(kind, name, step, calls_a[call], calls_b[call]))
                for call in calls_a
            ]
        is_split = not results or any(result is None or not result.is_fine for _, result in results)
        if is_split and (len(calls_a) > 1 or len(calls_b) > 1):
            sums = merge_calls(flatten(calls_a)), merge_calls(flatten(calls_b))
            merged = self._compare_samples(kind, name, step, *sums)
            if not results or (merged is not None and merged.is_fine):
                results = [(0, merged)]
        for call, result in results:
            self._note(step, key, call, result, calls_a, calls_b)

    def _note(
        self,
        step: int,
        key: Key,
        call: int,
        result: Comparison | None,
        calls_a: Mapping[int, Sequence[ValueSample]],
        calls_b: Mapping[int, Sequence[ValueSample]],
    ) -> None:
        kind, name, path = key
        if result is None:
            fact = "their numbers of elements differ, or ranks are missing"
            self._gaps[fact].append(format_key(kind, name, path))
            return
        self._num_compared += 1
        self._num_equal += result.is_equal
        if result.is_fine:
            if not self._deviations:
                self._tally.add(key, result)
            self._learn(kind, name, result)
            return
        if not self._deviations and kind is ValueKind.OUTPUT and self._is_random(name):
            self._incomparable = (
                f"step {step}: {name or 'the model'} draws random numbers, which differ. Compare "
                "runs without dropout, or with the same random numbers on the same layout"
            )
            return
        blamed = self._partial if kind is ValueKind.OUTPUT and not self._deviations else ""
        detail = describe_difference(
            kind,
            result.a,
            result.b,
            limit=result.limit,
            samples=(flatten(calls_a), flatten(calls_b)),
            partial=blamed,
            has_copies=any(result.disagreeing),
        )
        deviation = make_deviation(step, key, call, result, detail)
        self._deviations.append(replace(deviation, suspect=blamed))

    def _is_random(self, name: str) -> bool:
        return has_random_numbers(name, self._a) or has_random_numbers(name, self._b)

    def _learn(self, kind: ValueKind, name: str, result: Comparison) -> None:
        """Keep what later limits depend on, of a tensor that agrees."""
        norm, count = result.a.norm, result.a.num_elements
        if kind is ValueKind.OUTPUT:
            is_partial = Reading.PARTIAL in (result.a.reading, result.b.reading)
            self._partial = (self._partial or name) if is_partial else ""
        if kind in (ValueKind.OUTPUT, ValueKind.OUTPUT_GRADIENT):
            self._limits.num_calls += 1
        if kind in _PARAMETER_KINDS and norm is not None:
            self._gradients[name] = norm, count
        if kind is ValueKind.SETTING and name.endswith(".lr"):
            self._rates.append(abs(result.a.sum or 0.0))
            self._is_scaled = not name.startswith("SGD.")
        if kind in (ValueKind.UPDATED, ValueKind.WEIGHT) and norm is not None:
            self._limits.note_update(count, norm, result.deviation)
            if kind is ValueKind.WEIGHT:
                self._limits.end_step()

    def _find_limit(
        self, kind: ValueKind, name: str, step: int, a: FullValue, b: FullValue
    ) -> float:
        limits, dtypes = self._limits, (a.dtype, b.dtype)
        if kind is ValueKind.SETTING:
            return limits.for_setting()
        num_steps = step - self._last_step if self._last_step else step
        if kind is ValueKind.INPUT or (kind is ValueKind.WEIGHT and num_steps == 1):
            return limits.for_given(dtypes, a.num_elements)
        if not any(map(find_roundoff, dtypes)):
            return limits.for_given(dtypes, a.num_elements)
        if kind in (ValueKind.WEIGHT, ValueKind.UPDATED):
            norm, count = a.norm or 0.0, a.num_elements
            gradient = self._gradients.get(name)
            noise = 1.0
            if kind is ValueKind.UPDATED and gradient is not None:
                noise = limits.find_gradient_noise(*gradient, self._usual_rms)
            return limits.for_updated(
                count,
                norm,
                roundoff=max(map(find_roundoff, dtypes)),
                learning_rate=self._find_rate(step),
                gradient_noise=noise,
                num_steps=1 if kind is ValueKind.UPDATED else num_steps - 1,
                is_scaled=self._is_scaled or kind is ValueKind.WEIGHT,
            )
        limits.note_dtype(*dtypes)
        return limits.for_computed(a.num_elements)

    def _find_rate(self, step: int) -> float:
        """The largest learning rate of the step, also before it was compared."""
        if self._rates:
            return max(self._rates)
        rates = [
            abs(sample.sum or 0.0)
            for (kind, name, _), calls in self._tables[0][step].items()
            if kind is ValueKind.SETTING and name.endswith(".lr")
            for sample in flatten(calls)
        ]
        return max(rates, default=0.0)

    def _compare_samples(
        self,
        kind: ValueKind,
        name: str,
        step: int,
        samples_a: Sequence[ValueSample],
        samples_b: Sequence[ValueSample],
    ) -> Comparison | None:
        """The readings of both runs that fit each other best; None if none has equal sizes."""
        by_rank = self._compare_ranks(kind, name, step, samples_a, samples_b)
        if by_rank is not None and by_rank.is_fine:
            return by_rank
        may_be_partial = kind in _PARTIAL_KINDS
        readings_a, readings_b = (
            list_readings(samples, recording.run.axes, may_be_partial=may_be_partial)
            for samples, recording in ((samples_a, self._a), (samples_b, self._b))
        )
        pairs = [
            self._compare_full(kind, name, step, a, b, factor=factor)
            for a in readings_a
            for b in readings_b
            if a.num_elements == b.num_elements
            for factor in self._list_factors(kind, a, b)
        ]
        best = min(pairs, key=rank_comparison, default=None)
        if best is None:
            return by_rank
        if kind is ValueKind.OUTPUT_GRADIENT and self._factor is None:
            self._factor = best.factor
        return best

    def _compare_ranks(
        self,
        kind: ValueKind,
        name: str,
        step: int,
        samples_a: Sequence[ValueSample],
        samples_b: Sequence[ValueSample],
    ) -> Comparison | None:
        """Rank by rank, if the layout is the same in both runs; the rank that deviates most."""
        of_a = {sample.rank: sample for sample in samples_a}
        of_b = {sample.rank: sample for sample in samples_b}
        if not self._is_same_layout or of_a.keys() != of_b.keys():
            return None
        worst: Comparison | None = None
        is_equal = True
        for rank, sample in of_a.items():
            other = of_b[rank]
            if sample.local_shape != other.local_shape or sample.placements != other.placements:
                return None
            a, b = (read_local(value) for value in (sample, other))
            result = self._compare_full(kind, name, step, a, b)
            is_equal &= sample.hash == other.hash and sample.sum == other.sum
            if worst is None or result.deviation > worst.deviation:
                worst = result
        if worst is None:
            return None
        return Comparison(worst.a, worst.b, worst.deviation, worst.limit, is_equal=is_equal)

    def _compare_full(
        self,
        kind: ValueKind,
        name: str,
        step: int,
        a: FullValue,
        b: FullValue,
        *,
        factor: float = 1.0,
    ) -> Comparison:
        limit = self._find_limit(kind, name, step, a, b)
        usual = self._usual_rms if kind in _PARAMETER_KINDS else 0.0
        deviation = measure(a, b, usual_rms=usual, factor=factor)
        of_a, of_b = (
            tuple(
                rank
                for copy in full.copies
                for rank in copy.ranks
                if measure(full, copy, usual_rms=usual) > limit
            )
            for full in (a, b)
        )
        return Comparison(a, b, deviation, limit, (of_a, of_b), factor=factor)

    def _list_factors(self, kind: ValueKind, a: FullValue, b: FullValue) -> tuple[float, ...]:
        """Factors between gradients of outputs: each rank's loss is a mean over its own batch.

        All have that of the first such gradient; parameters' gradients are compared without.
        """
        if kind is not ValueKind.OUTPUT_GRADIENT or self._is_same_layout:
            return (1.0,)
        if self._factor is not None:
            return (self._factor,)
        return (1.0, b.norm / a.norm) if a.norm and b.norm else (1.0,)

    def _compare_losses(
        self,
        step: int,
        key: Key,
        calls_a: Mapping[int, Sequence[ValueSample]],
        calls_b: Mapping[int, Sequence[ValueSample]],
    ) -> None:
        """Compare the loss, of which each rank may have the mean over its own batch."""
        limit = self._limits.for_computed(1)
        losses = [list(list_losses(calls)) for calls in (calls_a, calls_b)]
        pairs = [
            (measure_numbers(first, second), first, second)
            for first in losses[0]
            for second in losses[1]
        ]
        if not pairs:
            return
        deviation, first, second = min(pairs)
        if deviation > limit:
            if not self._deviations:
                fact = "each rank has that of its own part of the batch"
                self._gaps[fact].append(format_key(*key))
            return
        dtype = flatten(calls_a)[0].dtype
        a, b = (
            FullValue(Reading.FULL, 1, number, number * number, abs(number), 0, dtype, ())
            for number in (first, second)
        )
        self._note(step, key, 0, Comparison(a, b, deviation, limit), calls_a, calls_b)

    def find_gaps(self) -> Iterator[Gap]:
        """What was not compared, and the gaps of both recordings."""
        for fact, names in self._gaps.items():
            distinct = list(dict.fromkeys(names))
            named = ", ".join(distinct[:_MAX_NAMED])
            more = f" and {len(distinct) - _MAX_NAMED:,} more" if len(distinct) > _MAX_NAMED else ""
            yield Gap(place="values", fact=f"not compared: {named}{more}: {fact}")
        for title, recording in zip(self._titles, (self._a, self._b), strict=True):
            for gap in recording.gaps:
                yield Gap(place=gap.place, fact=f"{title}: {gap.fact}", is_loss=gap.is_loss)
