"""Placements of parameters and buffers: which dim of each is sharded along each mesh axis."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import final

from shardscope.errors import PlanError
from shardscope.parallel.plan.mesh_entries import Axes, MeshEntry
from shardscope.parallel.plan.program_index import ModuleInfo, ProgramIndex
from shardscope.plan import PlanMatcher
from shardscope.plan.placements import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Size,
    describe_placement,
)
from shardscope.plan.styles import (
    LINEAR,
    TRANSPOSED_LINEAR,
    ClassShardings,
    Colwise,
    ModuleSharding,
    Parts,
    Rowwise,
    Sequence,
    ShardingStyle,
    Way,
    WeightStyle,
    find_class_shardings,
    torch_first,
    weight_style,
)


def shard_in_blocks(
    style: ShardingStyle | Shard, dim: int, size: int, *, over: str, ranks: int, what: str
) -> Shard:
    """The placement that shards `dim`, of `size`, by the fused parts and heads of a style.

    `over` names the axes (`tp=8`) that make `ranks` shards, and `what` the tensor.
    """
    dim_text = f"dim {dim} of {what} ({size})"
    if isinstance(style, Shard):
        parts = _parts(describe_placement(style), style.segments or style.outer, size, dim_text)
    elif style.fused is None and isinstance(style.heads, tuple):
        parts = _parts_of_heads(style.heads, size, dim_text)
    else:
        parts = _parts(repr(style), style.fused, size, dim_text)
    if not isinstance(style, Shard):
        _check_heads(style.heads, parts, over=over, ranks=ranks, what=what)
    if len(parts) == 1:
        return Shard(dim)
    _check_parts(parts, over=over, ranks=ranks, dim_text=dim_text)
    is_even = len(set(parts)) == 1
    return Shard(dim, outer=len(parts)) if is_even else Shard(dim, segments=parts)


def _check_parts(parts: tuple[int, ...], *, over: str, ranks: int, dim_text: str) -> None:
    uneven = next((part for part in parts if part % ranks), None)
    if uneven is not None:
        raise PlanError(
            f"The part of {uneven} in {dim_text} does not divide over {over}. Choose an axis size "
            "that divides it, or keep the tensor replicated with Replicated()."
        )


def _parts(style_text: str, fused: Parts, size: int, dim_text: str) -> tuple[int, ...]:
    """The sizes of the parts of the dim."""
    if isinstance(fused, tuple):
        if sum(fused) != size:
            raise PlanError(
                f"{style_text} names parts of {' + '.join(map(str, fused))} = {sum(fused)}, but "
                f"{dim_text} "
                "is not that long. Give the sizes of its parts."
            )
        return fused
    count = fused or 1
    if size % count:
        raise PlanError(
            f"{style_text} has {count} equal parts, but {dim_text} does not divide by that. Give "
            "the "
            "number of its parts, or their sizes."
        )
    return (size // count,) * count


def _parts_of_heads(heads: tuple[int, ...], size: int, dim_text: str) -> tuple[int, ...]:
    if size % sum(heads):
        raise PlanError(
            f"heads={heads} makes {sum(heads)} heads of one size, but {dim_text} does not divide "
            "by "
            "that. Give the heads that it has, or the sizes of its parts with fused=."
        )
    return tuple(size // sum(heads) * num_heads for num_heads in heads)


def _check_heads(heads: Parts, parts: tuple[int, ...], *, over: str, ranks: int, what: str) -> None:
    if heads is None:
        return
    heads_by_part = heads if isinstance(heads, tuple) else (heads,) * len(parts)
    if len(heads_by_part) != len(parts):
        raise PlanError(
            f"heads={heads} is for {len(heads_by_part)} parts, but {what} has {len(parts)}. Give "
            "one number "
            "for each part, or one for all."
        )
    for number, part in zip(heads_by_part, parts, strict=True):
        if part % number:
            raise PlanError(
                f"{what} has no {number} heads: {part} does not divide by {number}. Give its "
                "number of heads."
            )
        if number % ranks:
            raise PlanError(
                f"{number} heads do not divide over {over} ({what}). Choose an axis size that "
                f"divides {number}, or keep the tensor replicated with Replicated()."
            )


Shapes = Mapping[str, tuple[Size, ...]]
"""The shapes of a module's own tensors, by their names in it."""


_NORM = re.compile(r"(?:.*\.)?\w*Norm(?:[123]d)?")


def find_module_sharding(way: Way, module: ModuleInfo, shapes: Shapes) -> ModuleSharding | None:
    """How the module is sharded by column or by row, or None if it cannot be."""
    for name in torch_first((module.type_name, *module.bases)):
        shardings = find_class_shardings(name)
        if shardings is not None:  # such a class may compute its weight from other tensors
            return shardings.get(way) if _has_weight(shardings, shapes) else None
        if _NORM.fullmatch(name):
            return _shard_vectors(way, shapes) if _is_flat(module, shapes) else None
    return _shard_by_rank(way, module, shapes)


def parameter_dim(way: Way, name: str, module: ModuleInfo | None, shapes: Shapes) -> int | None:
    """The dim of a module's own tensor to shard: as its module is sharded, else by its rank.

    As in a weight matrix, output features come before input features, after stacked dims.
    """
    sharding = find_module_sharding(way, module, shapes) if module is not None else None
    if sharding is not None and name in ("weight", "bias", *sharding.dims):
        return sharding.dims.get(name)
    num_dims = len(shapes[name])
    if num_dims < 2:
        return 0 if way == "column" and num_dims == 1 else None
    return num_dims - 2 if way == "column" else num_dims - 1


def _has_weight(shardings: ClassShardings, shapes: Shapes) -> bool:
    """Whether the module has the weight of its class, with enough dims."""
    last_dim = max(sharding.dims["weight"] for sharding in shardings.values())
    return "weight" in shapes and len(shapes["weight"]) > max(last_dim, 1)


def _is_flat(module: ModuleInfo, shapes: Shapes) -> bool:
    return bool(module.parameters) and all(len(shapes[name]) == 1 for name in module.parameters)


def _shard_vectors(way: Way, shapes: Shapes) -> ModuleSharding | None:
    """Shard a norm's parameters and running statistics, which have the same channels."""
    if way == "row":
        return None
    return ModuleSharding({name: 0 for name, shape in shapes.items() if len(shape) == 1})


def _shard_by_rank(way: Way, module: ModuleInfo, shapes: Shapes) -> ModuleSharding | None:
    """For an unknown class: a matrix with perhaps a bias, or vectors alone."""
    if set(module.parameters) - {"bias"} == {"weight"} and len(shapes["weight"]) == 2:
        num_outputs, num_inputs = shapes["weight"]
        bias = shapes.get("bias", (num_outputs,))
        if bias == (num_outputs,):
            return LINEAR[way]
        return TRANSPOSED_LINEAR[way] if bias == (num_inputs,) else None
    return _shard_vectors(way, shapes) if _is_flat(module, shapes) else None


@final
@dataclass(frozen=True, eq=False)
class Decision:
    """The dim of a tensor, by one of its names, that an entry shards along an axis; None: none."""

    name: str
    entry: MeshEntry
    style: WeightStyle
    dim: int | None
    is_exception: bool = False  # it overrides a later entry

    @property
    def description(self) -> str:
        return self.entry.description


@final
class Weights:
    """Resolves the placement of every tensor of a program, by the entries of a plan."""

    def __init__(self, matcher: PlanMatcher[MeshEntry], index: ProgramIndex, axes: Axes) -> None:
        self._matcher, self._index, self._axes = matcher, index, axes
        self.decisions: list[Decision] = []  # all, to know which entries were used
        self.placements: dict[str, tuple[Placement, ...]] = {}  # of sharded tensors, by every name
        for name, tensor in index.tensors.items():
            placements = self._place((name, *tensor.aliases), tensor.shape)
            if any(isinstance(placement, Shard) for placement in placements):
                self.placements.update(dict.fromkeys((name, *tensor.aliases), placements))

    def _place(self, names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[Placement, ...]:
        by_axis = [self._decide_all(names, axis) for axis in range(len(self._axes.names))]
        self.decisions += [decision for decisions in by_axis for decision in decisions]
        for axis, decisions in enumerate(by_axis):
            self._check_tied(decisions, axis)
        dims = [decisions[0].dim if decisions else None for decisions in by_axis]
        placements: list[Placement] = []
        for axis, (dim, decisions) in enumerate(zip(dims, by_axis, strict=True)):
            if dim is None:
                placements.append(Replicate())
            else:
                placements.append(self._shard(decisions, axis, shape[dim], dims))
        return tuple(placements)

    def _decide_all(self, names: tuple[str, ...], axis: int) -> list[Decision]:
        """The decisions for the tensor, one per name that an entry matches."""
        decisions = (next(self._decide(name, axis), None) for name in names)
        return [decision for decision in decisions if decision is not None]

    def _decide(self, name: str, axis: int) -> Iterator[Decision]:
        module, _, own = name.rpartition(".")
        matching = [
            (entry, is_module, style)
            for entry, is_module in self._matcher.find_for_tensor(own, module)
            if (style := weight_style(entry.styles_by_axis.get(axis, ()))) is not None
            and self._is_meant(entry, name, style, is_module=is_module)
        ]
        for position, (entry, is_module, style) in enumerate(matching):
            dim = self._dim(entry, name, style, is_module=is_module)
            yield Decision(name, entry, style, dim, is_exception=position + 1 < len(matching))

    def _is_meant(
        self, entry: MeshEntry, name: str, style: WeightStyle, *, is_module: bool
    ) -> bool:
        """Whether the entry is meant for this tensor, not only matched by its pattern."""
        if is_module and isinstance(style, Shard):
            # Placements for a module are for its parameters: buffers are sharded by name.
            return self._index.tensor(name).is_parameter
        if is_module:
            return not is_incidental_match(entry, name.rpartition(".")[0], self._index)
        if entry.ends_in_wildcard:
            return self._index.tensor(name).is_parameter and not isinstance(style, Sequence)
        return True

    def _dim(
        self, entry: MeshEntry, name: str, style: WeightStyle, *, is_module: bool
    ) -> int | None:
        module, _, own = name.rpartition(".")
        if isinstance(style, Shard):
            return self._raw_dim(entry, name, style, is_module=is_module)
        if isinstance(style, Sequence) and not is_module:
            raise PlanError(describe_not_a_module(entry, name))
        if not isinstance(style, (Colwise, Rowwise)):
            return None
        if is_module:
            return module_sharding(entry, module, style, self._index).dims.get(own)
        # A partial output is what sharding the tensor gives anyway; transformers' plans state it.
        if style.input is not None or not isinstance(style.output, (Partial, type(None))):
            raise PlanError(
                f"{entry.location} places inputs or outputs, but {name!r} is a tensor, not a "
                "module. "
                "Name its module, or leave input and output out."
            )
        index = self._index.modules.get(module)
        return parameter_dim(style.way, own, index, own_shapes(self._index, module, own))

    def _raw_dim(self, entry: MeshEntry, name: str, style: Shard, *, is_module: bool) -> int | None:
        num_dims = len(self._index.tensor(name).shape)
        if -num_dims <= style.dim < num_dims:
            return style.dim % num_dims
        if entry.ends_in_wildcard:
            return None
        remedy = "Name the tensors that have that dim" if is_module else "Give a dim that it has"
        raise PlanError(
            f"{entry.location} shards dim {style.dim}, but {name!r} has {_count_dims(num_dims)}. "
            f"{remedy}."
        )

    def _check_tied(self, decisions: list[Decision], axis: int) -> None:
        for decision in decisions[1:]:
            if decision.dim != decisions[0].dim:
                self._refuse_tied(
                    decisions[0], decision, axis, _describe_dims(decisions[0], decision)
                )

    def _refuse_tied(self, first: Decision, second: Decision, axis: int, difference: str) -> None:
        raise PlanError(
            f"{first.name!r} and {second.name!r} are one tensor, but along "
            f"{self._axes.names[axis]} the plan wants it {difference} ({first.description}; "
            f"{second.description}). "
            "Give it one layout: Rowwise() shards an embedding as Colwise() shards a linear "
            "layer."
        )

    def _shard(
        self, decisions: list[Decision], axis: int, size: int, dims: list[int | None]
    ) -> Shard:
        shards = [self._shard_for(decision, axis, size, dims) for decision in decisions]
        for shard, decision in zip(shards, decisions, strict=True):
            if shard != shards[0]:
                difference = (
                    f"as {describe_placement(shards[0])} and as {describe_placement(shard)}"
                )
                self._refuse_tied(decisions[0], decision, axis, difference)
        return shards[0]

    def _shard_for(self, decision: Decision, axis: int, size: int, dims: list[int | None]) -> Shard:
        dim = dims[axis]
        assert dim is not None
        assert isinstance(decision.style, (Colwise, Rowwise, Shard))
        earlier = [position for position in range(axis + 1) if dims[position] == dim]
        over = " × ".join(self._axes.describe_axis(position) for position in earlier)
        ranks = prod(self._axes.sizes[position] for position in earlier)
        shard = shard_in_blocks(
            decision.style, dim, size, over=over, ranks=ranks, what=decision.name
        )
        if not shard.is_plain and dims.count(dim) > 1:
            axis_names = " and ".join(
                name
                for name, axis_dim in zip(self._axes.names, dims, strict=True)
                if axis_dim == dim
            )
            raise PlanError(
                f"{decision.entry.location} shards dim {dim} of {decision.name!r} in parts, but "
                f"{axis_names} both "
                "shard that dim. Shard another dim along the other axis."
            )
        return shard


def describe_not_a_module(entry: MeshEntry, name: str) -> str:
    """The error text for a tensor named by an entry that is for modules."""
    return (
        f"{entry.location} is for modules, but {name!r} is a tensor. Name its module, or give the "
        "tensor a placement, such as Shard(0)."
    )


def is_incidental_match(entry: MeshEntry, name: str, index: ProgramIndex) -> bool:
    """Whether a wildcard matched a module that has no parameters to shard."""
    module = index.modules.get(name)
    return entry.ends_in_wildcard and (module is None or not module.parameters)


def module_sharding(
    entry: MeshEntry, name: str, style: ShardingStyle, index: ProgramIndex
) -> ModuleSharding:
    """How the style shards the module; raises PlanError if it cannot."""
    module = index.modules.get(name, ModuleInfo())
    sharding = find_module_sharding(style.way, module, own_shapes(index, name))
    if sharding is None:
        kind = module.type_name.rpartition(".")[2] or "a module"
        tensors = ", ".join((*module.parameters, *module.buffers)) or "no tensors"
        is_pattern = entry.is_pattern
        alternative = (
            f"except the module with {name!r}: Replicated()" if is_pattern else "remove the entry"
        )
        raise PlanError(
            f"{entry.location} has no meaning for {name!r}, {kind} with {tensors}. Name the "
            f"tensors and give them placements, such as Shard(0), or {alternative}."
        )
    return sharding


def own_shapes(index: ProgramIndex, module: str, *names: str) -> Shapes:
    """The shapes of a module's own tensors, and of its tensors called `names`."""
    info = index.modules.get(module, ModuleInfo())
    prefix = f"{module}." if module else ""
    tensor_names = dict.fromkeys((*info.parameters, *info.buffers, *names))
    return {name: index.tensor(prefix + name).shape for name in tensor_names}


def _describe_dims(first: Decision, second: Decision) -> str:
    texts = [
        "replicated" if dim is None else f"sharded along dim {dim}"
        for dim in (first.dim, second.dim)
    ]
    return f"{texts[0]} and {texts[1]}"


def _count_dims(number: int) -> str:
    return f"{number} dim" if number == 1 else f"{number} dims"
