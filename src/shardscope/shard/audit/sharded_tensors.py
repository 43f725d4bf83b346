"""The modules and tensors of a model on this rank: each module with its wrappers, each tensor with
its shard and all its names.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from shardscope._torch.autograd import is_checkpointed
from shardscope._torch.ddp import is_replicated
from shardscope._torch.dtensor import parallel_styles
from shardscope._torch.fsdp import (
    FLAT_PARAMETER,
    FlatShard,
    FsdpGroup,
    annotated_parameters,
    flat_shards,
    fsdp_groups,
    modules_under_fsdp,
    sharded_parameters,
    shared_across_groups,
    user_class,
)
from shardscope._torch.modules import (
    every_module,
    is_compiled,
    is_persistent,
    named_modules_with_aliases,
    own_buffers,
    own_parameters,
    unwrap,
)
from shardscope._torch.spmd_types import AxisType, read_annotation
from shardscope.attribution.module_names import ModuleNames
from shardscope.attribution.program_records import add_types, describe_parameter
from shardscope.plan import PlanMatcher
from shardscope.record import Gap, Mark, MarkKind, Module, Parameter, RankSpan
from shardscope.shard.audit.plan import PlanRule


def read_marks(model: nn.Module, groups: Iterable[FsdpGroup]) -> dict[int, list[Mark]]:
    """By the id of the user's module, the wrappers and styles applied to it, outermost first."""
    marks: defaultdict[int, list[Mark]] = defaultdict(list)
    for group in groups:
        for module in group.modules:
            marks[id(unwrap(module))].append(_describe_group(group))
    for module, kind in modules_under_fsdp(model):
        own = marks[id(unwrap(module))]
        if all(mark.kind is not kind for mark in own):
            own.append(Mark(kind=kind))
    for module in every_module(model):
        marks[id(unwrap(module))] += _read_own(module)
    return marks


def _describe_group(group: FsdpGroup) -> Mark:
    return Mark(
        kind=group.kind,
        detail=group.policy,
        axes=group.axes,
        num_parameters=len(group.locations),
        options=group.options,
    )


def _read_own(module: nn.Module) -> Iterator[Mark]:
    if isinstance(module, DistributedDataParallel):
        trained = sum(parameter.requires_grad for parameter in module.module.parameters())
        yield Mark(kind=MarkKind.DDP, num_parameters=trained)
    elif is_replicated(module):
        trained = sum(parameter.requires_grad for parameter in module.parameters())
        yield Mark(kind=MarkKind.DDP, num_parameters=trained)
    if is_compiled(module):
        yield Mark(kind=MarkKind.COMPILED)
    if is_checkpointed(module):
        yield Mark(kind=MarkKind.CHECKPOINTED)
    for style, axes in parallel_styles(module).items():
        yield Mark(kind=MarkKind.TENSOR_PARALLEL, detail=style, axes=axes)


Key = tuple[int, str]  # a module's identity, and the name of a tensor in it


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor of a module: its record, and the tensor and mesh that a record cannot hold."""

    name: str  # full and clean
    record: Parameter
    tensor: torch.Tensor | None  # None where FSDP1 has hidden it
    mesh: DeviceMesh | None
    types: tuple[AxisType, ...] = ()  # of a plain tensor with an annotation of spmd_types

    @property
    def is_placed(self) -> bool:
        """Whether it has placements: those of a DTensor, or an annotation."""
        return self.mesh is not None or bool(self.types)

    @property
    def local_bytes(self) -> int:
        """The bytes of this rank's shard, which an audit always records."""
        assert self.record.local_bytes is not None
        return self.record.local_bytes


@final
class ModelInventory:
    """A model, read once: `modules` are records, `tensors` its parameters and buffers."""

    def __init__(self, model: nn.Module, *, rank: int, rules: Sequence[PlanRule] = ()) -> None:
        self.model = model
        self.names = ModuleNames(model)
        self.groups = list(fsdp_groups(model))
        self.shared = shared_across_groups(model)
        self.tensors: list[TensorEntry] = []
        self.gaps: list[Gap] = []
        self.rank = rank
        self._rules = PlanMatcher(rules)
        self._sharded = sharded_parameters(model)
        self._annotated = annotated_parameters(model)
        self._flat_shards = flat_shards(model)
        self._hidden: defaultdict[int, list[tuple[str, None]]] = defaultdict(list)
        for (owner, name), flat_shard in self._flat_shards.items():
            if flat_shard.is_hidden:
                self._hidden[owner].append((name, None))
        self._live = _live_names(model)
        self._fsdp_groups = dict(self._name_groups())
        self._fsdp_axes = {
            self.name_of(module): group.axes for group in self.groups for module in group.modules
        }
        self._alias_groups = self._find_aliases()
        self.modules = tuple(self._read_modules())
        self._has_annotations = any(entry.record.is_annotated for entry in self.tensors)
        self._report_untyped()

    def is_layout_known(self, entry: TensorEntry) -> bool:
        """Whether it is known how a tensor is distributed.

        Not for a tensor whose spmd_types annotation is V (varying), nor for one without
        annotation where others are annotated.
        """
        if entry.is_placed or entry.record.fsdp_group is not None:
            return all(axis_type.type != "V" for axis_type in entry.types)
        return not self._has_annotations

    def _report_untyped(self) -> None:
        """Report what the annotations of spmd_types leave unknown."""
        for entry in self.tensors:
            kind = "buffer" if entry.record.is_buffer else "parameter"
            if not entry.is_placed and not self.is_layout_known(entry):
                fact = (
                    f"this {kind} has no spmd_types annotation: whether it is sharded or "
                    "replicated is not known"
                )
                self.report_gap(entry.name, fact)
            axes = [axis_type.axis for axis_type in entry.types if axis_type.type == "V"]
            if axes:
                fact = (
                    f"its type on {', '.join(axes)} is V (varying), which does not name a sharded "
                    "dim: its shape is that of this rank"
                )
                self.report_gap(entry.name, fact)

    def name_of(self, module: nn.Module) -> str:
        """The clean name of one of the model's modules."""
        return self.names.names[self.names.find(unwrap(module))]

    def every_name(self) -> set[str]:
        """Every name of every module and tensor: clean names, aliases and live names."""
        names = set(self.names.names) | set(self._live.values())
        for tensor in self.tensors:
            names |= {tensor.name, tensor.record.live_name or tensor.name}
        for module in self.modules:
            for alias in module.aliases:
                names |= {f"{alias}.{tensor.name}" for tensor in module.parameters}
        return names

    def planned_placements(self, entry: TensorEntry) -> dict[str, Placement]:
        """A tensor's placements along the axes that FSDP does not use, by axis."""
        if entry.types:
            placed = ((axis_type.axis, axis_type.placement) for axis_type in entry.types)
            return {axis: placement for axis, placement in placed if placement is not None}
        if not isinstance(entry.tensor, DTensor):
            return {}
        group = entry.record.fsdp_group
        fsdp_axes = () if group is None else self._fsdp_axes.get(group, ())
        axes = zip(entry.record.axes, entry.tensor.placements, strict=True)
        return {axis: placement for axis, placement in axes if axis not in fsdp_axes}

    def _read_modules(self) -> Iterator[Module]:
        marks = read_marks(self.model, self.groups)
        for index, name in enumerate(self.names.names):
            module = self.names.module(index)
            if module is None or self.names.is_alias(index):
                continue
            entries = list(self._read_tensors(module, index))
            self.tensors += entries
            yield Module(
                name=name,
                type=user_class(module).__name__,
                ranks=(RankSpan(self.rank),),
                parameters=tuple(entry.record for entry in entries),
                aliases=self.names.aliases(index),
                marks=tuple(marks.get(id(module), ())),
            )

    def _read_tensors(self, module: nn.Module, index: int) -> Iterator[TensorEntry]:
        parameters = chain(own_parameters(module), self._hidden.get(id(module), ()))
        tensors = chain(
            ((name, tensor, False) for name, tensor in parameters if name != FLAT_PARAMETER),
            ((name, tensor, True) for name, tensor in own_buffers(module)),
        )
        for name, tensor, is_buffer in tensors:
            try:
                yield from self._read_tensor(module, name, index, tensor, is_buffer=is_buffer)
            except Exception as error:  # noqa: BLE001 - a tensor subclass may raise anything
                fact = f"it could not be read ({type(error).__name__}: {error})"
                self.report_gap(f"{self.names.names[index]}.{name}", fact)

    def _read_tensor(
        self,
        module: nn.Module,
        name: str,
        index: int,
        tensor: torch.Tensor | None,
        *,
        is_buffer: bool,
    ) -> Iterator[TensorEntry]:
        key = id(module), name
        full = f"{self.names.names[index]}.{name}".lstrip(".")
        own_tensor = self._sharded.get(key, tensor)
        if own_tensor is not None and is_lazy(own_tensor):
            self.report_gap(full, "it has no shape yet: run a forward, then audit")
            return
        flat_shard = self._flat_shards.get(key)
        if flat_shard is not None and flat_shard.is_part:
            fact = (
                "FSDP1 is applied on top of tensor parallelism: shape and bytes are those of "
                "its shard"
            )
            self.report_gap(full, fact)
        described = self._describe(name, own_tensor, flat_shard)
        if key in self._annotated:
            described = add_types(described, self._annotated[key])
        record = replace(
            described,
            is_buffer=is_buffer,
            live_name=self._live_name(module, name, flat_shard),
            checkpoint_key=full if not is_buffer or is_persistent(module, name) else None,
            fsdp_group=self._fsdp_groups.get(key),
            alias_group=self._alias_groups.get(key),
            rule=self._find_rule(module, name, index),
        )
        mesh = own_tensor.device_mesh if isinstance(own_tensor, DTensor) else None
        types = () if own_tensor is None else read_annotation(own_tensor)
        yield TensorEntry(name=full, record=record, tensor=own_tensor, mesh=mesh, types=types)

    def report_gap(self, place: str, fact: str) -> None:
        """Note something about the model that could not be read."""
        self.gaps.append(Gap(place=place.lstrip("."), fact=fact, rank=self.rank))

    def _find_rule(self, module: nn.Module, name: str, index: int) -> str | None:
        """The rule that names the tensor, or else the module, by any of its names."""
        names = (self.names.names[index], *self.names.aliases(index), self._live[id(module)])
        matching = self._rules.find_for_tensor(name, *names)
        return matching[0][0].pattern if matching else None

    def _describe(
        self, name: str, tensor: torch.Tensor | None, flat_shard: FlatShard | None
    ) -> Parameter:
        if flat_shard is not None:
            return _describe_flat_shard(name, flat_shard)
        assert tensor is not None
        return describe_parameter(name, tensor)

    def _live_name(self, module: nn.Module, name: str, flat_shard: FlatShard | None) -> str:
        if flat_shard is not None and flat_shard.is_hidden:
            module, name = flat_shard.holder, FLAT_PARAMETER
        return f"{self._live.get(id(module), '')}.{name}".lstrip(".")

    def _name_groups(self) -> Iterator[tuple[Key, str]]:
        """Map each tensor (module id, name) to the module whose FSDP group it is in."""
        for group in self.groups:
            holders = {
                id(module_in_top): top
                for top in reversed(group.modules)
                for module_in_top in every_module(top)
            }
            for module, parameter in (*group.locations, *group.ties):
                top = holders.get(id(module), group.modules[0])
                yield (id(module), parameter), self.name_of(top)

    def _find_aliases(self) -> dict[Key, str]:
        """Map each tensor (module id, name) that has several names to the first of them."""
        holders: defaultdict[int, list[tuple[Key, str]]] = defaultdict(list)
        for index, prefix in enumerate(self.names.names):
            module = self.names.module(index)
            if module is None or self.names.is_alias(index):
                continue
            hidden = self._hidden.get(id(module), ())
            for name, tensor in chain(own_parameters(module), own_buffers(module), hidden):
                identity = self._flat_shards[id(module), name] if tensor is None else tensor
                full = f"{prefix}.{name}".lstrip(".")
                holders[id(identity)].append(((id(module), name), full))
        groups = (tensor_keys for tensor_keys in holders.values() if len(tensor_keys) > 1)
        return {key: tensor_keys[0][1] for tensor_keys in groups for key, _ in tensor_keys}


def _live_names(model: nn.Module) -> dict[int, str]:
    """By a module's id, its first name in the tree, including wrappers."""
    names: dict[int, str] = {}
    for name, module in named_modules_with_aliases(model, keep_wrappers=True):
        names.setdefault(id(module), name)
    return names


def _describe_flat_shard(name: str, flat_shard: FlatShard) -> Parameter:
    itemsize = flat_shard.dtype.itemsize
    return Parameter(
        name=name,
        shape=flat_shard.shape,
        local_shape=(flat_shard.num_local,),
        dtype=str(flat_shard.dtype).removeprefix("torch."),
        is_trainable=flat_shard.is_trainable,
        global_bytes=math.prod(flat_shard.shape) * itemsize,
        local_bytes=flat_shard.num_local * itemsize,
    )


_FSDP = (MarkKind.FULLY_SHARD, MarkKind.FSDP1)


def names_by_group(modules: Sequence[Module]) -> dict[str, list[str]]:
    """By `name[Class]` of the module that FSDP was applied to, its parameters' full names.

    A tied parameter is named once.
    """
    managed: dict[str, list[str]] = {}
    for module in modules:
        for parameter in module.parameters:
            name = f"{module.name}.{parameter.name}".lstrip(".")
            is_again = parameter.alias_group not in (None, name)
            if parameter.fsdp_group is not None and not is_again:
                managed.setdefault(parameter.fsdp_group, []).append(name)
    return {
        f"{module.name}[{module.type}]": managed.get(module.name, [])
        for module in modules
        if any(mark.kind in _FSDP for mark in module.marks)
    }
