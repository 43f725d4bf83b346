"""The result of one step of a model: outputs, gradients and changed buffers, as full tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import SimpleNamespace
from typing import final

import torch

from shardscope.record import Source, TensorKind

Key = tuple[TensorKind, str]
Region = tuple[tuple[int, int], ...]
"""For each dim of a tensor, the start and the end of what a rank holds of it."""


@final
@dataclass(frozen=True, eq=False)
class StepResult:
    """The tensors of one step, by name, of the single device or of one rank; full where possible.

    `outputs` has an entry for each tensor of each call of the model, in the order of the calls.
    `gradients` leaves out parameters without a gradient; a tied parameter has an entry for each
    of its names, all with the same tensor. `buffers` has all buffers; `changed` names those
    that the step changed. `absent` names the original's parameters that this rank does not
    have, such as other ranks' experts; `added` names its parameters and buffers that the
    original does not have. `ties` maps each name of a parameter on this rank to the first name
    of the same parameter; `frozen` names parameters that require no gradient. `regions` has the
    part of each gathered DTensor that this rank stores, where that is known. `snapshots` has
    the tensors that a probe recorded.
    """

    outputs: list[tuple[str, torch.Tensor]]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    changed: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    ties: dict[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    num_calls: int = 1  # of the model
    num_backwards: int = 0  # that reached an output of the model
    num_cleared: int = 0  # times that gradients were cleared before another backward
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # before the run
    regions: dict[Key, Region] = field(default_factory=dict)
    snapshots: dict[str, torch.Tensor] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)  # source lines of the snapshots
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)  # arguments of ops

    def tensors(self) -> dict[Key, list[torch.Tensor]]:
        """All tensors by kind and name: a list over calls for outputs, of length one for others."""
        named: dict[Key, list[torch.Tensor]] = {}
        for name, tensor in self.outputs:
            named.setdefault((TensorKind.OUTPUT, name), []).append(tensor)
        for name, tensor in self.gradients.items():
            named[TensorKind.GRADIENT, name] = [tensor]
        for name, tensor in self.buffers.items():
            named[TensorKind.BUFFER, name] = [tensor]
        return named


def find_stages(parameters: Collection[str], ranks: Sequence[StepResult]) -> list[list[int]]:
    """The ranks of each pipeline stage, if stages share no parameter; otherwise one list of all."""
    stages: dict[frozenset[str], list[int]] = {}
    for index, rank in enumerate(ranks):
        stages.setdefault(frozenset(parameters) - rank.absent, []).append(index)
    num_present = sum(len(present) for present in stages)
    is_disjoint = num_present == len(frozenset().union(*stages))
    return list(stages.values()) if is_disjoint else [list(range(len(ranks)))]


def named_tensors(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a nested value with their paths, such as `[0].logits`."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    for key, item in _items(value):
        yield from named_tensors(item, path + key)


def _items(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", getattr(value, name)) for name in value._fields)
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{item.name}", getattr(value, item.name)) for item in fields(value))
    elif isinstance(value, SimpleNamespace):
        yield from ((f".{name}", item) for name, item in vars(value).items())


def tie_names(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For each name, the first name of the same tensor object."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named.items()}
