"""Steps that a program's ranks have taken, captured, and what a single device needs to replay them.

How a program splits its data over ranks is not known. So each rank's step is captured: the weights
before it, the inputs and outputs of the model, the gradients that backward sends into the outputs,
and the gradients of the parameters before they are clipped. The model of a single process gets the
same weights, and is called with the inputs of each rank. Its outputs are compared with that rank's,
and its gradients, averaged over ranks, with those of all ranks (`captured_parity.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import final

import torch

from shardscope.parallel.equivalence import StepResult, shard_layouts
from shardscope.parallel.parity.captured_data import (
    DataPlan,
    DataTensor,
    DataUse,
    group_by_data,
    is_equal,
    plan_data,
)
from shardscope.parallel.parity.probe import ModuleProbe
from shardscope.parallel.parity.scale_causes import find_scaling

Tensors = dict[str, torch.Tensor]
Constant = int | float | bool | str | None
"""An argument of a model that is a plain value."""


@final
@dataclass(frozen=True, eq=False)
class CapturedCall:
    """One call of the model: tensors and plain values of its arguments, and what it returned.

    `gradients` are those that backward sent into the outputs, None where it sent none.
    """

    inputs: list[torch.Tensor]
    constants: list[Constant]
    outputs: list[tuple[str, torch.Tensor]]
    gradients: list[torch.Tensor | None]


@final
@dataclass(eq=False)
class CapturedTraining:
    """What was observed of entire steps, of a rank or of a single process.

    `results`, `inputs` and `output_gradients` have an entry for each step: the tensors that each
    call of the model gets, and the gradients that backward sends into what it returns. `data` are
    the tensors that reach the model or the loss, and `problems` sentences on those that could not
    be replaced. `data_parallel` has the groups of ranks over which gradients are averaged. With
    `has_batch_norm` samples of a batch depend on each other; with `has_accelerate_scheduler` the
    learning rate depends on the number of ranks on purpose.
    """

    results: list[StepResult] = field(default_factory=list)
    inputs: list[list[list[torch.Tensor]]] = field(default_factory=list)
    output_gradients: list[list[list[torch.Tensor | None]]] = field(default_factory=list)
    data_parallel: list[tuple[int, ...]] = field(default_factory=list)
    has_batch_norm: bool = False
    has_accelerate_scheduler: bool = False
    data: list[DataTensor] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@final
@dataclass(frozen=True, eq=False)
class CapturedStep:
    """The step of one rank. Tensors are full where torch knows how they are sharded.

    `parameters` and `buffers` are those before the step, `changed` has the buffers that it changed,
    after it. `gradients` is None if the program left no moment at which they could be read. `gaps`
    are places and facts. `snapshots` has what a probe recorded of the modules, and `training` what
    was observed of this step and of those that follow.
    """

    parameters: Tensors
    buffers: Tensors
    calls: list[CapturedCall]
    gradients: Tensors | None
    axes: dict[str, int]
    changed: Tensors = field(default_factory=dict)
    gaps: list[tuple[str, str]] = field(default_factory=list)
    snapshots: Tensors = field(default_factory=dict)
    training: CapturedTraining = field(default_factory=CapturedTraining)


@final
@dataclass(frozen=True, eq=False)
class ReplayGroup:
    """Ranks that called the model with the same inputs, and their calls, of which one is replayed.

    `weight` is the share of these ranks among all.
    """

    ranks: tuple[int, ...]
    calls: list[CapturedCall]
    weight: float


@final
@dataclass(frozen=True, eq=False)
class ReplayPlan:
    """What a single device needs to replay the step of all ranks.

    `parameters` has the tensor of each rank; a single one if all ranks have the same. `data` is
    what the program gets in place of its own data, `gradients` and `settings` of the optimizer what
    it goes on with in each step, so that errors of these do not show again in all that follows.
    """

    groups: list[ReplayGroup]
    parameters: dict[str, list[torch.Tensor]]
    buffers: Tensors
    axes: dict[str, int]
    data: DataPlan
    gradients: list[Tensors]
    settings: list[dict[str, dict[str, float]]]


@final
@dataclass(frozen=True, eq=False)
class ReplayResult:
    """What a single device computed: outputs and buffers of each group, and averaged gradients.

    `parameters` are the weights that it had. `probe` has recorded the modules in the calls of the
    first group, if it was asked to. `failure` says why the calls could not be replayed, as where
    the inputs of a rank are parts that need those of the others; there are no results then.
    """

    outputs: list[list[tuple[str, torch.Tensor]]]
    buffers: list[Tensors]
    gradients: Tensors
    parameters: Tensors
    probe: ModuleProbe | None = None
    failure: str = ""


@final
@dataclass(frozen=True, eq=False)
class Replays:
    """The replays: as the program computes, with perturbed weights, and both in double precision.

    Those in double precision are None if they failed. `trainings` has the steps that the program
    took after each replay; None where it failed before the first had ended.
    """

    reference: ReplayResult
    perturbed: ReplayResult
    fp64: ReplayResult | None = None
    perturbed_fp64: ReplayResult | None = None
    trainings: Sequence[CapturedTraining | None] = (None,) * 4

    @property
    def is_failed(self) -> bool:
        """Whether the calls of the model could not be replayed, and only entire steps compare."""
        return bool(self.reference.failure or self.perturbed.failure)


def plan_replay(
    steps: Sequence[CapturedStep], *, batch_dim: int = 0, use: DataUse = DataUse.JOINED
) -> ReplayPlan:
    """What to replay, from the captured steps of all ranks.

    `use` is how a single process gets the batches of the ranks, `batch_dim` their dim of samples.
    """
    members: list[list[int]] = []
    for rank, step in enumerate(steps):
        same = (group for group in members if _has_same_inputs(steps[group[0]], step))
        group = next(same, None)
        if group is None:
            members.append([rank])
        else:
            group.append(rank)
    groups = [
        ReplayGroup(tuple(group), steps[group[0]].calls, len(group) / len(steps))
        for group in members
    ]
    names = dict.fromkeys(name for step in steps for name in step.parameters)
    parameters = {
        name: _drop_copies([step.parameters[name] for step in steps if name in step.parameters])
        for name in names
    }
    data = [step.training.data for step in steps]
    return ReplayPlan(
        groups,
        parameters,
        steps[0].buffers,
        _find_axes(steps, members),
        plan_data(data, group_by_data(data), dim=batch_dim, use=use),
        [
            _choose_gradients(results)
            for results in zip(*(step.training.results for step in steps), strict=False)
        ],
        [result.training.settings for result in steps[0].training.results],
    )


def reorder_ranks(plan: ReplayPlan) -> ReplayPlan:
    """The same plan, with the samples of the last group of ranks first."""
    shared = {
        key: replace(data, values=data.values[::-1]) for key, data in plan.data.shared.items()
    }
    return replace(plan, data=replace(plan.data, shared=shared))


def _choose_gradients(ranks: Sequence[StepResult]) -> Tensors:
    """The gradients that a single process goes on with, from the results of all ranks.

    None if the program scales them by hand, which is compared: the single process does so too.
    """
    result = ranks[0]
    raw, gradients = result.raw_gradients, result.gradients
    is_reduced_by_hand = any(
        name in rank.raw_gradients and not is_equal(rank.raw_gradients[name], tensor)
        for rank in ranks[1:]
        for name, tensor in raw.items()
    )
    is_changed = any(name in raw and not is_equal(raw[name], gradients[name]) for name in gradients)
    factor = find_scaling(result)
    # A GradScaler divides by a power of two.
    is_unscaled = factor is not None and factor > 0 and math.log2(factor).is_integer()
    return gradients if is_reduced_by_hand or not is_changed or is_unscaled else {}


def _has_same_inputs(a: CapturedStep, b: CapturedStep) -> bool:
    first = [tensor for call in a.calls for tensor in call.inputs]
    second = [tensor for call in b.calls for tensor in call.inputs]
    has_same_form = [(len(call.inputs), call.constants) for call in a.calls] == [
        (len(call.inputs), call.constants) for call in b.calls
    ]
    return has_same_form and all(map(torch.equal, first, second))


def _drop_copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    is_same = all(torch.equal(tensor, tensors[0]) for tensor in tensors[1:])
    return tensors[:1] if is_same else tensors


def _find_axes(steps: Sequence[CapturedStep], members: Sequence[Sequence[int]]) -> dict[str, int]:
    """The mesh of the program, or one that the inputs of its ranks suggest."""
    if steps[0].axes:
        return steps[0].axes
    num_data, size = len(members), len(steps)
    num_model = size // num_data
    if not 1 < num_data < size or any(len(group) != num_model for group in members):
        return {"ranks": size}
    if all(b == a + 1 for group in members for a, b in pairwise(group)):
        return {"data": num_data, "model": num_model}
    if all(b == a + num_data for group in members for a, b in pairwise(group)):
        return {"model": num_model, "data": num_data}
    return {"ranks": size}


def join_parameter(
    tensors: Sequence[torch.Tensor], own: torch.Tensor, axes: Mapping[str, int]
) -> torch.Tensor | None:
    """The full parameter from what the ranks hold; None if it is not clear how it is sharded.

    `own` is the parameter as the program has made it on a single device. If the shards fit together
    in several ways, the one that equals it is right.
    """
    if all(tensor.shape == own.shape for tensor in tensors):
        return tensors[0]
    if len(tensors) == 1:
        return None
    candidates = []
    for layout in shard_layouts(tensors, own.shape, tuple(axes.values())):
        joined = layout.join(tensors)
        if joined is None or joined[0].shape != own.shape:
            continue
        if torch.equal(joined[0], own):
            return joined[0]
        if layout.is_contiguous:
            candidates.append(joined[0])
    distinct = [tensor for tensor in candidates if not torch.equal(tensor, candidates[0])]
    return candidates[0] if candidates and not distinct else None
