"""Runs one step of a model, on a single device or as one rank, and collects its `StepResult`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar, final

import torch
from torch import nn

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.modules import named_modules_with_aliases, own_buffers, own_parameters
from shardscope.attribution.tensors import map_tensors
from shardscope.errors import ParityError
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


T = TypeVar("T")
Loss = Callable[[Any], object]
"""The user's function of what the model returns; its result must be a scalar tensor."""
Step = Callable[[nn.Module, Any], object]
"""The user's function that runs forward and backward; what it returns is ignored."""


@final
@dataclass(frozen=True, eq=False)
class Task:
    """One step: `step(model, inputs)` if the user passed a step, otherwise forward, loss, backward.

    `loss_scale` compensates for gradients that are averaged over ranks with different batches.
    Without `has_backward` only forward runs.
    """

    inputs: object  # as the user passed them; `call_model` passes them to the model
    loss: Loss | None = None
    step: Step | None = None
    seed: int = 0
    loss_scale: float = 1.0
    has_backward: bool = True

    def copy_inputs(self) -> object:
        """A copy of the inputs for one run, which may change them."""
        return map_tensors(self.inputs, _copy)

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


@final
class OriginalNames:
    """The names of a model's modules and tensors before sharding, to name them after it.

    `renamed` maps module names of the parallel model to the original's.
    """

    def __init__(self, model: nn.Module, renamed: Mapping[str, str] | None = None) -> None:
        self._renamed = dict(renamed or {})
        # The objects are kept alive, so that an id is not reused.
        self._modules: dict[int, tuple[nn.Module, list[str]]] = {}
        self._tensors: dict[int, tuple[torch.Tensor, list[str]]] = {}
        self.module_names: set[str] = set()  # names of the original's modules
        self.known: set[str] = set()  # names of the original's parameters and buffers
        for module_name, module in named_modules_with_aliases(model):
            self.module_names.add(module_name)
            self._modules.setdefault(id(module), (module, []))[1].append(module_name)
            for name, tensor in (*own_parameters(module), *own_buffers(module)):
                self._tensors.setdefault(id(tensor), (tensor, []))[1].append(
                    _join(module_name, name)
                )
                self.known.add(_join(module_name, name))

    def modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Every module of the parallel model under the original's name; wrappers first."""
        names: dict[str, str] = {}
        for module_name, module in named_modules_with_aliases(model):
            parent, _, attribute = module_name.rpartition(".")
            path = _join(names.get(parent, parent), attribute) if module_name else ""
            path = self._renamed.get(path, path)
            _, original_names = self._modules.get(id(module), (module, [path]))
            names[module_name] = path if path in original_names else original_names[0]
            yield names[module_name], module

    def parameters(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter of the parallel model under each of its names."""
        for module_name, module in self.modules(model):
            for name, tensor in own_parameters(module):
                yield self._name(_join(module_name, name), tensor), tensor

    def buffers(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Every buffer of the parallel model under each of its names."""
        for module_name, module in self.modules(model):
            for name, tensor in own_buffers(module):
                yield self._name(_join(module_name, name), tensor), tensor

    def _name(self, path: str, tensor: torch.Tensor) -> str:
        """The name by path, or, if the original has no such path, the tensor's original name."""
        if path in self.known or id(tensor) not in self._tensors:
            return path
        return self._tensors[id(tensor)][1][0]


def _join(module_name: str, name: str) -> str:
    return f"{module_name}.{name}".lstrip(".")


Tensors = dict[str, torch.Tensor]
GatherFull = Callable[[TensorKind, Tensors], Tensors]
"""Makes full tensors of a rank's shards; all ranks call it with theirs, in the same order."""

_SEPARATOR = "\0"  # in no path


def _keep_local(_: TensorKind, tensors: Tensors) -> Tensors:
    return tensors


class Probe(Protocol):
    """Records what modules or ops compute while a step runs."""

    def attached(self, model: nn.Module, names: OriginalNames) -> AbstractContextManager[None]:
        """Record until the context ends."""

    @property
    def snapshots(self) -> dict[str, torch.Tensor]:
        """The recorded tensors, by encoded `ProbePoint`."""

    @property
    def sources(self) -> dict[str, Source]:
        """The source lines of the snapshots, where known."""

    @property
    def numbers(self) -> dict[str, dict[str, float]]:
        """The float arguments of the recorded ops."""


def execute(
    model: nn.Module,
    task: Task,
    *,
    names: OriginalNames | None = None,
    gather: GatherFull = _keep_local,
    probe: Probe | None = None,
) -> StepResult:
    """Run one step of `model`, which changes it; the caller seeds the random number generators.

    `names` are the names before sharding, if the model was sharded. `gather` makes full tensors
    of a rank's shards.
    """
    names = OriginalNames(model) if names is None else names
    before = {name: _local(buffer).clone() for name, buffer in names.buffers(model)}
    inputs = task.copy_inputs()
    backwards = _BackwardCounter([parameter for _, parameter in names.parameters(model)])
    with ExitStack() as stack:
        calls = stack.enter_context(_captured_outputs(model, names, backwards))
        if probe is not None:
            stack.enter_context(probe.attached(model, names))
        if task.step is not None:
            task.step(model, inputs)
        else:
            _run_step(model, inputs, task)
    gradients = {name: parameter.grad for name, parameter in names.parameters(model)}
    gradients |= {f"inputs{path}": tensor.grad for path, tensor in named_tensors(inputs)}
    buffers = dict(names.buffers(model))
    changed = {
        name
        for name, buffer in buffers.items()
        if name not in before or not _is_same(before[name], _local(buffer))
    }
    outputs = {
        f"{call}{_SEPARATOR}{path}": tensor
        for call, output in enumerate(calls)
        for path, tensor in named_tensors(output)
    }
    present = {
        name: _densify(gradient) for name, gradient in gradients.items() if gradient is not None
    }
    return StepResult(
        [
            (name.partition(_SEPARATOR)[2], _detach(tensor))
            for name, tensor in gather(TensorKind.OUTPUT, outputs).items()
        ],
        gather(TensorKind.GRADIENT, present),
        {
            name: _detach(buffer).clone()
            for name, buffer in gather(TensorKind.BUFFER, buffers).items()
        },
        frozenset(changed),
        num_calls=len(calls),
        num_backwards=backwards.count,
        num_cleared=backwards.num_cleared,
        snapshots={} if probe is None else probe.snapshots,
        sources={} if probe is None else probe.sources,
        numbers={} if probe is None else probe.numbers,
    )


def _run_step(model: nn.Module, inputs: object, task: Task) -> None:
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
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulate)  # type: ignore[no-untyped-call]

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

    def _accumulate(self, _: torch.Tensor) -> None:
        self._has_gradients = True


def is_cleared(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Whether no gradient is left, as after `zero_grad()`: all are None or zero."""
    return not any(gradient is not None and _local(gradient).any() for gradient in gradients)


@contextmanager
def _captured_outputs(
    model: nn.Module, names: OriginalNames, backwards: _BackwardCounter
) -> Iterator[list[object]]:
    """Collect what the model returns in each call, also if the user's step does not return it.

    A step may call the module inside a wrapper such as DDP; a call of the wrapper counts once.
    """
    outputs: list[object] = []
    depth = 0

    def enter(*_: object) -> None:
        nonlocal depth
        depth += 1

    def leave(_: nn.Module, __: object, output: object) -> None:
        nonlocal depth
        depth -= 1
        if not depth and not is_in_backward():  # backward calls a checkpointed model again
            outputs.append(output)
            backwards.register(output)

    handles = []
    for name, module in names.modules(model):
        if not name:
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def named_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter under each of its names, without the prefixes of wrappers."""
    for module_name, module in named_modules_with_aliases(model):
        for name, parameter in own_parameters(module):
            yield f"{module_name}.{name}".lstrip("."), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every buffer under each of its names, without the prefixes of wrappers."""
    for module_name, module in named_modules_with_aliases(model):
        for name, buffer in own_buffers(module):
            yield f"{module_name}.{name}".lstrip("."), buffer


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
