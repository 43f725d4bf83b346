"""What a step computes, of the single device or of one rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor

from shardscope.parallel.equivalence.declared import Declared
from shardscope.parallel.equivalence.random_numbers import Draws
from shardscope.parallel.equivalence.training import (
    CLIPPED,
    RAW,
    REDUCED,
    Key,
    Table,
    TrainingValues,
)
from shardscope.record import Source, TensorKind

Region = tuple[tuple[int, int], ...]
"""For each dim of a tensor, the start and the end of what a rank holds of it."""
_GRADIENT: Table = (TensorKind.GRADIENT, "")
Tensors = dict[Key, torch.Tensor]
GatherFull = Callable[[Tensors], Tensors]
"""Makes full tensors of a rank's shards; all ranks call it once for each step."""
EVALUATION = "evaluation"
"""The name of what the model returns without gradients after an optimizer has stepped."""
SEPARATOR = "\0"
"""Between parts of the name of a tensor; in no path."""


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
    the tensors that a probe recorded. `training` has what is observed only of training steps, and
    `raw_gradients` the gradients as backward left them there, before the program could change them,
    and `reduced_gradients` those as the last collective left them that the program called itself.
    `declared` has the types of tensors that were not gathered, where placements or annotations give
    them: of snapshots, by their names, and of the others, by kind and name.
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
    num_transformed: int = 0  # calls in a transform of torch.func, whose outputs are not kept
    num_backwards: int = 0  # that reached an output of the model
    num_cleared: int = 0  # times that gradients were cleared before another backward
    is_bypassed: bool = False  # the module inside DistributedDataParallel was called without it
    unhooked: frozenset[str] = frozenset()  # parameters inside it that it does not reduce
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # before the run
    regions: dict[Key, Region] = field(default_factory=dict)
    snapshots: dict[str, torch.Tensor] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)  # source lines of the snapshots
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)  # arguments of ops
    training: TrainingValues = field(default_factory=TrainingValues)
    raw_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    reduced_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    local_squares: dict[str, float] = field(default_factory=dict)  # of gradients, as stored here
    distributed: frozenset[str] = frozenset()  # parameters whose gradient is a DTensor
    declared: dict[str | Key, Declared] = field(default_factory=dict)
    raw_squares: dict[str, float] = field(default_factory=dict)  # the same after backward
    inputs: list[torch.Tensor] = field(default_factory=list)  # of the model, as on this rank
    input_source: Source | None = None  # the line that calls the model
    reduced_squares: dict[str, float] = field(default_factory=dict)  # the same after collectives
    clipped_squares: dict[str, float] = field(default_factory=dict)  # the same after clipping
    draws: Draws = field(default_factory=Draws)
    asks_for_rounding: bool = False  # a policy or a hook of torch's reduces in another dtype

    def tensors(self) -> dict[Key, list[torch.Tensor]]:
        """All tensors by kind and name: a list over calls for outputs, of length one for others."""
        named: dict[Key, list[torch.Tensor]] = {}
        for name, tensor in self.outputs:
            named.setdefault((TensorKind.OUTPUT, name), []).append(tensor)
        for name, tensor in self.gradients.items():
            named[TensorKind.GRADIENT, name] = [tensor]
        for name, tensor in self.buffers.items():
            named[TensorKind.BUFFER, name] = [tensor]
        return named | self.training.scalars

    def tables(self) -> dict[Table, dict[str, torch.Tensor]]:
        """The tensors of parameters, by what they are: gradients, optimizer states and others."""
        return {_GRADIENT: self.gradients, **self.training.tables}


def find_stages(parameters: Collection[str], ranks: Sequence[StepResult]) -> list[list[int]]:
    """The ranks of each pipeline stage, if stages share no parameter; otherwise one list of all."""
    stages: dict[frozenset[str], list[int]] = {}
    for index, rank in enumerate(ranks):
        stages.setdefault(frozenset(parameters) - rank.absent, []).append(index)
    num_present = sum(len(present) for present in stages)
    is_disjoint = num_present == len(frozenset().union(*stages))
    return list(stages.values()) if is_disjoint else [list(range(len(ranks)))]


def keep_local(tensors: Tensors) -> Tensors:
    return tensors


def describe_local(
    gradients: Mapping[str, torch.Tensor], training: TrainingValues
) -> dict[str, Any]:
    """The fields of a `StepResult` about what this rank itself stores of gradients."""
    tables = training.tables
    return {
        "local_squares": _find_squares(gradients),
        "distributed": frozenset(
            n for n, tensor in gradients.items() if isinstance(tensor, DTensor)
        ),
        "raw_squares": _find_squares(tables.get(RAW, {})),
        "reduced_squares": _find_squares(tables.get(REDUCED, {})),
        "clipped_squares": _find_squares(tables.get(CLIPPED, {})),
    }


def _find_squares(gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The sum of squares of what this rank stores of each gradient; a tied one counts once."""
    first = {id(tensor): name for name, tensor in reversed(list(gradients.items()))}
    return {
        name: float(local_of(tensor).double().square().sum())
        for name, tensor in gradients.items()
        if first[id(tensor)] == name and not name.startswith("inputs")
    }


def gather_result(
    gather: GatherFull,
    outputs: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
    buffers: dict[str, torch.Tensor],
    training: TrainingValues,
) -> StepResult:
    """The result with full tensors, which all ranks gather in one call."""
    local: Tensors = {(TensorKind.OUTPUT, name): tensor for name, tensor in outputs.items()}
    local |= {(TensorKind.GRADIENT, name): tensor for name, tensor in gradients.items()}
    local |= {(TensorKind.BUFFER, name): tensor for name, tensor in buffers.items()}
    local |= {
        (kind, f"{name}{SEPARATOR}{entry}"): tensor
        for (kind, entry), table in training.tables.items()
        for name, tensor in table.items()
    }
    local |= {
        (kind, f"{name}{SEPARATOR}{index}"): tensor
        for (kind, name), values in training.scalars.items()
        for index, tensor in enumerate(values)
    }
    full = gather(local)
    tables = {
        (kind, entry): {name: full[kind, f"{name}{SEPARATOR}{entry}"] for name in table}
        for (kind, entry), table in training.tables.items()
    }
    scalars = {
        (kind, name): [
            _detach(full[kind, f"{name}{SEPARATOR}{index}"]) for index in range(len(values))
        ]
        for (kind, name), values in training.scalars.items()
    }
    raw_gradients, reduced_gradients = tables.pop(RAW, {}), tables.pop(REDUCED, {})
    return StepResult(
        [
            (name.partition(SEPARATOR)[2], _detach(full[TensorKind.OUTPUT, name]))
            for name in outputs
        ],
        {name: full[TensorKind.GRADIENT, name] for name in gradients},
        {name: _detach(full[TensorKind.BUFFER, name]).clone() for name in buffers},
        training=replace(training, tables=tables, scalars=scalars),
        raw_gradients=raw_gradients,
        reduced_gradients=reduced_gradients,
    )


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.wait() if hasattr(tensor, "wait") else tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor, detached."""
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()
