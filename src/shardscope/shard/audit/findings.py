"""Findings on placements, FSDP groups and the order of wrappers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from shardscope._torch.autograd import is_checkpoint_wrapper
from shardscope._torch.mesh import axis_names
from shardscope._torch.modules import (
    every_module,
    is_compile_wrapper,
    is_compiled,
    named_modules_with_aliases,
    unwrap,
    wrapped_by,
)
from shardscope.record import Finding, MarkKind, Module, Severity
from shardscope.record.layer_names import fold_layers
from shardscope.record.units import format_bytes
from shardscope.shard.audit.sharded_tensors import ModelInventory, TensorEntry
from shardscope.shard.audit.slices import shard_sizes

RIGHT_ORDER = "Apply tensor parallelism first, then checkpointing, then torch.compile, then FSDP."


def fold_names(entries: Iterable[TensorEntry]) -> list[tuple[str, list[TensorEntry]]]:
    """Group tensors of repeated layers under one name: `layers.*.up.weight (×32)`."""
    folded: dict[tuple[object, ...], list[TensorEntry]] = {}
    for entry in entries:
        pattern = fold_layers(entry.name)
        folded.setdefault((pattern, entry.record.shape, entry.record.dtype), []).append(entry)
    return [(_name_all(group), group) for group in folded.values()]


def _name_all(entries: list[TensorEntry]) -> str:
    if len(entries) == 1:
        return entries[0].name
    return f"{fold_layers(entries[0].name)} (×{len(entries)})"


def join_names(names: Sequence[str]) -> str:
    """Join names for a sentence: `dp`, `dp and tp`."""
    return " and ".join(names)


_LARGE_BYTES = 16 * 1024**2
_MAX_SIZES = 8


def find_replicated(inventory: ModelInventory) -> Iterator[Finding]:
    """Find large parameters that are sharded into fewer parts than other parameters.

    Parts are counted, not axes: a flattened mesh shards over one axis what others shard over two.
    """
    shard_axes = _all_shard_axes(inventory.tensors)
    max_parts = max((_num_parts(entry) for entry in inventory.tensors), default=1)
    wasteful = [
        entry
        for entry in inventory.tensors
        if _num_parts(entry) < max_parts
        and entry.local_bytes >= _LARGE_BYTES
        and not entry.record.is_buffer
        and not _is_flat(entry)
        and inventory.is_layout_known(entry)
    ]
    for name, group in fold_names(wasteful):
        yield _describe_replicated(name, group, shard_axes, max_parts)


def _describe_replicated(
    name: str, group: list[TensorEntry], shard_axes: dict[str, int], max_parts: int
) -> Finding:
    each, num_copies = group[0].local_bytes, max_parts // _num_parts(group[0])
    axes = [axis for axis in shard_axes if axis not in _shard_axes(group[0])]
    is_exact = math.prod(shard_axes[axis] for axis in axes) == num_copies
    where = f"of {join_names(axes)}, which shards" if is_exact else "along axes that shard"
    along = join_names(axes) if is_exact else "those axes"
    return Finding(
        rule="replicated",
        severity=Severity.WARNING,
        subject=name,
        fact=f"{format_bytes(each)} are the same on {num_copies} ranks {where} other parameters",
        remedy=f"Shard it along {along} too, in the plan or with fully_shard: each rank would hold "
        f"{format_bytes(each * len(group) // num_copies)} instead of "
        f"{format_bytes(each * len(group))}.",
        memory_bytes=each * len(group) - each * len(group) // num_copies,
    )


def _num_parts(entry: TensorEntry) -> int:
    return math.prod(size for axes in _shard_axes_by_dim(entry).values() for size in axes.values())


def find_uneven(inventory: ModelInventory) -> Iterator[Finding]:
    """Find dims whose size is not a multiple of the axes that shard them."""
    uneven: defaultdict[tuple[int, int, tuple[tuple[str, int], ...]], list[TensorEntry]]
    uneven = defaultdict(list)
    for entry in inventory.tensors:
        for dim, axes in _shard_axes_by_dim(entry).items():
            size = entry.record.shape[dim]
            if size % math.prod(axes.values()):
                uneven[dim, size, tuple(axes.items())].append(entry)
    for (dim, size, dim_axes), entries in uneven.items():
        for name, group in fold_names(entries):
            yield _describe_uneven(name, group[0], dim, size, dict(dim_axes))


def _describe_uneven(
    name: str, entry: TensorEntry, dim: int, size: int, axes: dict[str, int]
) -> Finding:
    assert isinstance(entry.tensor, DTensor)
    parts = shard_sizes(entry.tensor, dim)
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


def find_mixed_meshes(inventory: ModelInventory) -> Iterator[Finding]:
    """Find trained parameters on several meshes, or on none: torch ops reject such mixtures."""
    meshes: dict[DeviceMesh | None, list[TensorEntry]] = {}
    for entry in inventory.tensors:
        if entry.record.is_trainable and not entry.record.is_buffer and not _is_flat(entry):
            meshes.setdefault(entry.mesh, []).append(entry)
    if len(meshes) < 2:
        return
    sides = sorted(meshes.items(), key=lambda side: -len(side[1]))
    mesh_list = "; ".join(f"{_name_mesh(mesh)}: {_count(entries)}" for mesh, entries in sides)
    consequence = "gradient clipping over all of them refuses"
    if None in meshes:
        consequence = "gradient clipping over all of them and foreach or fused optimizers refuse"
    yield Finding(
        rule="mixed-meshes",
        severity=Severity.WARNING,
        subject=fold_names(sides[-1][1])[0][0],
        fact=f"trained parameters are on different meshes ({mesh_list}), which {consequence}",
        remedy="Put all on one mesh (SequenceParallel or Replicate for those that the plan leaves "
        "out), or clip and step each mesh's parameters separately.",
    )


def _name_mesh(mesh: DeviceMesh | None) -> str:
    return "no mesh" if mesh is None else f"({', '.join(axis_names(mesh))})"


def _count(entries: list[TensorEntry]) -> str:
    first = fold_names(entries)[0][0]
    return f"{len(entries)}, such as {first}" if len(entries) > 1 else first


def _format_sizes(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= _MAX_SIZES:
        return ", ".join(map(str, sizes))
    counts = Counter(sizes)
    return ", ".join(f"{size} on {count}" for size, count in sorted(counts.items())[::-1])


def _is_flat(entry: TensorEntry) -> bool:
    """Whether a tensor is part of a flat parameter of FSDP1, which is not a DTensor."""
    return entry.record.fsdp_group is not None and entry.mesh is None


def _all_shard_axes(tensors: Iterable[TensorEntry]) -> dict[str, int]:
    """The axes that shard any tensor, with their sizes."""
    axes: dict[str, int] = {}
    for entry in tensors:
        for dim_axes in _shard_axes_by_dim(entry).values():
            axes |= {axis: size for axis, size in dim_axes.items() if size > 1}
    return axes


def _shard_axes(entry: TensorEntry) -> set[str]:
    return {axis for dim_axes in _shard_axes_by_dim(entry).values() for axis in dim_axes}


def _shard_axes_by_dim(entry: TensorEntry) -> dict[int, dict[str, int]]:
    """For each sharded dim, the axes that shard it, with their sizes."""
    axes_by_dim: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for axis_type in entry.types:
        if axis_type.dim is not None:
            axes_by_dim[axis_type.dim][axis_type.axis] = axis_type.size
    if isinstance(entry.tensor, DTensor):
        mesh = entry.tensor.device_mesh
        for axis, size, placement in zip(
            axis_names(mesh), mesh.shape, entry.tensor.placements, strict=True
        ):
            if not placement.is_replicate() and not placement.is_partial():
                axes_by_dim[getattr(placement, "dim", 0)][axis] = size
    return axes_by_dim


def find_root_not_sharded(inventory: ModelInventory) -> Iterator[Finding]:
    """Find models in which FSDP is applied to submodules but not to the model itself."""
    kinds = (FSDPModule, FullyShardedDataParallel)
    if not inventory.groups or any(
        isinstance(module, kinds) for module in _wrapped(inventory.model)
    ):
        return
    names = [module.name for module in inventory.modules if _is_under_fsdp(module)]
    yield Finding(
        rule="root-not-sharded",
        severity=Severity.WARNING,
        subject=type(unwrap(inventory.model)).__name__,
        fact=f"{len(names)} of its modules are under FSDP ({names[0]}, …) and the model itself "
        "is not, so each is its own FSDP root: nothing is prefetched, and parameters "
        "outside them stay unsharded",
        remedy="Call fully_shard(model) last, after its parts.",
    )


def _is_under_fsdp(module: Module) -> bool:
    return any(mark.kind in (MarkKind.FULLY_SHARD, MarkKind.FSDP1) for mark in module.marks)


def _wrapped(module: nn.Module) -> Iterator[nn.Module]:
    """A module and the modules it wraps, down to the user's own."""
    while True:
        yield module
        inner = wrapped_by(module)
        if inner is None:
            return
        module = inner


def name_shared_parameters(inventory: ModelInventory) -> list[dict[str, str]]:
    """By name, the modules of each parameter that several FSDP groups manage."""
    order = {entry.name: index for index, entry in enumerate(inventory.tensors)}
    shared = []
    for locations in inventory.shared:
        modules = [(inventory.name_of(module), name) for module, name in locations]
        names = {f"{module}.{name}".lstrip("."): module or "model" for module, name in modules}
        shared.append(dict(sorted(names.items(), key=lambda item: order[item[0]])))
    return shared


def describe_shared_parameter(modules: dict[str, str]) -> Finding:
    """The finding about a parameter that several FSDP groups manage."""
    return Finding(
        rule="tied-weights",
        severity=Severity.ERROR,
        subject=", ".join(modules),
        fact=f"they were one parameter and are now in {len(modules)} FSDP groups, which torch "
        "refuses when the model is first called",
        remedy=f"Call fully_shard([{', '.join(modules.values())}]) once, instead of fully_shard "
        "for each of these modules: a single group then manages the parameter.",
    )


def find_outside_groups(inventory: ModelInventory) -> Iterator[Finding]:
    """Find trained parameters outside of every FSDP group, if there are groups."""
    if not inventory.groups:
        return
    outside = [
        entry
        for entry in inventory.tensors
        if entry.record.is_trainable
        and not entry.record.is_buffer
        and entry.record.fsdp_group is None
    ]
    for name, group in fold_names(outside):
        yield Finding(
            rule="outside-groups",
            severity=Severity.WARNING,
            subject=name,
            fact=f"no FSDP group manages it ({format_bytes(group[0].local_bytes)} on every "
            "rank): its gradient is not reduced",
            remedy="Call fully_shard on a module that holds it, or, if FSDP ignores it on "
            "purpose, reduce its gradient yourself.",
        )


def find_wrong_order(inventory: ModelInventory) -> Iterator[Finding]:
    """Find wrappers in the wrong order; repeated layers give one finding."""
    tops = {id(module) for group in inventory.groups for module in group.modules}
    wrong: dict[tuple[str, str], list[str]] = {}
    for _, module in named_modules_with_aliases(inventory.model, keep_wrappers=True):
        fact = None
        if is_checkpoint_wrapper(module):
            fact = _checkpoint_fact(module, tops)
        elif is_compiled(module):
            fact = _compile_fact(module, tops)
        if fact is not None:
            name = inventory.name_of(module) or type(unwrap(module)).__name__
            wrong.setdefault((fold_layers(name), fact), []).append(name)
    for (pattern, fact), names in wrong.items():
        yield Finding(
            rule="wrong-order",
            severity=Severity.WARNING,
            subject=names[0] if len(names) == 1 else f"{pattern} (×{len(names)})",
            fact=fact,
            remedy=RIGHT_ORDER,
        )


def _checkpoint_fact(wrapper: nn.Module, tops: set[int]) -> str | None:
    inner = list(_wrapped(wrapper))[1:]
    if id(wrapper) not in tops and any(id(module) in tops for module in inner):
        return "checkpointing wraps FSDP, whose hooks then run again during recomputation"
    if any(is_compile_wrapper(module) for module in inner):
        return "checkpointing wraps torch.compile, whose graph it cannot see into"
    return None


def _compile_fact(module: nn.Module, tops: set[int]) -> str | None:
    within = [submodule for submodule in every_module(module) if submodule is not module]
    num_groups = sum(id(submodule) in tops for submodule in within)
    if num_groups == 0:
        return None
    modules = "an FSDP module" if num_groups == 1 else f"{num_groups} FSDP modules"
    return f"torch.compile wraps {modules}: their hooks break its graph at each call"
