"""The module tree as records: clean names, the user's own classes, parameters with placements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardscope._torch.calls import num_bytes
from shardscope._torch.fsdp import sharded_parameters, user_class
from shardscope._torch.meshes import axis_names, describe_placements, local_shape
from shardscope._torch.modules import own_parameters
from shardscope.comm.names import ModuleNames
from shardscope.record import Module, Parameter, RankSpan

__all__ = ["Inventory", "describe_parameter"]


class Reporter(Protocol):
    """Knows the rank of this process, and reports what could not be described as gaps."""

    rank: int

    def report_gap(self, place: str, fact: str) -> None:
        """Add a gap to the recording."""


@final
class Inventory:
    """Describes each named module once, in the order in which they turn up."""

    def __init__(self, names: ModuleNames, recorder: Reporter) -> None:
        self._names = names
        self._recorder = recorder
        self._report_gap = recorder.report_gap
        self._num_described = 0
        self._lazy: list[int] = []  # modules that do not know their own shapes yet

    def describe_new(self) -> Iterator[Module]:
        """Records of the modules that have turned up since the last time; shared ones once."""
        first, self._num_described = self._num_described, len(self._names.names)
        new, self._lazy = [*self._lazy, *range(first, self._num_described)], []
        if not new:
            return
        sharded = self._sharded_parameters()
        for index in new:
            module = self._names.module(index)
            if module is not None and any(is_lazy(p) for _, p in own_parameters(module)):
                self._lazy.append(index)
            elif module is not None and not self._names.is_alias(index):
                try:
                    yield self._describe(index, module, sharded)
                except Exception as error:  # noqa: BLE001 - watching must not kill
                    fact = f"a module could not be described ({error!r})"
                    self._report_gap(self._names.names[index], fact)

    def _sharded_parameters(self) -> dict[tuple[int, str], torch.Tensor]:
        """A gathered parameter shows its full self; what the rank holds is the shard."""
        sharded: dict[tuple[int, str], torch.Tensor] = {}
        for root in self._names.roots():
            try:
                sharded |= sharded_parameters(root)
            except Exception as error:  # noqa: BLE001 - watching must not kill
                self._report_gap("FSDP", f"its shards could not be read ({error!r})")
        return sharded

    def _describe(
        self, index: int, module: nn.Module, sharded: dict[tuple[int, str], torch.Tensor]
    ) -> Module:
        return Module(
            name=self._names.names[index],
            type=user_class(module).__name__,
            ranks=(RankSpan(self._recorder.rank),),
            parameters=tuple(_describe_parameters(module, sharded)),
            aliases=self._names.aliases(index),
        )


def _describe_parameters(
    module: nn.Module, sharded: dict[tuple[int, str], torch.Tensor]
) -> Iterator[Parameter]:
    for name, parameter in own_parameters(module):
        yield describe_parameter(name, sharded.get((id(module), name), parameter))


def describe_parameter(name: str, parameter: torch.Tensor) -> Parameter:
    """The record of a parameter or buffer, without what only an audit looks for."""
    placed = parameter if isinstance(parameter, DTensor) else None
    held, itemsize = local_shape(parameter), parameter.dtype.itemsize
    return Parameter(
        name=name,
        shape=tuple(map(int, parameter.shape)),  # a ragged one has sizes that are no numbers
        local_shape=held,
        dtype=str(parameter.dtype).removeprefix("torch."),
        placements=() if placed is None else describe_placements(placed.placements),
        axes=() if placed is None else axis_names(placed.device_mesh),
        is_trainable=parameter.requires_grad,
        global_bytes=num_bytes(parameter) if placed is None else parameter.numel() * itemsize,
        local_bytes=num_bytes(parameter) if placed is None else math.prod(held) * itemsize,
    )
