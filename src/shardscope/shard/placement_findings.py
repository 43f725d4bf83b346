"""Findings about where tensors lie: replicated, uneven, on meshes that do not go together."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardscope._torch.meshes import axis_names
from shardscope.record import Finding, Severity
from shardscope.record.words import format_bytes
from shardscope.shard.sayings import fold_names, join_names
from shardscope.shard.slices import cut_sizes
from shardscope.shard.tensors import Held, Holdings

__all__ = ["find_mixed_meshes", "find_replicated", "find_uneven"]

_LARGE_BYTES = 16 * 1024**2
_MAX_SIZES = 8


def find_replicated(held: Holdings) -> Iterator[Finding]:
    """Large parameters that lie in fewer parts than others do.

    Parts are counted, not axes: a flattened mesh cuts by one axis what others cut by two.
    """
    cutting = _cutting_axes(held.tensors)
    most = max((_num_parts(one) for one in held.tensors), default=1)
    wasteful = [
        one
        for one in held.tensors
        if _num_parts(one) < most
        and one.local_bytes >= _LARGE_BYTES
        and not one.record.is_buffer
        and not _is_flat(one)
    ]
    for name, same in fold_names(wasteful):
        yield _describe_replicated(name, same, cutting, most)


def _describe_replicated(
    name: str, same: list[Held], cutting: dict[str, int], most: int
) -> Finding:
    each, num_copies = same[0].local_bytes, most // _num_parts(same[0])
    axes = [axis for axis in cutting if axis not in _cut_axes(same[0])]
    is_told = math.prod(cutting[axis] for axis in axes) == num_copies
    where = f"of {join_names(axes)}, which shards" if is_told else "along axes that shard"
    along = join_names(axes) if is_told else "those axes"
    return Finding(
        rule="replicated",
        severity=Severity.WARNING,
        subject=name,
        fact=f"{format_bytes(each)} are the same on {num_copies} ranks {where} other parameters",
        remedy=f"Shard it along {along} too, in the plan or with fully_shard: each rank would hold "
        f"{format_bytes(each * len(same) // num_copies)} instead of "
        f"{format_bytes(each * len(same))}.",
    )


def _num_parts(one: Held) -> int:
    return math.prod(size for cuts in _cuts(one).values() for size in cuts.values())


def find_uneven(held: Holdings) -> Iterator[Finding]:
    """Dims that do not divide by the axes that cut them."""
    uneven: defaultdict[tuple[int, int, tuple[tuple[str, int], ...]], list[Held]]
    uneven = defaultdict(list)
    for one in held.tensors:
        for dim, axes in _cuts(one).items():
            size = one.record.shape[dim]
            if size % math.prod(axes.values()):
                uneven[dim, size, tuple(axes.items())].append(one)
    for (dim, size, cuts), ones in uneven.items():
        for name, same in fold_names(ones):
            yield _describe_uneven(name, same[0], dim, size, dict(cuts))


def _describe_uneven(name: str, one: Held, dim: int, size: int, axes: dict[str, int]) -> Finding:
    assert isinstance(one.tensor, DTensor)
    parts = cut_sizes(one.tensor, dim)
    num_parts = math.prod(axes.values())
    return Finding(
        rule="uneven-shards",
        severity=Severity.INFO if min(parts) else Severity.WARNING,
        subject=name,
        fact=f"dim {dim} of {size} does not divide by {join_names(tuple(axes))} of "
        f"{'×'.join(map(str, axes.values()))}: its ranks hold {_format_sizes(parts)}",
        remedy=f"Make it a multiple of {num_parts}, as by padding, or choose another mesh: ranks "
        "pad, wait for the largest shard, and code that assumes equal shards is wrong.",
    )


def find_mixed_meshes(held: Holdings) -> Iterator[Finding]:
    """Trained parameters of several meshes, or of none: torch does not take them together."""
    meshes: dict[DeviceMesh | None, list[Held]] = {}
    for one in held.tensors:
        if one.record.is_trainable and not one.record.is_buffer and not _is_flat(one):
            meshes.setdefault(one.mesh, []).append(one)
    if len(meshes) < 2:
        return
    sides = sorted(meshes.items(), key=lambda side: -len(side[1]))
    told = "; ".join(f"{_name_mesh(mesh)}: {_count(ones)}" for mesh, ones in sides)
    refused = "gradient clipping over all of them refuses"
    if None in meshes:
        refused = "gradient clipping over all of them and foreach or fused optimizers refuse"
    yield Finding(
        rule="mixed-meshes",
        severity=Severity.WARNING,
        subject=fold_names(sides[-1][1])[0][0],
        fact=f"trained parameters are on different meshes ({told}), which {refused}",
        remedy="Put all on one mesh (SequenceParallel or Replicate for those that the plan leaves "
        "out), or clip and step each mesh's parameters separately.",
    )


def _name_mesh(mesh: DeviceMesh | None) -> str:
    return "no mesh" if mesh is None else f"({', '.join(axis_names(mesh))})"


def _count(ones: list[Held]) -> str:
    first = fold_names(ones)[0][0]
    return f"{len(ones)}, such as {first}" if len(ones) > 1 else first


def _format_sizes(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= _MAX_SIZES:
        return ", ".join(map(str, sizes))
    counts = Counter(sizes)
    return ", ".join(f"{size} on {count}" for size, count in sorted(counts.items())[::-1])


def _is_flat(one: Held) -> bool:
    """Whether FSDP1 keeps it, in a flat parameter that is no DTensor."""
    return one.record.fsdp_group is not None and one.mesh is None


def _cutting_axes(tensors: Iterable[Held]) -> dict[str, int]:
    """The axes that cut any tensor, with their sizes."""
    axes: dict[str, int] = {}
    for one in tensors:
        for cuts in _cuts(one).values():
            axes |= {axis: size for axis, size in cuts.items() if size > 1}
    return axes


def _cut_axes(one: Held) -> set[str]:
    return {axis for cuts in _cuts(one).values() for axis in cuts}


def _cuts(one: Held) -> dict[int, dict[str, int]]:
    """By dim, the axes that cut it, with their sizes."""
    cuts: defaultdict[int, dict[str, int]] = defaultdict(dict)
    if isinstance(one.tensor, DTensor):
        mesh = one.tensor.device_mesh
        for axis, size, placement in zip(
            axis_names(mesh), mesh.shape, one.tensor.placements, strict=True
        ):
            if not placement.is_replicate() and not placement.is_partial():
                cuts[getattr(placement, "dim", 0)][axis] = size
    return cuts
