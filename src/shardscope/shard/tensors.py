"""What this rank holds of a model: each module with its marks, each tensor with all its names."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

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
from shardscope.shard.plan import Rule

__all__ = ["Held", "Holdings"]

Key = tuple[int, str]  # a module's identity, and the name of a tensor in it


@dataclass(frozen=True, kw_only=True)
class Held:
    """One tensor in one place: its record, and what a record cannot hold."""

    name: str  # full and clean
    record: Parameter
    tensor: torch.Tensor | None  # None where FSDP1 has hidden it
    mesh: DeviceMesh | None


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
        self._rules = rules
        self._sharded = sharded_parameters(model)
        self._pieces = flat_pieces(model)
        self._hidden: defaultdict[int, list[tuple[str, None]]] = defaultdict(list)
        for (owner, name), piece in self._pieces.items():
            if piece.is_hidden:
                self._hidden[owner].append((name, None))
        self._live = _live_names(model)
        self._fsdp_groups = dict(self._name_groups())
        self._alias_groups = self._find_aliases()
        self.modules = tuple(self._read_modules())

    def name_of(self, module: nn.Module) -> str:
        """The clean name of one of the model's modules."""
        return self.names.names[self.names.find(unwrap(module))]

    def _read_modules(self) -> Iterator[Module]:
        marks = read_marks(self.model, self.groups)
        for index, name in enumerate(self.names.names):
            module = self.names.module(index)
            if module is None or self.names.is_alias(index):
                continue
            held = list(self._read_tensors(module, name))
            self.tensors += held
            yield Module(
                name=name,
                type=user_class(module).__name__,
                ranks=(RankSpan(self.rank),),
                parameters=tuple(one.record for one in held),
                aliases=self.names.aliases(index),
                marks=tuple(marks.get(id(module), ())),
            )

    def _read_tensors(self, module: nn.Module, prefix: str) -> Iterator[Held]:
        for name, tensor in chain(own_parameters(module), self._hidden.get(id(module), ())):
            if name != FLAT_PARAMETER:
                yield from self._read_tensor(module, name, prefix, tensor)
        for name, buffer in own_buffers(module):
            yield from self._read_tensor(module, name, prefix, buffer, is_buffer=True)

    def _read_tensor(
        self,
        module: nn.Module,
        name: str,
        prefix: str,
        tensor: torch.Tensor | None,
        *,
        is_buffer: bool = False,
    ) -> Iterator[Held]:
        key = id(module), name
        full = f"{prefix}.{name}".lstrip(".")
        held = self._sharded.get(key, tensor)
        if held is not None and is_lazy(held):
            fact = "it has no shape yet: run a forward, then audit"
            self.gaps.append(Gap(place=full, fact=fact, rank=self.rank))
            return
        piece = self._pieces.get(key)
        record = replace(
            self._describe(name, held, piece),
            is_buffer=is_buffer,
            live_name=self._live_name(module, name, piece),
            checkpoint_key=full if not is_buffer or is_persistent(module, name) else None,
            fsdp_group=self._fsdp_groups.get(key),
            alias_group=self._alias_groups.get(key),
            rule=self._find_rule(full, prefix),
        )
        mesh = held.device_mesh if isinstance(held, DTensor) else None
        yield Held(name=full, record=record, tensor=held, mesh=mesh)

    def _find_rule(self, full: str, prefix: str) -> str | None:
        """The first rule that names the tensor, or else the module that holds it."""
        for name in (full, prefix):
            for rule in self._rules:
                if rule.matches(name):
                    return rule.pattern
        return None

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
        for group in self.groups:
            name = self.name_of(group.module)
            for module, parameter in (*group.places, *group.ties):
                yield (id(module), parameter), name

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
