"""Runs steps of a model, on a single device or as one rank, and collects a `StepResult` of each."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.ddp import read_buckets
from shardscope._torch.storage import is_transformed
from shardscope.attribution.call_sites import read_stack
from shardscope.attribution.tensors import map_tensors
from shardscope.errors import ParityError
from shardscope.parallel.equivalence.declared import Declared
from shardscope.parallel.equivalence.names import OriginalNames, named_tensors
from shardscope.parallel.equivalence.training import (
    CLIPPED,
    RAW,
    REDUCED,
    Key,
    Table,
    Training,
    TrainingRecorder,
    TrainingValues,
    find_trainer,
)
from shardscope.record import Source, TensorKind

Region = tuple[tuple[int, int], ...]
"""For each dim of a tensor, the start and the end of what a rank holds of it."""
_GRADIENT: Table = (TensorKind.GRADIENT, "")


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


Tensors = dict[Key, torch.Tensor]
GatherFull = Callable[[Tensors], Tensors]
"""Makes full tensors of a rank's shards; all ranks call it once for each step."""

EVALUATION = "evaluation"
"""The name of what the model returns without gradients after an optimizer has stepped."""
_SEPARATOR = "\0"  # in no path


def keep_local(tensors: Tensors) -> Tensors:
    return tensors


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
) -> list[StepResult]:
    """Run the steps of a task, which changes the model; the caller seeds the random numbers.

    `names` are the names before sharding, if the model was sharded; then it runs as a rank of
    `mesh`. `gather` makes full tensors of a rank's shards. `optimizer` is that of training steps.
    """
    names = OriginalNames(model) if names is None else names
    if task.training is None:
        return [_run_step(model, task, _StepRun(names, gather, probed, 0))]
    make, train = task.training.make_optimizer, task.training
    if optimizer is None and make is not None:
        optimizer = make(model)
    recorder = TrainingRecorder(
        model, names, find_trainer(train.step if mesh is None else train.rank_step)
    )
    results = []
    with recorder.watching():
        for index in range(task.num_steps):
            run = _StepRun(names, gather, probed, index, recorder, optimizer, mesh)
            results.append(_run_step(model, task, run))
    return results


@final
@dataclass(frozen=True, eq=False)
class _StepRun:
    """What one step of a task needs; with a `recorder` it is a training step."""

    names: OriginalNames
    gather: GatherFull
    probed: ProbedStep | None
    index: int
    recorder: TrainingRecorder | None = None
    optimizer: object = None
    mesh: Any = None

    @property
    def probe(self) -> Probe | None:
        """The probe, if it records in this step."""
        is_probed = self.probed is not None and self.probed.index == self.index
        return self.probed.probe if self.probed is not None and is_probed else None


def _run_step(model: nn.Module, task: Task, run: _StepRun) -> StepResult:
    names, probe, recorder = run.names, run.probe, run.recorder
    before = {name: _local(buffer).clone() for name, buffer in names.buffers(model)}
    inputs = task.copy_inputs(run.index)
    backwards = _BackwardCounter([parameter for _, parameter in names.parameters(model)])
    unhooked = _find_unhooked(model, names)
    returned: object = None
    with ExitStack() as stack:
        stack.callback(backwards.remove)
        calls = stack.enter_context(_captured_outputs(model, names, backwards, recorder))
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
        if name not in before or not _is_same(before[name], _local(buffer))
    }
    outputs = {
        f"{call}{_SEPARATOR}{path}": tensor
        for call, output in enumerate(calls.results)
        for path, tensor in named_tensors(output)
    } | {
        f"{call}{_SEPARATOR}{EVALUATION}{path}": tensor
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
        **(describe_local(gradients, training) if task.training is not None else {}),
        snapshots={} if probe is None else probe.snapshots,
        declared=declared,
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
        name: float(_local(tensor).double().square().sum())
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
        (kind, f"{name}{_SEPARATOR}{entry}"): tensor
        for (kind, entry), table in training.tables.items()
        for name, tensor in table.items()
    }
    local |= {
        (kind, f"{name}{_SEPARATOR}{index}"): tensor
        for (kind, name), values in training.scalars.items()
        for index, tensor in enumerate(values)
    }
    full = gather(local)
    tables = {
        (kind, entry): {name: full[kind, f"{name}{_SEPARATOR}{entry}"] for name in table}
        for (kind, entry), table in training.tables.items()
    }
    scalars = {
        (kind, name): [
            _detach(full[kind, f"{name}{_SEPARATOR}{index}"]) for index in range(len(values))
        ]
        for (kind, name), values in training.scalars.items()
    }
    raw_gradients, reduced_gradients = tables.pop(RAW, {}), tables.pop(REDUCED, {})
    return StepResult(
        [
            (name.partition(_SEPARATOR)[2], _detach(full[TensorKind.OUTPUT, name]))
            for name in outputs
        ],
        {name: full[TensorKind.GRADIENT, name] for name in gradients},
        {name: _detach(full[TensorKind.BUFFER, name]).clone() for name in buffers},
        training=replace(training, tables=tables, scalars=scalars),
        raw_gradients=raw_gradients,
        reduced_gradients=reduced_gradients,
    )


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


@final
class _BackwardCounter:
    """Counts the backward passes of a step, and the times gradients were cleared before one."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.count = 0
        self.num_cleared = 0
        self._parameters = [p for p in parameters if p.requires_grad and p.is_leaf]
        self._has_gradients = False  # since gradients were last cleared, a backward has run
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulate)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
        ]

    def remove(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()

    def register(self, output: object) -> None:
        """Count the backward pass that starts at an output of the model."""
        is_counted = False

        def count(_: torch.Tensor) -> None:
            nonlocal is_counted
            if is_counted:
                return
            is_counted = True
            self.count += 1
            if self._has_gradients and is_cleared(p.grad for p in self._parameters):
                self.num_cleared += 1
                self._has_gradients = False

        for _, tensor in named_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(count)  # type: ignore[no-untyped-call]

    def _accumulate(self, parameter: torch.Tensor) -> None:
        # A hook of the program may have moved the gradient into its own buffer already.
        self._has_gradients |= parameter.grad is not None


def is_cleared(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Whether no gradient is left, as after `zero_grad()`: all are None or zero."""
    return not any(gradient is not None and _local(gradient).any() for gradient in gradients)


@final
@dataclass(eq=False)
class _Calls:
    """What the model returns in each call, its inputs in all calls, and the line of the first.

    What it returns without gradients, after an optimizer has stepped, is an evaluation.
    """

    results: list[object] = field(default_factory=list)
    evaluations: list[object] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    source: Source | None = None
    num_transformed: int = 0  # calls in a transform of torch.func, such as vmap


@contextmanager
def _captured_outputs(
    model: nn.Module,
    names: OriginalNames,
    backwards: _BackwardCounter,
    recorder: TrainingRecorder | None,
) -> Iterator[_Calls]:
    """Collect what the model gets and returns in each call, also if the step does not return it.

    A step may call the module inside a wrapper such as DDP; a call of the wrapper counts once.
    """
    outputs = _Calls()
    depth = 0

    def enter(_: nn.Module, args: object, kwargs: object) -> None:
        nonlocal depth
        depth += 1
        if depth == 1 and not is_in_backward():
            tensors = [tensor for _, tensor in named_tensors((args, kwargs))]
            outputs.inputs += [_local(t).clone() for t in tensors if not is_transformed(t)]
            outputs.source = outputs.source or read_stack(sys._getframe(1)).source

    def leave(_: nn.Module, __: object, output: object) -> None:
        nonlocal depth
        depth -= 1
        if depth or is_in_backward():  # backward calls a checkpointed model again
            return
        if any(is_transformed(tensor) for _, tensor in named_tensors(output)):
            outputs.num_transformed += 1
        else:
            is_updated = recorder is not None and recorder.is_updated
            is_evaluation = is_updated and not torch.is_grad_enabled()
            (outputs.evaluations if is_evaluation else outputs.results).append(output)
            backwards.register(output)

    handles = []
    for name, module in names.modules(model):
        if not name:
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def _is_same(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.shape != after.shape:
        return False
    # A NaN that stays NaN is not a change.
    return bool(((before == after) | ((before != before) & (after != after))).all())


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.wait() if hasattr(tensor, "wait") else tensor


def _densify(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor
