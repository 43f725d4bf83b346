"""Recognizes wrong shards: of another rank, along the wrong dim, or in another order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from shardscope.numerics import NoiseFloor, find_rms, to_fp64_on_cpu
from shardscope.parallel.equivalence import (
    Layout,
    Order,
    TensorComparison,
    compare_case,
    ranks_along,
)
from shardscope.parallel.parity.evidence import (
    MAX_ELEMENTS,
    Evidence,
    sharding_axes,
    shards_in_fp64,
    target_in_fp64,
)
from shardscope.parallel.parity.explanation import Explanation
from shardscope.record import TOLERABLE, Agreement, Suspect

_MAX_PERMUTED_DIMS = 5
_MAX_CHUNKS = 64
_MAX_SHIFT, _MIN_SHIFTED = 16, 32  # elements of a flattened tensor
_MAX_SAMPLES = 4096  # that are compared with each other


def find_slices(evidence: Evidence) -> Iterator[Explanation]:
    """Shards that belong to another rank."""
    matches = []
    for name, size, dim in evidence.sharded_dims():
        if 1 < size <= min(_MAX_CHUNKS, evidence.target.shape[dim]):
            wanted = [evidence.target] * len(evidence.ranks)
            orders = _find_chunk_orders(evidence, evidence.ranks, wanted, size=size, dim=dim)
            if orders is not None:
                matches.append((name, dim, orders))
                yield from _find_repeated_chunks(evidence, name, dim, orders)
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


def explain_repeated_samples(comparison: TensorComparison) -> Explanation | None:
    """Recognize inputs of which several ranks have the same samples, while others are on none."""
    counts = _count_samples(comparison)
    if counts is None:
        return None
    num_missing = int((counts == 0).sum())
    num_repeated = int((counts > counts.mean()).sum())
    if int(counts.sum()) % len(counts) or not num_missing or not num_repeated:
        return None
    return Explanation(
        Suspect.WRONG_SLICE,
        f"of {len(counts)} samples {num_missing} are on no rank, and {num_repeated} are repeated",
        remedy="Divide one order of the samples over the ranks: shuffle with the same seed on all "
        "of them, and give each rank the part of its own rank, as DistributedSampler does.",
    )


def explain_number_of_samples(comparison: TensorComparison) -> Explanation | None:
    """Recognize tensors of more or fewer samples than those of the single device."""
    counts = _count_samples(comparison)
    if counts is None or int(counts.sum()) % len(counts) == 0:
        return None
    num_missing, num_repeated = int((counts == 0).sum()), int((counts > 1).sum())
    clauses = [f"{num_missing} are on no rank"] if num_missing else []
    clauses += [f"{num_repeated} are on the ranks more than once"] if num_repeated else []
    return Explanation(
        Suspect.WRONG_SLICE,
        f"of {len(counts)} samples {' and '.join(clauses)}",
        remedy="Leave out the samples that a sampler repeats to give all ranks equally many, and "
        "keep the last ones that it drops: count each sample once.",
    )


def _count_samples(comparison: TensorComparison) -> torch.Tensor | None:
    """How many ranks have each of the single device's samples; None if they have others."""
    case, dim = comparison.case, comparison.case.batch_dim
    target, shards = target_in_fp64(case), shards_in_fp64(case)
    if target.ndim < 2 or target.ndim <= dim or not 1 < target.shape[dim] <= _MAX_SAMPLES:
        return None
    wanted = target.movedim(dim, 0).flatten(1)
    counts = torch.zeros(len(wanted))
    for shard in shards:
        rows = shard.movedim(dim, 0).flatten(1) if shard.ndim == target.ndim else shard[None]
        if rows.shape[1:] != wanted.shape[1:] or not len(rows):
            return None
        nearest = torch.cdist(rows, wanted).argmin(1)
        limit = case.floor or NoiseFloor(0.0, 0.0, find_rms(target), 0.0, 1.0)
        if not limit.covers(rows, wanted[nearest]):
            return None
        counts += nearest.bincount(minlength=len(wanted))
    return counts


def find_slices_of_each_rank(evidence: Evidence) -> Iterator[Explanation]:
    """Shards that belong to another rank, within tensors that are sharded along another dim."""
    shards, layout = evidence.shards, evidence.layout
    if layout is None or evidence.case.calls or evidence.target.numel() > MAX_ELEMENTS:
        return
    parts = layout.split(evidence.target, shards)
    for name, size, dim in evidence.sharded_dims():
        if 1 < size <= min(shard.shape[dim] for shard in shards):
            orders = _find_chunk_orders(evidence, shards, parts, size=size, dim=dim)
            if orders is not None:
                yield from _find_repeated_chunks(evidence, name, dim, orders)


def find_shards_of_others(evidence: Evidence) -> Iterator[Explanation]:
    """Shards of which some ranks have those of ranks that differ along several axes."""
    shards, layout = evidence.shards, evidence.layout
    if layout is None or evidence.case.calls or evidence.target.numel() > MAX_ELEMENTS:
        return
    parts = layout.split(evidence.target, shards)
    owners = []
    for rank, shard in enumerate(shards):
        candidates = [rank, *(owner for owner in range(len(parts)) if owner != rank)]
        same = (
            owner
            for owner in candidates
            if parts[owner].shape == shard.shape and evidence.is_near(shard, parts[owner])
        )
        owners.append(next(same, None))
    moved = [(rank, owner) for rank, owner in enumerate(owners) if owner != rank]
    if None in owners or not moved:
        return
    listed = ", ".join(f"rank {rank} has that of rank {owner}" for rank, owner in moved[:4])
    yield Explanation(
        Suspect.WRONG_SLICE,
        f"of the shards ({layout.describe(list(evidence.axes))}) {listed}",
        sharding_axes(layout, evidence.axes),
    )


def _find_repeated_chunks(
    evidence: Evidence, name: str, dim: int, orders: Sequence[Sequence[int]]
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
    evidence: Evidence,
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
    evidence: Evidence, values: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
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


def find_order(evidence: Evidence) -> Iterator[Explanation]:
    """The right values in another order, on every rank."""
    value, target = evidence.ranks[0], evidence.target
    if not evidence.are_identical():
        return
    for name, size, dim in evidence.sharded_dims():
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


def find_shifted_values(evidence: Evidence) -> Iterator[Explanation]:
    """The right values, shifted by a few elements, as where a flat buffer is read too early."""
    value, target = evidence.ranks[0].flatten(), evidence.target.flatten()
    if not _MIN_SHIFTED <= target.numel() <= MAX_ELEMENTS or not evidence.are_identical():
        return
    for shift in range(1, _MAX_SHIFT + 1):
        late, early = target[:-shift], target[shift:]
        for part, wanted, where in (
            (value[shift:], late, "late"),
            (value[:-shift], early, "early"),
        ):
            if evidence.is_near(part, wanted):
                yield Explanation(
                    Suspect.WRONG_SLICE,
                    predicate=f"has its values {shift} elements too {where}",
                    remedy="Read it at its own offset: in a flat buffer, count the padding of the "
                    "parameters before it.",
                )


def find_shuffled_values(evidence: Evidence) -> Iterator[Explanation]:
    """The right values in any order."""
    value, target = (
        evidence.ranks[0].flatten().sort().values,
        evidence.target.flatten().sort().values,
    )
    is_small = 1 < target.numel() <= MAX_ELEMENTS
    if is_small and evidence.are_identical() and evidence.is_near(value, target):
        yield Explanation(Suspect.PERMUTED, predicate="has the right values in another order")


def find_wrong_dim(evidence: Evidence) -> Iterator[Explanation]:
    """Shards of a dim that was split into two, such as heads, sharded along the wrong one.

    Flattened over both dims the shards make up the right tensor: each rank has all of one dim
    and a part of the other, where it should be the other way round.
    """
    case, shards, target = evidence.case, evidence.shards, evidence.exact_target
    if case.calls or len(shards) < len(case.ranks):
        return
    if target.numel() > MAX_ELEMENTS or any(shard.ndim != target.ndim for shard in shards):
        return
    for (index, (name, size)), (outer, inner) in itertools.product(
        enumerate(evidence.axes.items()), itertools.combinations(range(target.ndim), 2)
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
                full.shape == wanted.shape and evidence.floor.scale_by(4.0).covers(full, wanted)
                for full in joined
            ):
                yield Explanation(
                    Suspect.WRONG_DIM,
                    f"each rank has {list(shards[0].shape)} of {list(target.shape)}: dim {inner} "
                    f"is sharded over {name} where dim {outer} should be, {count // size} of "
                    f"{count} on each rank",
                    (name,),
                )


def explain_gathered(comparison: TensorComparison, axes: Mapping[str, int]) -> Explanation | None:
    """Recognize shards along one dim that were gathered along another.

    Such as keys of shape [batch, sequence / n, heads] whose shards are concatenated along the
    heads: each rank has the shape [batch, sequence / n, n * heads].
    """
    case, target = comparison.case, comparison.case.reference
    tensors = [tensor for tensor in case.ranks if tensor is not None]
    if comparison.verdict.agreement is not Agreement.RESHAPED or case.calls or target is None:
        return None
    if len(tensors) < len(case.ranks) or any(tensor.ndim != target.ndim for tensor in tensors):
        return None
    for (index, (name, size)), dim in itertools.product(
        enumerate(axes.items()), range(target.ndim)
    ):
        if size < 2 or any(tensor.shape[dim] != size * target.shape[dim] for tensor in tensors):
            continue
        shards = _find_gathered_shards(tensors, ranks_along(case.sizes, index), dim)
        if shards is None:
            continue
        compared = compare_case(replace(case, ranks=shards))
        sharded_dim = None if compared.layout is None else compared.layout.dims[index]
        if compared.verdict.agreement in TOLERABLE and sharded_dim is not None:
            return Explanation(
                Suspect.WRONG_DIM,
                axes=(name,),
                predicate=f"has the shape {list(tensors[0].shape)} instead of "
                f"{list(target.shape)}: it is sharded over {name} along dim {sharded_dim}, but "
                f"gathered along dim {dim}",
                remedy=f"Gather it over {name} along dim {sharded_dim}.",
            )
    return None


def _find_gathered_shards(
    tensors: Sequence[torch.Tensor], lines: Iterable[Sequence[int]], dim: int
) -> tuple[torch.Tensor, ...] | None:
    """The shard of each rank, if the ranks of each line hold their shards gathered along a dim."""
    shards = list(tensors)
    for line in lines:
        for position, rank in enumerate(line):
            shards[rank] = tensors[rank].chunk(len(line), dim)[position]
        gathered = torch.cat([shards[rank] for rank in line], dim)
        if not all(torch.equal(tensors[rank], gathered) for rank in line):
            return None
    return tuple(shards)


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


def explain_added_rows(
    comparison: TensorComparison, weights: Iterable[torch.Tensor]
) -> Explanation | None:
    """Recognize rows to which another row of an embedding is added, as by a second rank."""
    full = comparison.full_in_fp64()
    target, floor = target_in_fp64(comparison.case), comparison.case.floor
    if floor is None or not full or any(tensor.shape != target.shape for tensor in full):
        return None
    size = target.shape[-1] if target.ndim else 0
    for weight in weights:
        rows = to_fp64_on_cpu(weight) if weight.ndim == 2 and weight.shape[1] == size else None
        if rows is None or rows.numel() > MAX_ELEMENTS:
            continue
        excess = (full[0] - target).reshape(-1, size)
        is_wrong = ~torch.isclose(excess, torch.zeros(()).double(), atol=floor.scale * 1e-4).all(1)
        wrong = excess[is_wrong]
        if not 0 < len(wrong) <= _MAX_SAMPLES or len(rows) > _MAX_SAMPLES:
            continue
        nearest = rows[torch.cdist(wrong, rows).argmin(1)]
        if floor.scale_by(4.0).covers(wrong, nearest):
            return Explanation(
                Suspect.DOUBLE_REDUCTION,
                f"to {len(wrong)} of {len(excess)} rows another row of its weight is added: "
                "several ranks look up one index, of which all but one should add zeros",
                reduction="sum",
                remedy="Let each rank look up the indices of its own part of the vocabulary only: "
                "the end of a part is the start of the next.",
            )
    return None


def explain_fused(
    inputs: Sequence[TensorComparison],
    axes: Mapping[str, int],
    same_shaped: Sequence[torch.Tensor] = (),
) -> Explanation | None:
    """Recognize a fused weight that was sharded as one: shards of another input of the op.

    `same_shaped` are tensors of the single device that other ops take in the same module.
    """
    for index, comparison in enumerate(inputs):
        case, floor = comparison.case, comparison.case.floor
        shards = [tensor for tensor in case.ranks if tensor is not None]
        if not comparison.full or floor is None or case.reference is None or case.calls:
            continue
        for (name, size), dim in itertools.product(axes.items(), range(case.reference.ndim)):
            chunks = [
                (source, chunk)
                for source, tensor in enumerate([*(i.case.reference for i in inputs), *same_shaped])
                if tensor is not None and tensor.ndim > dim
                for chunk in tensor.chunk(size, dim)
            ]
            sources = [
                [
                    source
                    for source, chunk in chunks
                    if chunk.shape == shard.shape and floor.scale_by(4.0).covers(shard, chunk)
                ]
                for shard in shards
            ]
            wrong = [
                rank
                for rank, candidates in enumerate(sources)
                if candidates and index not in candidates
            ]
            if size > 1 and all(sources) and wrong:
                source = sources[wrong[0]][0]
                of_what = f"its input {source}" if source < len(inputs) else "another tensor"
                return Explanation(
                    Suspect.WRONG_SLICE,
                    f"on rank {wrong[0]} its input {index} is a shard of what {of_what} "
                    f"should be: parts of one tensor are sharded over "
                    f"{name} as if they were one part",
                    (name,),
                    remedy="Shard each part of a fused weight, such as q, k and v, by itself, so "
                    "that every rank has its share of each of them.",
                )
    return None
