"""What this rank holds of a model: each module with its marks, each tensor with all its names."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardscope._torch.fsdp import sharded_parameters, user_class
from shardscope._torch.fsdp_groups import (
    FLAT_PARAMETER,
    FlatPiece,
    flat_pieces,
    managed_groups,
)
from shardscope._torch.modules import (
    every_module,
    is_persistent,
    named_places,
    own_buffers,
    own_parameters,
    unwrap,
)
from shardscope.comm.inventory import describe_parameter
from shardscope.comm.names import ModuleNames
from shardscope.record import Gap, Module, Parameter, RankSpan
from shardscope.shard.marks import read_marks
from shardscope.shard.plan import Rule, RuleBook

__all__ = ["Held", "Holdings"]

Key = tuple[int, str]  # a module's identity, and the name of a tensor in it


@dataclass(frozen=True, kw_only=True)
class Held:
    """One tensor in one place: its record, and what a record cannot hold."""

    name: str  # full and clean
    record: Parameter
    tensor: torch.Tensor | None  # None where FSDP1 has hidden it
    mesh: DeviceMesh | None

    @property
    def local_bytes(self) -> int:
        """Of this rank's part, which an audit always records."""
        assert self.record.local_bytes is not None
        return self.record.local_bytes


@final
class Holdings:
    """A model read once. `modules` are its records, `tensors` its parameters and buffers."""

    def __init__(self, model: nn.Module, *, rank: int, rules: Sequence[Rule] = ()) -> None:
        self.model = model
        self.names = ModuleNames(model)
        self.groups = list(managed_groups(model))
        self.tensors: list[Held] = []
        self.gaps: list[Gap] = []
        self.rank = rank
        self._rules = RuleBook(rules)
        self._sharded = sharded_parameters(model)
        self._pieces = flat_pieces(model)
        self._hidden: defaultdict[int, list[tuple[str, None]]] = defaultdict(list)
        for (owner, name), piece in self._pieces.items():
            if piece.is_hidden:
                self._hidden[owner].append((name, None))
        self._live = _live_names(model)
        self._fsdp_groups = dict(self._name_groups())
        self._fsdp_axes = {
            self.name_of(module): group.axes for group in self.groups for module in group.modules
        }
        self._alias_groups = self._find_aliases()
        self.modules = tuple(self._read_modules())

    def name_of(self, module: nn.Module) -> str:
        """The clean name of one of the model's modules."""
        return self.names.names[self.names.find(unwrap(module))]

    def every_name(self) -> set[str]:
        """Every name of every module and tensor: clean ones, further ones, and live ones."""
        names = set(self.names.names) | set(self._live.values())
        for one in self.tensors:
            names |= {one.name, one.record.live_name or one.name}
        for module in self.modules:
            for alias in module.aliases:
                names |= {f"{alias}.{one.name}" for one in module.parameters}
        return names

    def planned_placements(self, one: Held) -> tuple[Any, ...]:
        """How a tensor lies along the axes that FSDP has not taken for itself."""
        if not isinstance(one.tensor, DTensor):
            return ()
        group = one.record.fsdp_group
        taken = () if group is None else self._fsdp_axes.get(group, ())
        axes = zip(one.record.axes, one.tensor.placements, strict=True)
        return tuple(placement for axis, placement in axes if axis not in taken)

    def _read_modules(self) -> Iterator[Module]:
        marks = read_marks(self.model, self.groups)
        for index, name in enumerate(self.names.names):
            module = self.names.module(index)
            if module is None or self.names.is_alias(index):
                continue
            held = list(self._read_tensors(module, index))
            self.tensors += held
            yield Module(
                name=name,
                type=user_class(module).__name__,
                ranks=(RankSpan(self.rank),),
                parameters=tuple(one.record for one in held),
                aliases=self.names.aliases(index),
                marks=tuple(marks.get(id(module), ())),
            )

    def _read_tensors(self, module: nn.Module, index: int) -> Iterator[Held]:
        parameters = chain(own_parameters(module), self._hidden.get(id(module), ()))
        tensors = chain(
            ((name, tensor, False) for name, tensor in parameters if name != FLAT_PARAMETER),
            ((name, tensor, True) for name, tensor in own_buffers(module)),
        )
        for name, tensor, is_buffer in tensors:
            try:
                yield from self._read_tensor(module, name, index, tensor, is_buffer=is_buffer)
            except Exception as error:  # noqa: BLE001 - of kinds of tensors there is no end
                fact = f"it could not be read ({type(error).__name__}: {error})"
                self._report_gap(f"{self.names.names[index]}.{name}", fact)

    def _read_tensor(
        self,
        module: nn.Module,
        name: str,
        index: int,
        tensor: torch.Tensor | None,
        *,
        is_buffer: bool,
    ) -> Iterator[Held]:
        key = id(module), name
        full = f"{self.names.names[index]}.{name}".lstrip(".")
        held = self._sharded.get(key, tensor)
        if held is not None and is_lazy(held):
            self._report_gap(full, "it has no shape yet: run a forward, then audit")
            return
        piece = self._pieces.get(key)
        if piece is not None and piece.is_part:
            fact = (
                "FSDP1 is applied on top of tensor parallelism: shape and bytes are those of "
                "its shard"
            )
            self._report_gap(full, fact)
        record = replace(
            self._describe(name, held, piece),
            is_buffer=is_buffer,
            live_name=self._live_name(module, name, piece),
            checkpoint_key=full if not is_buffer or is_persistent(module, name) else None,
            fsdp_group=self._fsdp_groups.get(key),
            alias_group=self._alias_groups.get(key),
            rule=self._find_rule(module, name, index),
        )
        mesh = held.device_mesh if isinstance(held, DTensor) else None
        yield Held(name=full, record=record, tensor=held, mesh=mesh)

    def _report_gap(self, place: str, fact: str) -> None:
        self.gaps.append(Gap(place=place.lstrip("."), fact=fact, rank=self.rank))

    def _find_rule(self, module: nn.Module, name: str, index: int) -> str | None:
        """The rule that names the tensor, or else the module, by any of its names."""
        names = (self.names.names[index], *self.names.aliases(index), self._live[id(module)])
        tensors = (f"{prefix}.{name}".lstrip(".") for prefix in names)
        rule = self._rules.find((*tensors, *names))
        return None if rule is None else rule.pattern

    def _describe(self, name: str, held: torch.Tensor | None, piece: FlatPiece | None) -> Parameter:
        if piece is not None:
            return _describe_piece(name, piece)
        assert held is not None
        return describe_parameter(name, held)

    def _live_name(self, module: nn.Module, name: str, piece: FlatPiece | None) -> str:
        if piece is not None and piece.is_hidden:
            module, name = piece.holder, FLAT_PARAMETER
        return f"{self._live.get(id(module), '')}.{name}".lstrip(".")

    def _name_groups(self) -> Iterator[tuple[Key, str]]:
        """By place, the module that FSDP was applied to: of several, the one that holds it."""
        for group in self.groups:
            holders = {id(one): top for top in reversed(group.modules) for one in every_module(top)}
            for module, parameter in (*group.places, *group.ties):
                top = holders.get(id(module), group.modules[0])
                yield (id(module), parameter), self.name_of(top)

    def _find_aliases(self) -> dict[Key, str]:
        """By place, the first name of each tensor that has more than one."""
        holders: defaultdict[int, list[tuple[Key, str]]] = defaultdict(list)
        for index, prefix in enumerate(self.names.names):
            module = self.names.module(index)
            if module is None or self.names.is_alias(index):
                continue
            hidden = self._hidden.get(id(module), ())
            for name, tensor in chain(own_parameters(module), own_buffers(module), hidden):
                one = self._pieces[id(module), name] if tensor is None else tensor
                full = f"{prefix}.{name}".lstrip(".")
                holders[id(one)].append(((id(module), name), full))
        groups = (places for places in holders.values() if len(places) > 1)
        return {key: places[0][1] for places in groups for key, _ in places}


def _live_names(model: nn.Module) -> dict[int, str]:
    """By a module's identity, its first name in the tree as it is, wrappers and all."""
    names: dict[int, str] = {}
    for name, module in named_places(model, keep_wrappers=True):
        names.setdefault(id(module), name)
    return names


def _describe_piece(name: str, piece: FlatPiece) -> Parameter:
    itemsize = piece.dtype.itemsize
    return Parameter(
        name=name,
        shape=piece.shape,
        local_shape=(piece.num_local,),
        dtype=str(piece.dtype).removeprefix("torch."),
        is_trainable=piece.is_trainable,
        global_bytes=math.prod(piece.shape) * itemsize,
        local_bytes=piece.num_local * itemsize,
    )
