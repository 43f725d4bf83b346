"""Infers the probable cause of a difference from the values of a tensor on each rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

import torch

from shardscope.numerics import (
    Distance,
    NoiseFloor,
    find_rms,
    is_finite,
    is_inexact,
    measure,
    to_fp64_on_cpu,
)
from shardscope.parallel.equivalence.cases import Case
from shardscope.parallel.equivalence.compare import TensorComparison
from shardscope.parallel.equivalence.tensor_shards import Layout, Order, ranks_along, shard_layouts
from shardscope.record import Agreement, Suspect

_MAX_PERMUTED_DIMS = 5
_MAX_CHUNKS = 64
_MAX_ELEMENTS = 2**22  # the largest tensor that is compared in many orders
_MAX_LAYOUTS = 12
_MAX_LISTED = 4
_REST = 0.1  # the share of an error that an explanation may leave unexplained

Reduction = Literal["sum", "mean", ""]


@final
@dataclass(frozen=True)
class Explanation:
    """A suspected cause with the evidence for it.

    The evidence is a `clause`, such as "the bias is missing", or a `predicate` of the tensor,
    such as "is zero on every rank". `reduction` over `axes` is the reduction that is missing,
    or applied twice; `ratio` is the factor by which the tensor is too large. `remedy` is set
    where the evidence asks for one of its own.
    """

    suspect: Suspect
    clause: str = ""
    axes: tuple[str, ...] = ()
    reduction: Reduction = ""
    ratio: float | None = None
    remedy: str = ""
    predicate: str = ""

    def describe(self, subject: str = "it") -> str:
        """The evidence as a clause; empty if there is none."""
        return f"{subject} {self.predicate}" if self.predicate else self.clause

    def state(self, subject: str = "it") -> str:
        """The evidence as a sentence; empty if there is none."""
        return make_sentence(self.describe(subject))

    @property
    def kind(self) -> object:
        """A key that is equal for tensors that differ for the same reason."""
        ratio = None if self.ratio is None else round(self.ratio, 3)
        return self.suspect, self.axes, self.reduction, ratio


UNKNOWN = Explanation(Suspect.UNKNOWN)


def make_sentence(clause: str) -> str:
    """The clause with a capital letter and a full stop."""
    return f"{clause[:1].upper()}{clause[1:]}." if clause else ""


@final
class _Evidence:
    """The values of a tensor on each rank and on the single device, with the noise floor."""

    def __init__(
        self,
        target: torch.Tensor,
        floor: NoiseFloor,
        ranks: Sequence[torch.Tensor],
        axes: Mapping[str, int],
        *,
        biases: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        is_forward: bool,
        batch_axes: Sequence[str],
    ) -> None:
        self.batch_axes = batch_axes
        self.inputs = [_finite(tensor) for tensor in inputs if tensor.shape == target.shape]
        self.biases = [bias for bias in biases if bias.shape == target.shape[-1:]]
        self.is_forward = is_forward
        self.target = _finite(target)
        self.floor = floor
        self.ranks = [_finite(tensor) for tensor in ranks]
        self.axes = axes
        self._off = max(measure(tensor, self.target).rms for tensor in self.ranks)

    def is_near(self, value: torch.Tensor, target: torch.Tensor, scale: float = 1.0) -> bool:
        """Whether two tensors are equal up to noise, which grows with `scale`.

        An explanation must also leave only a small share of the original error.
        """
        distance = measure(value, target)
        is_close = self.floor.scale_by(max(scale, 1e-30) * 4).allows(distance)
        is_better = distance.rms <= _REST * self._off
        return is_close and is_better and not self._is_trivial(distance, target)

    def _is_trivial(self, distance: Distance, target: torch.Tensor) -> bool:
        """Whether both are zero, which is no evidence."""
        return not bool(target.any()) and distance.largest == 0

    def are_identical(self, groups: Sequence[Sequence[int]] | None = None) -> bool:
        """Whether the ranks of each group, or all ranks, have the same values up to noise."""
        return all(
            self.floor.allows(measure(self.ranks[rank], self.ranks[group[0]]))
            for group in groups or [range(len(self.ranks))]
            for rank in group[1:]
        )

    @property
    def scale(self) -> float:
        """The ratio of the largest rank's magnitude to the right one; at least 1."""
        largest = max(find_rms(tensor) for tensor in self.ranks)
        return max(1.0, largest / max(self.floor.scale, 1e-300))

    def groups(self) -> Iterator[tuple[tuple[str, ...], list[list[int]]]]:
        """For each set of axes, the groups of ranks that differ only along those axes."""
        return _find_groups(self.axes)


def _find_groups(axes: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], list[list[int]]]]:
    sizes = tuple(axes.values())
    names = [name for name, size in axes.items() if size > 1]
    ranks = torch.arange(math.prod(sizes)).reshape(sizes)
    order = list(axes)
    for count in range(1, len(names) + 1):
        for subset in itertools.combinations(names, count):
            dims = [order.index(name) for name in subset]
            moved = ranks.movedim(dims, list(range(-count, 0)))
            lines = moved.reshape(-1, math.prod(axes[name] for name in subset))
            yield subset, lines.tolist()


def explain(
    comparison: TensorComparison,
    axes: Mapping[str, int],
    biases: Sequence[torch.Tensor] = (),
    inputs: Sequence[torch.Tensor] = (),
    *,
    is_forward: bool = False,
    batch_axes: Sequence[int] = (),
) -> Explanation:
    """The likeliest cause of a difference.

    `biases` and `inputs` are tensors that may have been added too often, or not at all. A
    result of forward is rarely a mean over ranks, but gradients often are. `batch_axes` are the
    indices of the axes along which the batch is sharded.
    """
    case = comparison.case
    if comparison.verdict.agreement is Agreement.MISSING:
        return Explanation(Suspect.STALE, comparison.verdict.detail)
    if case.target is None or not comparison.full:
        return UNKNOWN
    floor = case.floor or NoiseFloor(0.0, 0.0, find_rms(to_fp64_on_cpu(case.target)), 0.0, 1.0)
    target = to_fp64_on_cpu(case.target)
    vectors, residuals = (
        [to_fp64_on_cpu(tensor) for tensor in tensors] for tensors in (biases, inputs)
    )
    unknown = next(_find_dims(case, floor, axes), UNKNOWN)
    if unknown.suspect is not Suspect.UNKNOWN:
        return unknown
    for full in itertools.islice(_candidates(comparison), _MAX_LAYOUTS):
        ranks = [to_fp64_on_cpu(tensor) for tensor in full]
        evidence = _Evidence(
            target,
            floor,
            ranks,
            axes,
            biases=vectors,
            inputs=residuals,
            is_forward=is_forward,
            batch_axes=[name for index, name in enumerate(axes) if index in batch_axes],
        )
        explanation = next(_explanations(evidence), None)
        if explanation is not None:
            return explanation
        unknown = unknown if unknown.describe() else _describe_right_ranks(evidence)
    return next(
        itertools.chain(
            _find_own_slices(comparison, evidence),
            _find_own_ratios(comparison, evidence),
            _find_values(evidence),
        ),
        unknown,
    )


def explain_fused(
    inputs: Sequence[TensorComparison], axes: Mapping[str, int]
) -> Explanation | None:
    """Recognize a fused weight that was sharded as one: shards of another input of the op."""
    for index, comparison in enumerate(inputs):
        case, floor = comparison.case, comparison.case.floor
        shards = [to_fp64_on_cpu(tensor) for tensor in case.ranks if tensor is not None]
        if not comparison.full or floor is None or case.reference is None or case.calls:
            continue
        for (name, size), dim in itertools.product(axes.items(), range(case.reference.ndim)):
            chunks = [
                (source, chunk)
                for source, input_ in enumerate(inputs)
                if input_.case.reference is not None and input_.case.reference.ndim > dim
                for chunk in to_fp64_on_cpu(input_.case.reference).chunk(size, dim)
            ]
            sources = [
                [
                    source
                    for source, chunk in chunks
                    if chunk.shape == shard.shape
                    and floor.scale_by(4.0).allows(measure(shard, chunk))
                ]
                for shard in shards
            ]
            wrong = [
                rank
                for rank, candidates in enumerate(sources)
                if candidates and index not in candidates
            ]
            if size > 1 and all(sources) and wrong:
                return Explanation(
                    Suspect.WRONG_SLICE,
                    f"on rank {wrong[0]} its input {index} is a shard of what its input "
                    f"{sources[wrong[0]][0]} should be: parts of one tensor are sharded over "
                    f"{name} as if they were one part",
                    (name,),
                    remedy="Shard each part of a fused weight, such as q, k and v, by itself, so "
                    "that every rank has its share of each of them.",
                )
    return None


def explain_wrong_group(
    partial: TensorComparison, result: TensorComparison, cause: Explanation, axes: Mapping[str, int]
) -> Explanation | None:
    """Recognize partial sums of an op that are summed over other axes than those of `cause`.

    Ranks along those axes may have different samples, so that `result` by itself is no
    evidence. The same bias may have been added to all rows of it.
    """
    if None in partial.case.ranks or None in result.case.ranks:
        return None
    terms = [to_fp64_on_cpu(tensor) for tensor in partial.case.ranks if tensor is not None]
    totals = [to_fp64_on_cpu(tensor) for tensor in result.case.ranks if tensor is not None]
    floor = result.case.floor
    if floor is None or {term.numel() for term in terms} != {total.numel() for total in totals}:
        return None
    over = " and ".join(cause.axes)
    for group_axes, lines in _find_groups(axes):
        size = len(lines[0])
        sums = {
            rank: torch.stack([terms[member].flatten() for member in line]).sum(0)
            for line in lines
            for rank in line
        }
        rests = [
            (total - sums[rank].view_as(total)).reshape(-1, total.shape[-1] if total.ndim else 1)
            for rank, total in enumerate(totals)
        ]
        if group_axes != cause.axes and all(
            len(rest) > 1
            and floor.scale_by(4.0 * size).allows(measure(rest + total, rest.mean(0) + total))
            for rest, total in zip(
                rests, (total.reshape(rests[0].shape) for total in totals), strict=True
            )
        ):
            clause = (
                f"its partial sums are summed over {' and '.join(group_axes)} instead of {over}"
            )
            return Explanation(Suspect.WRONG_GROUP, clause, cause.axes, "sum")
    return None


def explain_mixed(
    results: Sequence[TensorComparison], axes: Mapping[str, int]
) -> Iterator[tuple[TensorComparison, Explanation]]:
    """Recognize gradients of different parameters, such as experts, that were reduced together.

    Ranks have different parameters under one name, so that each gradient is the sum of all, up
    to a factor.
    """
    groups: list[list[tuple[TensorComparison, torch.Tensor]]] = []
    for comparison in results:
        if not comparison.full or comparison.case.target is None or comparison.case.floor is None:
            continue
        value, floor = _finite(to_fp64_on_cpu(comparison.full[0])), comparison.case.floor
        same = (
            group
            for group in groups
            if group[0][1].shape == value.shape
            and floor.scale_by(4.0).allows(measure(value, group[0][1]))
        )
        group = next(same, None)
        if group is None:
            groups.append([(comparison, value)])
        else:
            group.append((comparison, value))
    for group in groups:
        targets = [to_fp64_on_cpu(j.case.target) for j, _ in group if j.case.target is not None]
        total, value = torch.stack(targets).sum(0), group[0][1]
        ratio = _find_median_ratio(value, total)
        floor = max(
            (j.case.floor for j, _ in group if j.case.floor),
            key=lambda floor_of_member: floor_of_member.scale,
        )
        if len(group) < 2 or not ratio or not is_finite(total):
            continue
        if not floor.scale_by(4.0 * len(group)).allows(measure(value, total * ratio)):
            continue
        over = next((name for name, size in axes.items() if size == len(group)), "")
        names = ", ".join(j.case.name for j, _ in group[:_MAX_LISTED])
        more = ", …" if len(group) > _MAX_LISTED else ""
        for comparison, _ in group:
            yield (
                comparison,
                Explanation(
                    Suspect.WRONG_GROUP,
                    axes=(over,) if over else (),
                    reduction="sum",
                    remedy=_suggest_smaller_group(
                        over or "the axis along which they are distributed"
                    ),
                    predicate=f"is, up to a factor, the sum of the gradients of several parameters "
                    f"({names}{more}): it is reduced over {over or 'ranks'}, although each rank "
                    "has another one of them",
                ),
            )


def _suggest_smaller_group(over: str) -> str:
    return (
        "Reduce the gradients of sharded parameters and of experts over those axes only along "
        f"which they are replicated, not over {over}: give DDP or the all-reduce another process "
        "group, or leave these parameters out."
    )


def _candidates(comparison: TensorComparison) -> Iterator[Sequence[torch.Tensor]]:
    """The full tensors of the comparison, then those of the other layouts that fit."""
    yield comparison.full
    case = comparison.case
    shards = [tensor for tensor in case.ranks if tensor is not None]
    if comparison.layout is None or case.target is None or case.calls:
        return
    for layout in shard_layouts(shards, case.target.shape, case.sizes):
        joined = layout.join(shards) if layout != comparison.layout else None
        if joined is not None and all(full.shape == case.target.shape for full in joined):
            yield joined


def _explanations(evidence: _Evidence) -> Iterator[Explanation]:
    if not any(bool(tensor.any()) for tensor in evidence.ranks):
        yield Explanation(Suspect.STALE, predicate="is zero on every rank", ratio=0.0)
    yield from _find_partial(evidence)
    yield from _find_ratio(evidence)
    yield from _find_bias(evidence)
    yield from _find_residual(evidence)
    if evidence.target.numel() <= _MAX_ELEMENTS:
        yield from _find_reduced_shards(evidence)
        yield from _find_slices(evidence)
        yield from _find_scattered(evidence)
        yield from _find_order(evidence)


def _find_partial(evidence: _Evidence) -> Iterator[Explanation]:
    """Partial sums: reduced over an axis, the ranks agree."""
    if evidence.are_identical():
        return
    scale = evidence.scale
    for names, lines in evidence.groups():
        over = " and ".join(names)
        sums = [torch.stack([evidence.ranks[rank] for rank in line]).sum(0) for line in lines]
        means = [total / len(lines[0]) for total in sums]
        if all(evidence.is_near(total, evidence.target, scale) for total in sums):
            yield Explanation(
                Suspect.MISSING_REDUCTION,
                f"each rank holds only its partial sum; summed over {over} they match",
                names,
                "sum",
            )
        if evidence.is_forward:
            yield from _find_wrong_group(evidence, names, sums)
        if all(evidence.is_near(mean, evidence.target, scale) for mean in means):
            yield Explanation(
                Suspect.MISSING_REDUCTION,
                f"each rank has a value of its own; averaged over {over} they match",
                names,
                "mean",
            )
        yield from _find_wrong_group(evidence, names, sums)
        times = [_find_bias_multiple(evidence, total, scale) for total in sums]
        known = [count for count in times if count is not None]
        if len(known) == len(times):
            is_added = all(count > 0 for count in known)
            yield Explanation(
                Suspect.MISSING_REDUCTION,
                f"each rank holds only its partial sum; summed over {over} they match, except for "
                f"the bias{', which every rank adds' if is_added else ''}",
                names,
                "sum",
            )


def _find_wrong_group(
    evidence: _Evidence, names: tuple[str, ...], sums: Sequence[torch.Tensor]
) -> Iterator[Explanation]:
    """Partial sums that were summed over other axes, along which all ranks had the same value."""
    for group_axes, lines in evidence.groups():
        if set(group_axes) & set(names) or not evidence.are_identical(lines):
            continue
        count = len(lines[0])
        over, group_over = " and ".join(names), " and ".join(group_axes)
        num_summed = len(evidence.ranks) // len(sums)
        if all(evidence.is_near(total / count, evidence.target) for total in sums):
            yield Explanation(
                Suspect.WRONG_GROUP,
                axes=names,
                reduction="sum",
                predicate=f"is summed over {group_over} instead of {over}: summed over {over} and "
                f"divided by {count} the ranks match",
            )
        means = [total / count / num_summed for total in sums]
        if all(evidence.is_near(mean, evidence.target) for mean in means):
            yield Explanation(
                Suspect.WRONG_GROUP,
                axes=names,
                reduction="mean",
                predicate=f"is summed over {group_over} and not reduced over {over}: averaged over "
                f"{over} and divided by {count} the ranks match",
            )


def _find_bias_multiple(
    evidence: _Evidence, value: torch.Tensor, scale: float = 1.0
) -> float | None:
    """How many times a bias was added too often along the last dim, if that explains all."""
    rows = evidence.target.numel() // max(1, evidence.target.shape[-1] if value.ndim else 1)
    if value.ndim < 2 or rows < 2:
        return None
    row = (value - evidence.target).flatten(0, -2).mean(0)
    for bias in evidence.biases:
        times = float(row @ bias) / max(float(bias @ bias), 1e-300)
        if times and evidence.is_near(value - times * bias, evidence.target, scale):
            return times
    return None


def _find_bias(evidence: _Evidence) -> Iterator[Explanation]:
    """A bias that no rank adds, or that every rank adds, or that alone is not reduced twice."""
    if not evidence.are_identical():
        return
    times = _find_bias_multiple(evidence, evidence.ranks[0])
    if times is not None and times < 0:
        yield Explanation(Suspect.STALE, "the bias is missing")
    elif times is not None:
        yield Explanation(
            Suspect.DOUBLE_REDUCTION,
            reduction="sum",
            predicate="is off by a multiple of the bias, which every rank adds before the "
            "reduction",
        )
    for _, size in _find_sizes(evidence.axes):
        for ratio in (float(size), 1 / size):
            rest = evidence.ranks[0] - (ratio - 1) * evidence.target
            if _find_bias_multiple(evidence, rest, max(ratio, 1.0)) is not None:
                explanation = _describe_ratio(ratio, evidence.axes)
                yield replace(
                    explanation,
                    clause=f"apart from the bias {explanation.describe()}",
                    predicate="",
                )


def _find_residual(evidence: _Evidence) -> Iterator[Explanation]:
    """The module's own input, which was added too often, or not at all."""
    if not evidence.are_identical():
        return
    for residual in evidence.inputs:
        scale = float((residual * residual).sum())
        times = float(((evidence.ranks[0] - evidence.target) * residual).sum()) / max(scale, 1e-300)
        count = round(times)
        rest = evidence.ranks[0] - count * residual
        if not count or not evidence.is_near(rest, evidence.target, evidence.scale):
            continue
        if count < 0:
            clause = "its input is not added to its output, or is subtracted"
            remedy = "Add the residual once, in the module or in the wrapper around it."
            yield Explanation(Suspect.STALE, clause, remedy=remedy)
            continue
        often = "once" if count == 1 else f"{count} times"
        over = [
            " and ".join(names) for names, size in _find_sizes(evidence.axes) if size - 1 == count
        ]
        also = f", as if each rank of {over[0]} added it before a sum" if over and count > 1 else ""
        remedy = "Add the residual once: in the module or in the wrapper around it, not in both"
        remedy += f"; before a sum over {over[0]}, on one of its ranks only." if over else "."
        yield Explanation(
            Suspect.DOUBLE_REDUCTION,
            reduction="sum",
            remedy=remedy,
            predicate=f"is too large by its input, which is added {often} too often{also}",
        )


def _find_ratio(evidence: _Evidence) -> Iterator[Explanation]:
    ratios = [_find_median_ratio(tensor, evidence.target) for tensor in evidence.ranks]
    ratio = ratios[0]
    if ratio is None or math.isclose(ratio, 1.0, rel_tol=1e-6):
        return
    if not all(
        rank_ratio is not None and math.isclose(rank_ratio, ratio, rel_tol=1e-6)
        for rank_ratio in ratios
    ):
        return
    if all(
        evidence.is_near(tensor, evidence.target * ratio, abs(ratio)) for tensor in evidence.ranks
    ):
        yield _describe_ratio(ratio, evidence.axes)


def _describe_ratio(ratio: float, axes: Mapping[str, int]) -> Explanation:
    """The explanation of a tensor that is `ratio` times as large as it should be."""
    for names, size in _find_sizes(axes):
        over = " and ".join(names)
        if _is_near_number(ratio, size):
            predicate = (
                f"is {size} times as large as it should be, and {size} is the size of {over}"
            )
            return Explanation(
                Suspect.DOUBLE_REDUCTION, "", names, "sum", ratio, predicate=predicate
            )
        if _is_near_number(1 / ratio if ratio else 0.0, size):
            predicate = f"is 1/{size} of what it should be, and {size} is the size of {over}"
            return Explanation(
                Suspect.DOUBLE_REDUCTION, "", names, "mean", ratio, predicate=predicate
            )
    predicate = f"is {ratio:.4g} times what it should be"
    return Explanation(Suspect.SCALED, ratio=ratio, predicate=predicate)


def _find_sizes(axes: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], int]]:
    names = [name for name, size in axes.items() if size > 1]
    for count in range(1, len(names) + 1):
        for subset in itertools.combinations(names, count):
            yield subset, math.prod(axes[name] for name in subset)


def _find_median_ratio(value: torch.Tensor, target: torch.Tensor) -> float | None:
    """The median ratio of the elements that are not small; None if the target is zero."""
    size = target.abs()
    if not size.numel() or not bool(size.any()):
        return None
    large = size >= size[size > 0].median()
    return float((value[large] / target[large]).median())


def _is_near_number(ratio: float, number: int) -> bool:
    return math.isclose(ratio, number, rel_tol=1e-2)


def _find_own_ratios(comparison: TensorComparison, evidence: _Evidence) -> Iterator[Explanation]:
    """Shards with a different factor on each rank, such as means over different counts."""
    case, layout = comparison.case, comparison.layout
    if case.reference is None or not is_inexact(case.reference):
        return  # positions and counts are not scaled
    if layout is not None and not case.calls:
        shards = [to_fp64_on_cpu(tensor) for tensor in case.ranks if tensor is not None]
        yield from _match_ratios(
            evidence,
            shards,
            layout.split(evidence.target, shards),
            sharding_axes(layout, evidence.axes),
        )
    if layout is None and evidence.are_identical():
        for (name, size), dim in itertools.product(
            evidence.axes.items(), range(evidence.target.ndim)
        ):
            parts = evidence.target.chunk(size, dim)
            if 1 < size == len(parts):
                chunks = evidence.ranks[0].chunk(size, dim)
                yield from _match_ratios(evidence, chunks, parts, (name,))


def _match_ratios(
    evidence: _Evidence,
    shards: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    axes: tuple[str, ...],
) -> Iterator[Explanation]:
    ratios = []
    for shard, part in zip(shards, parts, strict=True):
        ratio = _find_median_ratio(shard, part)
        is_near = ratio is not None and evidence.is_near(shard, part * ratio, abs(ratio))
        is_zero = ratio is None and not bool(shard.any())
        if not is_near and not is_zero:
            return
        ratios.append(ratio)
    known = [(rank, ratio) for rank, ratio in enumerate(ratios) if ratio is not None]
    if len({round(ratio, 6) for _, ratio in known}) > 1:
        listed = ", ".join(f"{ratio:.4g} on rank {rank}" for rank, ratio in known[:_MAX_LISTED])
        more = ", …" if len(known) > _MAX_LISTED else ""
        clause = f"each rank's shard is off by a factor of its own: {listed}{more}"
        yield Explanation(Suspect.SCALED, clause, axes)


def sharding_axes(layout: Layout, axes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes that shard a tensor in this layout."""
    return tuple(name for name, dim in zip(axes, layout.dims, strict=True) if dim is not None)


def _find_slices(evidence: _Evidence) -> Iterator[Explanation]:
    """Shards that belong to another rank."""
    matches = []
    for (name, size), dim in itertools.product(evidence.axes.items(), range(evidence.target.ndim)):
        if 1 < size <= min(_MAX_CHUNKS, evidence.target.shape[dim]):
            wanted = [evidence.target] * len(evidence.ranks)
            orders = _find_chunk_orders(evidence, evidence.ranks, wanted, size=size, dim=dim)
            if orders is not None:
                matches.append((name, dim, orders))
                yield from _find_copies(evidence, name, dim, orders)
    for name, dim, orders in matches:
        moved = (
            (position, source)
            for order in orders
            for position, source in enumerate(order)
            if source != position
        )
        position, source = next(moved, (0, 0))
        if position != source:
            yield Explanation(
                Suspect.WRONG_SLICE,
                f"of {len(orders[0])} chunks along dim {dim}, chunk {source} is where chunk "
                f"{position} should be: a rank of {name} has another rank's shard",
                (name,),
            )


def _find_reduced_shards(evidence: _Evidence) -> Iterator[Explanation]:
    """Shards that were reduced over the axis that shards them: each is the sum or mean of all."""
    axes_by_reduction: dict[tuple[int, str], list[str]] = {}
    for (name, size), dim in itertools.product(evidence.axes.items(), range(evidence.target.ndim)):
        wanted = evidence.target.chunk(size, dim)
        if not 1 < size == len(wanted) or evidence.target.shape[dim] % size:
            continue
        total = torch.stack(wanted).sum(0)
        for divisor, verb in ((1, "summed"), (size, "averaged")):
            if all(
                evidence.is_near(chunk, total / divisor, size)
                for tensor in evidence.ranks
                for chunk in tensor.chunk(size, dim)
            ):
                axes_by_reduction.setdefault((dim, verb), []).append(name)
    for (dim, verb), names in axes_by_reduction.items():
        # Samples are sharded along the batch axes, and parameters along the other axes.
        likely = [name for name in names if (name in evidence.batch_axes) is evidence.is_forward]
        axes = tuple(likely or names)
        over = " or ".join(axes)
        yield Explanation(
            Suspect.WRONG_GROUP,
            axes=axes,
            reduction="sum" if verb == "summed" else "mean",
            remedy=f"Leave {over} out of the process group of the reduction; where all shards are "
            "needed, gather them."
            if evidence.is_forward
            else _suggest_smaller_group(over),
            predicate=f"is {verb} over {over}, although each rank of {over} has another shard of "
            f"it (dim {dim})",
        )


def _find_scattered(evidence: _Evidence) -> Iterator[Explanation]:
    """Partial sums that were reduce-scattered over one axis and gathered over another."""
    for (name, size), dim in itertools.product(evidence.axes.items(), range(evidence.target.ndim)):
        wanted = evidence.target.chunk(size, dim)
        if not 1 < size == len(wanted) or evidence.target.shape[dim] % size:
            continue
        totals = [torch.stack(tensor.chunk(size, dim)).sum(0) for tensor in evidence.ranks]
        for group_axes, lines in evidence.groups():
            index_of = {rank: index for line in lines for index, rank in enumerate(line)}
            if name in group_axes or len(lines[0]) != size:
                continue
            for divisor in (1, size, size * size):
                if all(
                    evidence.is_near(total / divisor, wanted[index_of[rank]])
                    for rank, total in enumerate(totals)
                ):
                    group_over = " and ".join(group_axes)
                    yield Explanation(
                        Suspect.WRONG_GROUP,
                        axes=(name,),
                        reduction="sum" if divisor == 1 else "mean",
                        predicate=f"is reduced and scattered over {group_over} instead of {name}: "
                        f"the sum of its chunks along dim {dim} is, up to a factor, the chunk of "
                        f"each rank's index along {group_over}",
                    )


def _find_own_slices(comparison: TensorComparison, evidence: _Evidence) -> Iterator[Explanation]:
    """Shards that belong to another rank, within tensors that are sharded along another dim."""
    case, layout = comparison.case, comparison.layout
    if layout is None or case.calls or evidence.target.numel() > _MAX_ELEMENTS:
        return
    shards = [to_fp64_on_cpu(tensor) for tensor in case.ranks if tensor is not None]
    parts = layout.split(evidence.target, shards)
    for (name, size), dim in itertools.product(evidence.axes.items(), range(evidence.target.ndim)):
        if 1 < size <= min(shard.shape[dim] for shard in shards):
            orders = _find_chunk_orders(evidence, shards, parts, size=size, dim=dim)
            if orders is not None:
                yield from _find_copies(evidence, name, dim, orders)


def _find_copies(
    evidence: _Evidence, name: str, dim: int, orders: Sequence[Sequence[int]]
) -> Iterator[Explanation]:
    """The same chunk repeated: sharded over one axis and gathered over another."""
    for group_axes, lines in evidence.groups():
        index_of = {rank: index for line in lines for index, rank in enumerate(line)}
        is_group_chunk = all(set(order) == {index_of[rank]} for rank, order in enumerate(orders))
        if name in group_axes or not is_group_chunk:
            continue
        over, size = " and ".join(group_axes), evidence.axes[name]
        chunk = f"along dim {dim} every rank has the chunk of its rank along {over}"
        if not evidence.is_forward:  # a gradient is gathered over the axis that shards its weight
            clause = f"{chunk}, where it should be that of its rank along {name}"
            yield Explanation(Suspect.WRONG_GROUP, clause, (name,))
            continue
        axes = [
            axis
            for axis, axis_size in evidence.axes.items()
            if axis_size == size and axis not in group_axes
        ]
        gathered = " or ".join(axes)
        yield Explanation(
            Suspect.WRONG_GROUP,
            f"{chunk}, {size} times: it is sharded over {over}, but gathered over {gathered}",
            (*group_axes, name),
            remedy="Scatter and gather with the same process group: that of "
            f"{over}, or that of {gathered}.",
        )


def _find_chunk_orders(
    evidence: _Evidence,
    values: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    *,
    size: int,
    dim: int,
) -> list[list[int]] | None:
    """For each rank and chunk, the index of the right chunk it equals; None if any equals none."""
    known: list[tuple[torch.Tensor, torch.Tensor, list[int]]] = []
    orders = []
    for value, target in zip(values, wanted, strict=True):
        same = (
            order
            for known_value, known_target, order in known
            if known_target is target and torch.equal(known_value, value)
        )
        order = next(same, None)
        if order is None:
            matched = _match_chunks(evidence, value.chunk(size, dim), target.chunk(size, dim))
            order = [chunk_index for chunk_index in matched if chunk_index is not None]
            if len(order) < len(matched):
                return None
            known.append((value, target, order))
        orders.append(order)
    return orders


def _match_chunks(
    evidence: _Evidence, values: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
) -> list[int | None]:
    order: list[int | None] = []
    for position, value in enumerate(values):
        candidates = sorted(range(len(wanted)), key=lambda candidate: candidate != position)
        order.append(
            next(
                (
                    candidate
                    for candidate in candidates
                    if wanted[candidate].shape == value.shape
                    and evidence.is_near(value, wanted[candidate])
                ),
                None,
            )
        )
    return order


def _find_order(evidence: _Evidence) -> Iterator[Explanation]:
    """The right values in another order, on every rank."""
    value, target = evidence.ranks[0], evidence.target
    if not evidence.are_identical():
        return
    for (name, size), dim in itertools.product(evidence.axes.items(), range(target.ndim)):
        for order in (Order.ZIGZAG, Order.STRIPED):
            layout = Layout((size,), (dim,), (order,))
            chunks = value.chunk(size, dim)
            joined = layout.join(chunks) if 1 < size == len(chunks) else None
            if joined is not None and evidence.is_near(joined[0], target):
                clause = f"along dim {dim} its values are still in the {order} order of {name}"
                yield Explanation(Suspect.PERMUTED, clause, (name,))
    if 1 < target.ndim <= _MAX_PERMUTED_DIMS:
        for dims in itertools.permutations(range(target.ndim)):
            moved = target.permute(dims).reshape(target.shape)
            if list(dims) != sorted(dims) and evidence.is_near(value, moved):
                clause = f"its dims are in the order {', '.join(map(str, dims))}"
                yield Explanation(Suspect.PERMUTED, clause)


def _find_values(evidence: _Evidence) -> Iterator[Explanation]:
    """The right values in any order."""
    value, target = (
        evidence.ranks[0].flatten().sort().values,
        evidence.target.flatten().sort().values,
    )
    is_small = 1 < target.numel() <= _MAX_ELEMENTS
    if is_small and evidence.are_identical() and evidence.is_near(value, target):
        yield Explanation(Suspect.PERMUTED, predicate="has the right values in another order")


def _find_dims(case: Case, floor: NoiseFloor, axes: Mapping[str, int]) -> Iterator[Explanation]:
    """Shards of a dim that was split into two, such as heads, sharded along the wrong one.

    Flattened over both dims the shards make up the right tensor: each rank has all of one dim
    and a part of the other, where it should be the other way round.
    """
    shards = [to_fp64_on_cpu(tensor) for tensor in case.ranks if tensor is not None]
    if case.target is None or case.calls or len(shards) < len(case.ranks):
        return
    target = to_fp64_on_cpu(case.target)
    if target.numel() > _MAX_ELEMENTS or any(shard.ndim != target.ndim for shard in shards):
        return
    for (index, (name, size)), (outer, inner) in itertools.product(
        enumerate(axes.items()), itertools.combinations(range(target.ndim), 2)
    ):
        is_split = all(
            shard.shape[inner] * size == target.shape[inner]
            and shard.shape[outer] == target.shape[outer]
            for shard in shards
        )
        if size < 2 or not is_split:
            continue
        # A matrix product flattens the batch and the heads into one dim.
        for factors in _factorize(target.shape[outer], size):
            flat = [_flatten(shard, outer, inner, factors) for shard in shards]
            wanted, count = _flatten(target, outer, inner, factors), factors[1]
            joined = [
                torch.cat([flat[rank] for rank in line], -1)
                for line in ranks_along(case.sizes, index)
            ]
            if all(
                full.shape == wanted.shape and floor.scale_by(4.0).allows(measure(full, wanted))
                for full in joined
            ):
                yield Explanation(
                    Suspect.WRONG_DIM,
                    f"each rank has {list(shards[0].shape)} of {list(target.shape)}: dim {inner} "
                    f"is sharded over {name} where dim {outer} should be, {count // size} of "
                    f"{count} on each rank",
                    (name,),
                )


def _flatten(
    tensor: torch.Tensor, outer: int, inner: int, factors: tuple[int, int, int]
) -> torch.Tensor:
    """Flatten the middle factor of the outer dim and the inner dim into the last dim."""
    moved = tensor.movedim((outer, inner), (-2, -1))
    split = moved.reshape(*moved.shape[:-2], *factors, moved.shape[-1])
    return split.transpose(-3, -2).flatten(-2)


def _factorize(size: int, divisor: int) -> Iterator[tuple[int, int, int]]:
    """All factorizations of a dim into three of which the middle is divisible; undivided first."""
    for rest in range(1, size // divisor + 1):
        if size % rest == 0 and (size // rest) % divisor == 0:
            for before in range(1, rest + 1):
                if rest % before == 0:
                    yield before, size // rest, rest // before


def _describe_right_ranks(evidence: _Evidence) -> Explanation:
    is_right = [evidence.is_near(tensor, evidence.target) for tensor in evidence.ranks]
    if not any(is_right) or all(is_right):
        return UNKNOWN
    right = ", ".join(str(rank) for rank, is_it in enumerate(is_right) if is_it)
    return Explanation(Suspect.UNKNOWN, predicate=f"matches on rank {right} only")


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if is_finite(tensor) else torch.where(torch.isfinite(tensor), tensor, 0.0)
