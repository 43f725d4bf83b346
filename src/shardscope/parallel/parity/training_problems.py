"""Explains differences after backward: the gradient norm, clipping, the optimizer, counters.

The gradients of both versions agree here, so that the code behind these differences is no module's.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch

from shardscope.numerics import to_fp64_on_cpu
from shardscope.parallel.equivalence import UPDATED, StepResult, TensorComparison
from shardscope.parallel.parity.causes import explain
from shardscope.parallel.parity.evidence import group_ranks, list_sizes
from shardscope.parallel.parity.explanation import (
    OWN_VALUES,
    Explanation,
    list_names,
    make_sentence,
)
from shardscope.parallel.parity.problem import Problem
from shardscope.parallel.parity.result import ParityResult
from shardscope.record import Agreement, Phase, Source, Suspect, TensorKind

_RTOL = 1e-5  # of squared norms, which are sums of compared gradients
_MAX_GROUPS = 4  # of parameters that are sharded in the same way


@final
class TrainingProblems:
    """The problems of a training step whose model computes the right outputs and gradients."""

    def __init__(
        self,
        parity_result: ParityResult,
        axes: Mapping[str, int],
        wrong: Sequence[TensorComparison],
    ) -> None:
        self._result = parity_result
        self._axes = axes
        self._wrong = wrong

    def find(self) -> Iterator[Problem]:
        """The first of these that differs: the norm, clipping, settings, the optimizer, numbers."""
        counts = {rank.training.num_optimizer_steps for rank in self._result.ranks}
        updated = self._list(TensorKind.UPDATED)
        finders = (
            (TensorKind.NORM, self._describe_norm),
            (TensorKind.CLIPPED, self._describe_clipping),
            (TensorKind.SETTING, self._describe_settings),
            (TensorKind.STATE, self._describe_optimizer),
            (TensorKind.UPDATED, self._describe_optimizer),
        )
        for kind, describe in finders:
            wrong = self._list(kind)
            if wrong and kind is TensorKind.CLIPPED and len(counts) > 1 and updated:
                describe = self._describe_optimizer  # some ranks skip it, and what precedes it
            if wrong:
                yield describe(wrong)
                return
        known: set[object] = set()  # a number that is read, and then returned, is one
        for kind in (TensorKind.COUNTER, TensorKind.REPORTED):
            for result in self._list(kind):
                values = (float(_target(result).reshape(-1)[0]), *_values_of(result))
                key = tuple(f"{value:.5g}" for value in values)
                if key not in known:
                    yield self._describe_number(result)
                known.add(key)

    def _list(self, kind: TensorKind) -> list[TensorComparison]:
        return [result for result in self._wrong if result.case.kind is kind]

    def _find_source(self, kind: TensorKind, name: str) -> Source | None:
        """The line behind a number: of the ranks, or of the first op that differs."""
        source = self._result.find_source(kind, name)
        if source is None and self._result.op is not None:
            return self._result.op.source
        return source

    def _describe_norm(self, wrong: Sequence[TensorComparison]) -> Problem:
        comparison = wrong[0]
        index = _find_first_wrong(comparison)
        values, target = _values_of(comparison, index), _target(comparison).reshape(-1)[index]
        single = float(target)
        cause = explain_norm(values, target, self._result, self._axes)
        cause = cause or explain(comparison, self._axes)
        fact = (
            f"Gradients agree, but the norm that they are clipped with is {_list_values(values)} "
            f"on the ranks and {single:.6g} on the single device. {cause.to_sentence()}"
        )
        return Problem(
            cause,
            "the gradient norm",
            fact.strip(),
            cause.remedy
            or "Sum the squared norms of shards over the axes that shard them, and count a "
            "gradient that ranks hold as copies once.",
            phase=Phase.BACKWARD,
            names=(comparison.case.name,),
            source=self._result.find_collective(comparison)
            or self._find_source(TensorKind.NORM, comparison.case.name),
        )

    def _describe_clipping(self, wrong: Sequence[TensorComparison]) -> Problem:
        names = [result.case.name for result in wrong]
        cause = self._explain_clipping()
        has_norm = any(c.case.kind is TensorKind.NORM for c in self._result.comparisons)
        what = "Gradients and their norm agree" if has_norm else "Gradients agree"
        fact = (
            f"{what} before clipping; after it {list_names(names)} "
            f"{'differs' if len(names) == 1 else 'differ'}. {cause.to_sentence()}"
        )
        return Problem(
            cause,
            "gradient clipping",
            fact.strip(),
            cause.remedy,
            phase=Phase.BACKWARD,
            names=tuple(names),
            source=self._find_source(TensorKind.NORM, "gradient norm"),
        )

    def _explain_clipping(self) -> Explanation:
        """Why gradients agree before they are clipped, and not after it."""
        single = _find_factor(self._result.reference)
        factors = [_find_factor(rank) for rank in self._result.ranks]
        known = [factor for factor in factors if factor is not None]
        remedy = "Clip with one norm and one limit on all ranks."
        if single is None or len(known) < len(factors):
            clause = "" if single is None else self._list_unclipped(single)
            if clause:
                remedy = (
                    "Clip all gradients on every rank, also those that others count in the norm."
                )
            return Explanation(Suspect.CLIPPING, clause, remedy=remedy)
        unclipped = [
            rank for rank, factor in enumerate(known) if math.isclose(factor, 1, rel_tol=1e-6)
        ]
        if len(unclipped) == len(known):
            return Explanation(
                Suspect.CLIPPING,
                "the ranks do not clip them",
                remedy="Clip the gradients of the parameters that the optimizer holds. A generator "
                "of parameters can be iterated only once: pass a list.",
            )
        clause = f"the ranks multiply them by {_list_values(known)}, the single device by "
        clause += f"{single:.6g}"
        # The norms that the ranks have, if they clip to the limit of the single device.
        reference = math.sqrt(sum(self._result.reference.local_squares.values()))
        norm = explain_norm(
            [reference * single / factor for factor in known],
            torch.tensor(reference, dtype=torch.float64),
            self._result,
            self._axes,
        )
        if norm is not None and not math.isclose(single, 1, rel_tol=1e-6):
            return replace(norm, clause=f"{clause}: the norm is wrong, as {norm.clause}")
        if unclipped:
            listed = ", ".join(map(str, unclipped))
            clause = f"rank {listed} does not clip them, and the others do"
            remedy = "Decide whether to clip on all ranks alike, from a norm that all ranks share."
        return Explanation(Suspect.CLIPPING, clause, remedy=remedy)

    def _list_unclipped(self, single: float) -> str:
        """A clause that names the gradients that ranks do not clip, and where; empty if none."""
        ranks_of: dict[tuple[str, ...], list[int]] = {}
        for rank, result in enumerate(self._result.ranks):
            names = tuple(
                name
                for name, square in result.local_squares.items()
                if square and math.isclose(result.clipped_squares.get(name, 0.0), square)
            )
            if names and not math.isclose(single, 1, rel_tol=1e-6):
                ranks_of.setdefault(names, []).append(rank)
        return "; ".join(
            f"rank {', '.join(map(str, ranks))} does not clip {list_names(names)}"
            for names, ranks in ranks_of.items()
        )

    def _describe_settings(self, wrong: Sequence[TensorComparison]) -> Problem:
        clauses = []
        ratio = None
        is_common = True
        for result in wrong:
            single = _target(result).reshape(-1).tolist()
            ranks = [full.reshape(-1).tolist() for full in result.full] or [single]
            index = next(i for i in range(len(single)) if any(r[i] != single[i] for r in ranks))
            values = [rank[index] for rank in ranks]
            is_common = is_common and len(set(values)) == 1
            clauses.append(
                f"{result.case.name} is {_list_by_rank(values)} and {single[index]:.6g} on the "
                "single device"
            )
            ratio = values[0] / single[index] if single[index] else ratio
        clause = "; ".join(clauses)
        sizes = [
            " and ".join(names)
            for names, size in list_sizes(self._axes)
            if ratio in (size, 1 / size) and is_common
        ]
        if sizes:
            clause += f", a factor of the size of {sizes[0]}"
        cause = Explanation(Suspect.SCALED, clause, ratio=ratio)
        if not is_common:
            cause = Explanation(Suspect.OUT_OF_SYNC, clause)
        return Problem(
            cause,
            "the optimizer's settings",
            f"Gradients agree. In the optimizer {clause}.",
            "Make the optimizer, and step its scheduler, with the same settings and equally often "
            "on every rank.",
            phase=Phase.OPTIMIZER,
            names=tuple(result.case.name for result in wrong),
        )

    def _describe_optimizer(self, _: Sequence[TensorComparison]) -> Problem:
        wrong = [
            result
            for result in self._wrong
            if result.case.kind in (TensorKind.STATE, TensorKind.UPDATED)
        ]
        updated = [result for result in wrong if result.case.kind is TensorKind.UPDATED] or wrong
        names = list(dict.fromkeys(result.case.name.partition(" ")[0] for result in updated))
        cause = self._explain_optimizer(updated, names)
        what = "the updated " if updated[0].case.kind is TensorKind.UPDATED else "the state of "
        verb = "differs" if len(names) == 1 else "differ"
        fact = f"All gradients agree; {what}{list_names(names)} {verb}. {cause.to_sentence()}"
        return Problem(
            cause,
            list_names(names),
            make_sentence(fact.strip()).removesuffix("."),
            cause.remedy
            or "Compare the optimizer's parameters and state on the ranks with the model's: it "
            "should be made after sharding, from the parameters of the sharded model.",
            phase=Phase.OPTIMIZER,
            names=tuple(result.case.name for result in wrong),
            source=cause_source(self._result),
        )

    def _explain_optimizer(
        self, updated: Sequence[TensorComparison], names: Sequence[str]
    ) -> Explanation:
        ranks, reference = self._result.ranks, self._result.reference
        stale = [
            name
            for name in names
            if all(name in rank.training.stale or name in rank.absent for rank in ranks)
            and name not in reference.training.stale
        ]
        if stale:
            holds = "does not hold it" if len(stale) == 1 else f"does not hold {list_names(stale)}"
            return Explanation(
                Suspect.STALE,
                f"the optimizer of the ranks {holds}: it was given other tensors, such as those "
                "from before the model was sharded, moved or materialized",
                remedy="Make the optimizer after the model is sharded and materialized, from the "
                "parameters that the model then has.",
            )
        counts = [rank.training.num_optimizer_steps for rank in ranks]
        single_count = reference.training.num_optimizer_steps
        if len(set(counts)) > 1 or counts[0] < single_count:
            listed = _list_by_rank(counts)
            return Explanation(
                Suspect.STALE,
                "the number of times that the optimizer steps is "
                f"{listed} and {single_count} on the single device",
                remedy="Decide on all ranks alike whether the optimizer steps: reduce the flag, "
                "such as that a gradient is not finite, over all ranks first.",
            )
        cause = self._explain_unchanged(updated) or explain(updated[0], self._axes)
        disagrees = updated[0].verdict.agreement is Agreement.RANKS_DISAGREE
        if cause.suspect is Suspect.UNKNOWN and disagrees:
            return replace(
                cause,
                suspect=Suspect.OUT_OF_SYNC,
                remedy="Look for code that changes it on some ranks only, such as on rank 0, or "
                "from what a rank alone sees, and run it on all ranks alike.",
            )
        return cause

    def _explain_unchanged(self, updated: Sequence[TensorComparison]) -> Explanation | None:
        """Which ranks leave parameters as they were that the single device changes."""
        previous, reference = self._result.previous, self._result.reference
        before = previous.training.tables.get(UPDATED, {}) if previous else reference.parameters
        is_changed = {rank: False for result in updated for rank in range(len(result.full))}
        for result in updated:
            old = before.get(result.case.name)
            if result.case.kind is not TensorKind.UPDATED or old is None or not result.full:
                return None
            fp64 = to_fp64_on_cpu(old)
            if fp64.shape != _target(result).shape or torch.equal(fp64, _target(result)):
                return None
            for rank, full in enumerate(result.full_in_fp64()):
                is_changed[rank] |= not torch.allclose(full, fp64, rtol=_RTOL, atol=0.0)
        unchanged = [rank for rank, changed in is_changed.items() if not changed]
        if not unchanged:
            return None
        is_all = len(unchanged) == len(is_changed)
        what = "it as it was" if len(updated) == 1 else "them as they were"
        who = "the ranks leave" if is_all else f"rank {', '.join(map(str, unchanged))} leaves"
        return Explanation(
            Suspect.STALE,
            f"{who} {what}, and the single device updates {'it' if len(updated) == 1 else 'them'}",
            remedy="Update it on every rank that holds it, or broadcast it after the update.",
        )

    def _describe_number(self, result: TensorComparison) -> Problem:
        cause = explain(result, self._axes)
        name = result.case.name
        values, single = _values_of(result), float(_target(result).reshape(-1)[0])
        what = (
            "a counter" if result.case.kind is TensorKind.COUNTER else "a number that is reported"
        )
        disagrees = result.verdict.agreement is Agreement.RANKS_DISAGREE
        if cause.suspect is Suspect.UNKNOWN and disagrees:
            cause = OWN_VALUES
        source = self._result.find_collective(result)
        source = source or self._find_source(result.case.kind, name) or self._find_reading(values)
        fact = (
            f"The model is trained as on the single device; {what}, {name}, is "
            f"{_list_values(values)} on the ranks and {single:.6g} on the single device. "
            f"{cause.to_sentence()}"
        )
        return Problem(
            cause,
            name,
            fact.strip(),
            cause.remedy
            or "Reduce it over the ranks that compute different parts of it, once, and count what "
            "ranks hold as copies once.",
            names=(name,),
            source=source,
        )

    def _find_reading(self, values: Sequence[float]) -> Source | None:
        """The line that reads on the first rank what the step returns there."""
        for rank in self._result.ranks[:1]:
            for key, numbers in rank.training.scalars.items():
                is_read = key in rank.training.sources and bool(numbers)
                if is_read and math.isclose(float(numbers[-1]), values[0], rel_tol=1e-6):
                    return rank.training.sources[key]
        return None


def cause_source(parity_result: ParityResult) -> Source | None:
    """The line of the first op outside the modules that differs, if one was found."""
    return None if parity_result.op is None else parity_result.op.source


def explain_norm(
    values: Sequence[float],
    target: torch.Tensor,
    parity_result: ParityResult,
    axes: Mapping[str, int],
) -> Explanation | None:
    """How the norms of ranks differ: shards are not summed, copies count several times or not.

    Squared norms of the gradients are grouped by the axes that shard them; the norm on the ranks is
    a sum of these groups, each counted a number of times. None if that is not the case.
    """
    references = parity_result.reference.gradients
    gradients = [
        result
        for result in parity_result.comparisons
        if result.case.kind is TensorKind.GRADIENT and result.case.name in references
    ]
    squares = {result.case.name: _square(references[result.case.name]) for result in gradients}
    if not math.isclose(sum(squares.values()), float(target) ** 2, rel_tol=_RTOL):
        return None  # another norm than the square root of a sum of squares
    local = [sum(rank.local_squares.values()) for rank in parity_result.ranks]
    if len(local) == len(values) and all(
        math.isclose(own, value**2, rel_tol=_RTOL) for own, value in zip(local, values, strict=True)
    ):
        return Explanation(
            Suspect.NORM,
            "each rank computes it from its own shards only",
            remedy="Sum the squared norms over the axes that shard the gradients before the square "
            "root, as DTensor's norm and full_tensor() do.",
        )
    groups: dict[tuple[str, ...], list[str]] = {}
    for result in gradients:
        sharded = _find_sharding_axes(result.case.name, squares, parity_result.ranks, axes)
        groups.setdefault(sharded, []).append(result.case.name)
    if len({round(value, 12) for value in values}) == 1 and len(groups) <= _MAX_GROUPS:
        counted = _find_counts(
            values[0] ** 2,
            [sum(squares[name] for name in names) for names in groups.values()],
            axes,
        )
        if counted is not None:
            return _describe_counts(counted, groups, axes)
    return _find_unsummed(values, gradients, squares, parity_result.ranks, axes)


def _find_unsummed(
    values: Sequence[float],
    gradients: Sequence[TensorComparison],
    squares: Mapping[str, float],
    ranks: Sequence[StepResult],
    axes: Mapping[str, int],
) -> Explanation | None:
    """Shards whose squares each rank leaves as they are, while it sums those of the others.

    DTensors are in other groups than plain tensors: their norm is complete by itself.
    """
    groups: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for result in gradients:
        sharded = _find_sharding_axes(result.case.name, squares, ranks, axes)
        is_distributed = any(result.case.name in rank.distributed for rank in ranks)
        groups.setdefault((sharded, is_distributed), []).append(result.case.name)
    if len(values) != len(ranks) or len(groups) > _MAX_GROUPS:
        return None
    candidates = [key for key in groups if key[0]]
    for count in range(1, len(candidates) + 1):
        for keys in itertools.combinations(candidates, count):
            names = [name for key in keys for name in groups[key]]
            rest = sum(square for name, square in squares.items() if name not in names)
            own = [sum(rank.local_squares.get(name) or 0.0 for name in names) for rank in ranks]
            if all(
                math.isclose(rest + square, value**2, rel_tol=_RTOL)
                for square, value in zip(own, values, strict=True)
            ):
                over = tuple(dict.fromkeys(axis for key in keys for axis in key[0]))
                return Explanation(
                    Suspect.NORM,
                    f"each rank adds the squares of its own shards of {list_names(names)} only, "
                    f"which are not summed over {' and '.join(over)}",
                    over,
                    remedy="Sum the squared norm of plain tensors over the axes that shard them "
                    "before the square root: the norm of DTensors is complete by itself.",
                )
    return None


def _square(tensor: torch.Tensor) -> float:
    return float(to_fp64_on_cpu(tensor).square().sum())


def _find_sharding_axes(
    name: str,
    squares: Mapping[str, float],
    ranks: Sequence[StepResult],
    axes: Mapping[str, int],
) -> tuple[str, ...]:
    """The axes over which the squared norms of what ranks store of a gradient add up to its own."""
    local = [rank.local_squares.get(name) for rank in ranks]
    known = [0.0 if square is None else square for square in local]
    for sharding, lines in ((), [[rank] for rank in range(len(ranks))]), *group_ranks(axes):
        if all(
            math.isclose(sum(known[rank] for rank in line), squares[name], rel_tol=_RTOL)
            for line in lines
        ):
            return sharding
    return ()


def _find_counts(
    square: float, groups: Sequence[float], axes: Mapping[str, int]
) -> list[float] | None:
    """How often each group is counted in a squared norm; the counting that changes fewest."""
    sizes = {size for _, size in list_sizes(axes)}
    options = [1.0, 0.0, *map(float, sizes), *(1 / size for size in sizes)]
    best: list[float] | None = None
    for counts in itertools.product(options, repeat=len(groups)):
        total = sum(count * group for count, group in zip(counts, groups, strict=True))
        if not math.isclose(total, square, rel_tol=_RTOL):
            continue
        if best is None or _num_changed(counts) < _num_changed(best):
            best = list(counts)
    return best if best is not None and _num_changed(best) else None


def _num_changed(counts: Sequence[float]) -> int:
    return sum(count != 1.0 for count in counts)


def _describe_counts(
    counts: Sequence[float], groups: Mapping[tuple[str, ...], list[str]], axes: Mapping[str, int]
) -> Explanation:
    clauses, over = [], []
    for count, (sharded, names) in zip(counts, groups.items(), strict=True):
        if count == 1.0:
            continue
        kind = f"sharded along {' and '.join(sharded)}" if sharded else "replicated"
        what = f"the gradients that are {kind} ({list_names(names)})"
        if count == 0.0:
            clauses.append(f"{what} are left out")
            continue
        size = count if count > 1 else 1 / count
        named = [" and ".join(names) for names, other in list_sizes(axes) if other == size]
        over += named[:1]
        amount = f"{size:.0f} times" if count > 1 else f"1/{size:.0f} times"
        clauses.append(f"{what} are counted {amount}, which is the size of {named[0]}")
    remedy = (
        "Count a gradient that ranks hold as copies once: divide its squared norm by the number "
    )
    remedy += "of copies before the sum over ranks, or sum it over the axes that shard it only."
    return Explanation(Suspect.NORM, "; ".join(clauses), tuple(over), remedy=remedy)


def _find_factor(result: StepResult) -> float | None:
    """By what clipping has multiplied all gradients that are stored here; None if it varies."""
    after = result.clipped_squares
    if not after.keys() >= result.local_squares.keys():
        return None
    factors = [
        math.sqrt(after[name] / square)
        for name, square in result.local_squares.items()
        if square > 0
    ]
    factor = statistics.median(factors) if factors else 1.0
    is_common = all(math.isclose(other, factor, rel_tol=_RTOL) for other in factors)
    return factor if is_common else None


def _target(comparison: TensorComparison) -> torch.Tensor:
    assert comparison.case.target is not None
    return comparison.case.target


def _find_first_wrong(comparison: TensorComparison) -> int:
    """Which number of several, such as norms of groups of parameters, differs first."""
    target = to_fp64_on_cpu(_target(comparison)).reshape(-1)
    for index, single in enumerate(target.tolist()):
        if any(
            not math.isclose(value, single, rel_tol=_RTOL)
            for value in _values_of(comparison, index)
        ):
            return index
    return 0


def _values_of(comparison: TensorComparison, index: int = 0) -> list[float]:
    """A number of a tensor, by default the first, on each rank."""
    tensors = (tensor for tensor in comparison.case.ranks if tensor is not None)
    return [float(tensor.detach().double().reshape(-1)[index]) for tensor in tensors]


def _list_by_rank(values: Sequence[float]) -> str:
    """The values of the ranks, by rank if they differ."""
    if len(set(values)) == 1:
        return f"{values[0]:.6g} on the ranks"
    listed = [f"{value:.6g} on rank {rank}" for rank, value in enumerate(values[:4])]
    return ", ".join([*listed, *(["…"] if len(values) > 4 else [])])


def _list_values(values: Sequence[float]) -> str:
    texts = list(dict.fromkeys(f"{value:.6g}" for value in values))
    shown = ", ".join(texts[:4])
    return f"{shown}, …" if len(texts) > 4 else shown
