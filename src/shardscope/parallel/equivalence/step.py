"""Runs steps of a model, on a single device or as one rank, and collects a `StepResult` of each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardscope._torch.ddp import read_buckets
from shardscope._torch.fsdp import asks_for_rounding
from shardscope.attribution.tensors import map_tensors
from shardscope.errors import ParityError
from shardscope.parallel.equivalence.declared import Declared
from shardscope.parallel.equivalence.model_calls import BackwardCounter, captured_outputs
from shardscope.parallel.equivalence.names import OriginalNames, named_tensors
from shardscope.parallel.equivalence.random_numbers import Draws, RngObserver
from shardscope.parallel.equivalence.step_result import (
    EVALUATION,
    SEPARATOR,
    GatherFull,
    StepResult,
    describe_local,
    gather_result,
    keep_local,
    local_of,
)
from shardscope.parallel.equivalence.training import (
    Key,
    Table,
    Training,
    TrainingRecorder,
    TrainingValues,
    find_trainer,
)
from shardscope.record import Source, TensorKind

T = TypeVar("T")
Loss = Callable[[Any], object]
"""The user's function of what the model returns; its result must be a scalar tensor."""
Step = Callable[[nn.Module, Any], object]
"""The user's function that runs forward and backward; what it returns is ignored."""


@final
@dataclass(frozen=True, eq=False)
class Task:
    """What is run: `step(model, inputs)` if there is a step, otherwise forward, loss and backward.

    With `training`, several training steps are run, and `inputs` is a list with their batches.
    `loss_scale` compensates for gradients that are averaged over ranks with different batches.
    Without `has_backward` only forward runs.
    """

    inputs: Any  # as the user passed them; `call_model` passes them to the model
    loss: Loss | None = None
    step: Step | None = None
    seed: int = 0
    loss_scale: float = 1.0
    has_backward: bool = True
    training: Training | None = None

    @property
    def num_steps(self) -> int:
        """How many steps are run."""
        return 1 if self.training is None else len(self.inputs)

    def copy_inputs(self, step: int = 0) -> object:
        """A copy of the inputs of a step, which the run may change."""
        return map_tensors(self.inputs if self.training is None else self.inputs[step], _copy)

    def with_inputs(self, inputs: object, *, loss_scale: float | None = None) -> Task:
        """The same task with other inputs."""
        scale = self.loss_scale if loss_scale is None else loss_scale
        return replace(self, inputs=inputs, loss_scale=scale)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return copy.copy(tensor.detach()).clone().requires_grad_(tensor.requires_grad)


def call_model(model: nn.Module, inputs: object) -> object:
    """Call the model with a mapping as keywords, a tuple or list as arguments, or one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def default_loss(output: object) -> list[torch.Tensor]:
    """A loss for each tensor of the output that requires grad.

    It is elementwise and summed, so that it is the same for a full tensor and for the sum over
    its shards. It is not linear: the sum of a softmax or of a norm is constant, and its
    gradient is only noise.
    """
    losses = []
    for _, tensor in named_tensors(output):
        if not tensor.requires_grad:
            continue
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        wide = real if real.dtype is torch.float64 else real.float()
        losses.append(((wide * wide + 1).sqrt() + wide * 0.5).sum())
    return losses


def shard_batch(inputs: T, *, dim: int, num_shards: int, index: int) -> T:
    """One rank's shard of a batch; tensors of another size than the first along `dim` are kept."""
    sizes = [tensor.shape[dim] for _, tensor in named_tensors(inputs) if tensor.ndim > dim]
    size = sizes[0] if sizes else 0

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim <= dim or tensor.shape[dim] != size:
            return tensor
        chunks = tensor.tensor_split(num_shards, dim)
        return chunks[index].detach().requires_grad_(tensor.requires_grad)

    sharded: T = map_tensors(inputs, shard)
    return sharded


class Probe(Protocol):
    """Records what modules or ops compute while a step runs."""

    def attached(self, model: nn.Module, names: OriginalNames) -> AbstractContextManager[None]:
        """Record until the context ends."""

    @property
    def snapshots(self) -> dict[str, torch.Tensor]:
        """The recorded tensors, by encoded `ProbePoint`."""

    @property
    def declared(self) -> dict[str, Declared]:
        """The types that placements or annotations give the snapshots."""

    @property
    def sources(self) -> dict[str, Source]:
        """The source lines of the snapshots, where known."""

    @property
    def numbers(self) -> dict[str, dict[str, float]]:
        """The float arguments of the recorded ops."""


@final
@dataclass(frozen=True, eq=False)
class ProbedStep:
    """A probe, and the index of the step in which it records."""

    probe: Probe
    index: int = 0


def execute(
    model: nn.Module,
    task: Task,
    *,
    names: OriginalNames | None = None,
    gather: GatherFull = keep_local,
    probed: ProbedStep | None = None,
    optimizer: object = None,
    mesh: Any = None,
    has_observer: bool = False,
) -> list[StepResult]:
    """Run the steps of a task, which changes the model; the caller seeds the random numbers.

    `names` are the names before sharding, if the model was sharded; then it runs as a rank of
    `mesh`. `gather` makes full tensors of a rank's shards. `optimizer` is that of training steps.
    With `has_observer` the random numbers that the steps draw are noted.
    """
    names = OriginalNames(model) if names is None else names
    observer = RngObserver() if has_observer else None
    run = _StepRun(names, gather, probed, 0, observer, None, optimizer, mesh)
    with ExitStack() as stack:
        if observer is not None:
            stack.enter_context(observer.attached(model, names))
        return _execute(model, task, run)


def _execute(model: nn.Module, task: Task, run: _StepRun) -> list[StepResult]:
    train, optimizer = task.training, run.optimizer
    if train is None:
        return [_run_step(model, task, run)]
    if optimizer is None and train.make_optimizer is not None:
        optimizer = train.make_optimizer(model)
    trainer = find_trainer(train.step if run.mesh is None else train.rank_step)
    recorder = TrainingRecorder(model, run.names, trainer)
    with recorder.watching():
        return [
            _run_step(
                model, task, replace(run, index=index, recorder=recorder, optimizer=optimizer)
            )
            for index in range(task.num_steps)
        ]


@final
@dataclass(frozen=True, eq=False)
class _StepRun:
    """What one step of a task needs; with a `recorder` it is a training step."""

    names: OriginalNames
    gather: GatherFull
    probed: ProbedStep | None
    index: int
    observer: RngObserver | None = None
    recorder: TrainingRecorder | None = None
    optimizer: object = None
    mesh: Any = None

    @property
    def probe(self) -> Probe | None:
        """The probe, if it records in this step."""
        is_probed = self.probed is not None and self.probed.index == self.index
        return self.probed.probe if self.probed is not None and is_probed else None


_GRADIENT: Table = (TensorKind.GRADIENT, "")


def _run_step(model: nn.Module, task: Task, run: _StepRun) -> StepResult:
    names, probe, recorder = run.names, run.probe, run.recorder
    before = {name: local_of(buffer).clone() for name, buffer in names.buffers(model)}
    inputs = task.copy_inputs(run.index)
    backwards = BackwardCounter([parameter for _, parameter in names.parameters(model)])
    unhooked = _find_unhooked(model, names)
    returned: object = None
    with ExitStack() as stack:
        stack.callback(backwards.remove)
        calls = stack.enter_context(captured_outputs(model, names, backwards, recorder))
        if probe is not None:
            stack.enter_context(probe.attached(model, names))
        wrapper_calls = stack.enter_context(_counted_calls(model, DistributedDataParallel))
        if task.training is not None:
            returned = task.training.run(model, inputs, run.optimizer, mesh=run.mesh)
        elif task.step is not None:
            task.step(model, inputs)
        else:
            _run_default_step(model, inputs, task)
    training = TrainingValues() if recorder is None else recorder.take(returned)
    gradients = training.tables.pop(_GRADIENT, None)
    if gradients is None:
        gradients = {
            name: _densify(parameter.grad)
            for name, parameter in names.parameters(model)
            if parameter.grad is not None
        }
    gradients |= {
        f"inputs{path}": _densify(tensor.grad)
        for path, tensor in named_tensors(inputs)
        if tensor.grad is not None
    }
    buffers = dict(names.buffers(model))
    changed = {
        name
        for name, buffer in buffers.items()
        if name not in before or not _is_same(before[name], local_of(buffer))
    }
    outputs = {
        f"{call}{SEPARATOR}{path}": tensor
        for call, output in enumerate(calls.results)
        for path, tensor in named_tensors(output)
    } | {
        f"{call}{SEPARATOR}{EVALUATION}{path}": tensor
        for call, output in enumerate(calls.evaluations)
        for path, tensor in named_tensors(output)
    }
    full = gather_result(run.gather, outputs, gradients, buffers, training)
    declared: dict[str | Key, Declared] = {}
    declared.update({} if probe is None else probe.declared)
    return replace(
        full,
        changed=frozenset(changed) | training.changed,
        num_calls=len(calls.results) + len(calls.evaluations),
        num_transformed=calls.num_transformed,
        num_backwards=backwards.count,
        num_cleared=backwards.num_cleared,
        is_bypassed=bool(wrapper_calls) and not any(wrapper_calls.values()) and bool(calls.results),
        inputs=calls.inputs,
        input_source=calls.source,
        unhooked=unhooked,
        asks_for_rounding=asks_for_rounding(model),
        **(describe_local(gradients, training) if task.training is not None else {}),
        snapshots={} if probe is None else probe.snapshots,
        declared=declared,
        draws=Draws() if run.observer is None else run.observer.take(),
        sources={} if probe is None else probe.sources,
        numbers={} if probe is None else probe.numbers,
    )


def _find_unhooked(model: nn.Module, names: OriginalNames) -> frozenset[str]:
    """The parameters that require a gradient, but not when their module was wrapped in DDP."""
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    hooked = {
        id(parameter)
        for wrapper in wrappers
        for bucket in read_buckets(wrapper)
        for parameter in bucket.parameters
    }
    inner = {id(p) for wrapper in wrappers for p in wrapper.parameters() if p.requires_grad}
    return frozenset(n for n, p in names.parameters(model) if id(p) in inner - hooked)


@contextmanager
def _counted_calls(model: nn.Module, wrapper: type[nn.Module]) -> Iterator[dict[int, int]]:
    """How often each wrapper of a class is called, by its id, until the context ends."""
    counts: dict[int, int] = {}

    def count(module: nn.Module, _: object) -> None:
        counts[id(module)] += 1

    handles = []
    for module in model.modules():
        if isinstance(module, wrapper):
            counts[id(module)] = 0
            handles.append(module.register_forward_pre_hook(count))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def _run_default_step(model: nn.Module, inputs: object, task: Task) -> None:
    output = call_model(model, inputs)
    if not task.has_backward:
        return
    losses = default_loss(output) if task.loss is None else [_find_loss(task, output)]
    losses = [loss * task.loss_scale if task.loss_scale != 1.0 else loss for loss in losses]
    losses = [loss for loss in losses if loss.requires_grad]
    if losses:
        torch.autograd.backward(losses)


def _find_loss(task: Task, output: object) -> torch.Tensor:
    assert task.loss is not None
    loss = task.loss(output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else loss
        raise ParityError(
            f"loss returned {kind!s:.80}, but backward starts at a tensor with one element. Return "
            "the loss as a scalar tensor."
        )
    return loss


def _densify(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _is_same(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.shape != after.shape:
        return False
    # A NaN that stays NaN is not a change.
    return bool(((before == after) | ((before != before) & (after != after))).all())
