"""The comparison of a full tensor in two runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from shardscope.record import RunDeviation, ValueKind, ValueSample, compress_ranks
from shardscope.record.units import plural
from shardscope.report.runs.full_values import FullValue, Reading
from shardscope.report.runs.value_tables import Key, format_key


@dataclass(frozen=True)
class Comparison:
    """Two readings of a tensor, one from each run, and how they deviate."""

    a: FullValue
    b: FullValue
    deviation: float
    limit: float
    disagreeing: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # ranks of A, and of B
    factor: float = 1.0  # by which the tensor of run B was divided
    is_equal: bool = False  # bit for bit, on all ranks

    @property
    def is_fine(self) -> bool:
        """Whether rounding explains the deviation, and copies agree."""
        return self.deviation <= self.limit and not any(self.disagreeing)


def read_local(sample: ValueSample) -> FullValue:
    return FullValue(
        reading=Reading.FULL,
        num_elements=math.prod(sample.local_shape),
        sum=sample.sum,
        sum_squares=sample.sum_squares,
        max_abs=sample.max_abs,
        num_nonfinite=sample.num_nonfinite,
        dtype=sample.dtype,
        hashes=(sample.hash,),
        ranks=(sample.rank,),
    )


def rank_comparison(result: Comparison) -> tuple[bool, int, bool, float]:
    """Fine ones first, then those in which ranks disagree, of which copies are the simplest."""
    is_off = result.deviation > result.limit
    is_weak = Reading.PARTIAL in (result.a.reading, result.b.reading)
    return not result.is_fine, int(is_off), is_weak, result.deviation


def measure(a: FullValue, b: FullValue, *, usual_rms: float = 0.0, factor: float = 1.0) -> float:
    """The deviation of norms or sums, whichever is larger, relative to the norm."""
    if bool(a.num_nonfinite) != bool(b.num_nonfinite):
        return math.inf
    count = max(1, a.num_elements)
    scale = max(a.norm or 0.0, (b.norm or 0.0) / factor, usual_rms * math.sqrt(count))
    if not scale:
        scale = max(abs(a.sum or 0.0), abs(b.sum or 0.0) / factor)
    if not scale:
        return 0.0
    deviations = [0.0]
    if a.norm is not None and b.norm is not None:
        deviations.append(abs(a.norm - b.norm / factor) / scale)
    if a.sum is not None and b.sum is not None:
        deviations.append(abs(a.sum - b.sum / factor) / (scale * math.sqrt(count)))
    return max(deviations)


def list_losses(calls: Mapping[int, Sequence[ValueSample]]) -> Iterator[float]:
    """The losses of a step: sums and means over ranks and over micro-batches."""
    table = [[s.sum for s in samples if s.sum is not None] for samples in calls.values()]
    if not table or not all(table):
        return
    means = [math.fsum(row) / len(row) for row in table]
    sums = [math.fsum(row) for row in table]
    for numbers in (means, sums):
        yield math.fsum(numbers)
        yield math.fsum(numbers) / len(numbers)


def measure_numbers(first: float, second: float) -> float:
    scale = max(abs(first), abs(second))
    return abs(first - second) / scale if scale else 0.0


def make_deviation(step: int, key: Key, call: int, result: Comparison, detail: str) -> RunDeviation:
    kind, name, path = key
    a, b = result.a, result.b
    ratio = None
    if a.norm and b.norm and result.deviation > result.limit:
        ratio = b.norm / a.norm
        if a.sum and b.sum is not None and measure(a, b, factor=ratio) > result.limit:
            ratio = None
    return RunDeviation(
        step=step,
        kind=kind,
        name=name,
        path=path,
        call=call,
        dtype=a.dtype if a.dtype == b.dtype else f"{a.dtype}, {b.dtype}",
        num_elements=a.num_elements,
        norm_a=a.norm,
        norm_b=b.norm,
        sum_a=a.sum,
        sum_b=b.sum,
        deviation=result.deviation if math.isfinite(result.deviation) else None,
        limit=result.limit,
        ratio=ratio,
        detail=detail,
        ranks=compress_ranks(sorted(set(result.disagreeing[1] or result.disagreeing[0]))),
        disagreeing_run="B" if result.disagreeing[1] else "A" if result.disagreeing[0] else "",
    )


@final
@dataclass
class AgreementTally:
    """How many tensors of a step agree, and which of them is nearest to its limit."""

    kinds: Counter[ValueKind] = field(default_factory=Counter)
    num_equal: int = 0
    nearest: str = ""
    _share: float = 0.0

    def add(self, key: Key, result: Comparison) -> None:
        """Count a tensor that agrees."""
        self.kinds[key[0]] += 1
        self.num_equal += result.is_equal
        share = result.deviation / result.limit if result.limit else 0.0
        if share > self._share:
            self._share = share
            self.nearest = (
                f"{format_key(*key)} ({result.deviation:.1e}, noise up to {result.limit:.1e})"
            )

    def describe(self, step: int, *, is_complete: bool) -> str:
        """A sentence on the tensors that agree; `is_complete` if no other deviates."""
        total = sum(self.kinds.values())
        if self.num_equal == total:
            equal = ", bit for bit on each rank"
        else:
            equal = f", {self.num_equal:,} of them bit for bit" if self.num_equal else ""
        nearest = f"; nearest to its limit is the {self.nearest}" if self.nearest else ""
        if is_complete:
            return f"step {step}: all {plural(total, 'tensor')}{equal}{nearest}"
        kinds = ", ".join(plural(count, NOUNS[kind]) for kind, count in self.kinds.items())
        return f"step {step}, before that: {kinds or 'nothing'}{equal}{nearest}"


NOUNS = {
    ValueKind.SETTING: "setting",
    ValueKind.WEIGHT: "initial parameter",
    ValueKind.INPUT: "input",
    ValueKind.OUTPUT: "output",
    ValueKind.LOSS: "loss",
    ValueKind.OUTPUT_GRADIENT: "output gradient",
    ValueKind.GRADIENT: "parameter gradient",
    ValueKind.CLIPPED: "clipped gradient",
    ValueKind.BUFFER: "buffer",
    ValueKind.UPDATED: "updated parameter",
}
"""What samples of a kind are called."""
