"""Captures steps of a program's rank: what its model takes, returns and gets back, and all else.

Of the first step, what is needed to replay the calls of the model; of every step, what the loss,
clipping and the optimizer compute, and the data that the program makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from copy import copy
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, final
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.hooks import intercept
from shardscope._torch.dispatch import TorchDispatchMode, is_overload
from shardscope._torch.dtensor import quiet_collectives
from shardscope._torch.fsdp import has_flat_parameters, meshes_of
from shardscope._torch.module_calls import replaced_outermost_calls
from shardscope._torch.tree import leaves, map_leaves
from shardscope.attribution.program_records import read_identity
from shardscope.attribution.tensors import tensors_in
from shardscope.hang import P2P_KINDS
from shardscope.launch.instrument import Instrument
from shardscope.launch.step_data import DataMode
from shardscope.launch.step_training import StepsObserver
from shardscope.launch.steps import StepsDone
from shardscope.numerics import is_random
from shardscope.parallel.equivalence import (
    MeanRngMode,
    OriginalNames,
    named_buffers,
    named_parameters,
    named_tensors,
)
from shardscope.parallel.parity.captured_steps import CapturedCall, CapturedStep, Constant
from shardscope.parallel.parity.probe import ModuleProbe
from shardscope.record import Recording

CAPTURE = "capture"
"""The instrument of each rank."""
PROBED = "-modules"
"""The end of the name of an instrument that also records what modules take and return."""
_SCALING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")


def name_step_file(rank: int) -> str:
    """The file with the captured step of a rank, or with a sentence that says why there is none."""
    return f"step{rank}.pt"


@final
class CaptureInstrument(Instrument):
    """Captures the steps of a rank; of the first also what the model takes, returns and gets back.

    Random numbers that the model draws are replaced by their mean, as a single process would draw
    others; compiled functions run eagerly. With a `probed_step`, that step takes the place of the
    first, and modules are recorded in it, too.
    """

    def __init__(self, folder: str, *, probed_step: int | None = None) -> None:
        self._folder = folder
        self._probe = None if probed_step is None else ModuleProbe()
        self._num_before = probed_step or 0  # steps that are still to end before the captured one
        self._stack = ExitStack()
        self._model: nn.Module | None = None
        self._parameters: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._calls: list[CapturedCall] = []
        self._others: dict[str, None] = {}  # classes of other models that were called
        self._opaque: dict[str, None] = {}  # classes of arguments that are not understood
        self._has_sent = False  # whether ranks exchange tensors pairwise
        self._is_in_model = False
        self._step: CapturedStep | None = None  # the first, once its gradients are known
        self._observer: StepsObserver | None = None
        self._data = DataMode(self._is_inside)
        self._stack.enter_context(self._data.watching())
        self._rng = ModelRng(lambda: self._is_in_model or is_in_backward())
        # Installed now: the program may import these functions by name.
        hook = register_optimizer_step_pre_hook(self._begin_optimizer)
        self._stack.callback(hook.remove)
        for name in _SCALING:
            for owner in (torch.nn.utils, clip_grad):
                if hasattr(owner, name):
                    function = _preceded_by(self._finish, getattr(owner, name))
                    self._stack.enter_context(mock.patch.object(owner, name, function))
        scaler = torch.amp.GradScaler
        unscale = _preceded_by(self._finish, scaler.unscale_)
        self._stack.enter_context(mock.patch.object(scaler, "unscale_", unscale))

    def start(self, models: list[nn.Module]) -> None:
        """Copy the weights of the model that is about to be called, and watch its calls."""
        if not models:
            self._refuse(
                "The program does not call what it trains as a module, so that its step cannot be "
                "captured. Call the model itself, not a method of it."
            )
        model = self._model = models[0]
        if has_flat_parameters(model):
            self._refuse(
                "The model is wrapped in FullyShardedDataParallel (FSDP1), whose weights have no "
                "shape of their own. Use fully_shard."
            )
        torch.compiler.set_stance("force_eager")
        if not self._num_before:
            self._begin_captured(model)
        self._observer = StepsObserver(model)
        self._stack.enter_context(self._observer.watching())
        self._stack.enter_context(self._rng)
        self._stack.enter_context(intercept(self, report_missing=lambda sentence: None))
        self._stack.enter_context(replaced_outermost_calls(self._call))

    def before(self, event: CollectiveEvent) -> None:
        """Called before a collective."""
        self._has_sent |= any(single.read().kind in P2P_KINDS for single in event.singles())

    def _begin_captured(self, model: nn.Module) -> None:
        """Copy the weights before the step that is captured, and record its modules if asked to."""
        self._parameters = copy_all_full(named_parameters(model))
        self._buffers = copy_all_full(named_buffers(model))
        if self._probe is not None:
            self._stack.enter_context(self._probe.attached(model, OriginalNames(model)))

    def end_step(self) -> None:
        """A step has ended: save what was captured so far."""
        if self._observer is None or self._model is None:
            return
        if self._num_before:
            self._observer.end_step()
            self._num_before -= 1
            if not self._num_before:
                self._begin_captured(self._model)
            return
        if self._step is None:  # no moment before the end of the step was seen
            self._step = self._read_step(None)
        self._observer.end_step()
        training = self._observer.training
        training.data = self._data.list_used()
        self._save(replace(self._step, training=training))

    def _is_inside(self) -> bool:
        """Whether the model or an optimizer is running."""
        return self._is_in_model or (self._observer is not None and self._observer.is_in_optimizer)

    def stop(self, error: BaseException | None) -> Recording | None:
        """There is no recording: the step is in a file."""
        self._stack.close()
        return None

    def _call(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        is_trained = module.training and any(p.requires_grad for p in module.parameters())
        if not is_trained or not torch.is_grad_enabled() or is_in_backward():
            return call(*args, **kwargs)
        if module is not self._model:
            self._others.setdefault(type(module).__name__)
            return call(*args, **kwargs)
        args, kwargs = self._data.take_arguments((args, kwargs), "argument of the model")
        inputs, constants = self._read_arguments((args, kwargs))
        self._is_in_model = True
        try:
            result = call(*args, **kwargs)
        finally:
            self._is_in_model = False
        if self._observer is not None:
            self._observer.note_call([to_local(tensor) for tensor in inputs])
        # A loss may be computed from logits that are returned too: copies get only the gradients
        # that come from outside the model. Views would lose their hooks if written in place.
        result = clone_tensors(result)
        outputs = list(named_tensors(result))
        self._data.note_outputs([tensor for _, tensor in outputs])
        if self._step is not None or self._num_before:
            return result
        captured = CapturedCall(
            inputs,
            constants,
            [(path, copy_tensor(tensor)) for path, tensor in outputs],
            [None] * len(outputs),
        )
        for index, (_, tensor) in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(_note_gradient, captured, index))  # type: ignore[no-untyped-call]
        self._calls.append(captured)
        return result

    def _read_arguments(self, arguments: Any) -> tuple[list[torch.Tensor], list[Constant]]:
        """Copies of the tensors of a call, and its plain values."""
        every = leaves(arguments)
        for leaf in every:
            if isinstance(leaf, torch.Tensor | Constant):
                continue
            if any(True for _ in tensors_in(leaf)):
                self._refuse(
                    f"The model takes tensors in a {type(leaf).__name__}, which cannot be replaced "
                    "to replay the call. Pass them as arguments, or in dicts, lists and tuples."
                )
            self._opaque.setdefault(type(leaf).__name__)
        tensors = [copy_tensor(leaf) for leaf in every if isinstance(leaf, torch.Tensor)]
        return tensors, [leaf for leaf in every if isinstance(leaf, Constant)]

    def _begin_optimizer(self, optimizer: Any, *_: Any) -> None:
        if self._model is None or is_in_backward():
            return
        own = {id(parameter) for _, parameter in named_parameters(self._model)}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._finish()

    def _finish(self) -> None:
        """Read the gradients of the first step, unless backward has not run."""
        if self._model is None or self._step is not None or not self._calls:
            return
        gradients = [
            (name, parameter.grad)
            for name, parameter in named_parameters(self._model)
            if parameter.grad is not None
        ]
        if gradients:
            self._step = self._read_step(copy_all_full(gradients))
            self._save(self._step)  # in case that the program fails later

    def _read_step(self, gradients: dict[str, torch.Tensor] | None) -> CapturedStep:
        """What was captured of the first step."""
        assert self._model is not None
        if self._has_sent:
            self._refuse(
                "The ranks send tensors to each other, as stages of a pipeline and ring attention "
                "do, so that no rank's model can be called with its inputs alone. Compare the "
                "program without a pipeline, or give parity a TARGET with model(), batch(model) "
                "and parallelize(model, mesh)."
            )
        calls = [
            CapturedCall(
                [to_full(tensor) for tensor in call.inputs],
                call.constants,
                [(path, to_full(tensor)) for path, tensor in call.outputs],
                [None if tensor is None else to_full(tensor) for tensor in call.gradients],
            )
            for call in self._calls
        ]
        _, size = read_identity()
        after = copy_all_full(named_buffers(self._model))
        changed = {
            name: after[name]
            for name, buffer in self._buffers.items()
            if name in after and not torch.equal(buffer, after[name])
        }
        is_seen = any(tensor is not None for call in calls for tensor in call.gradients)
        return CapturedStep(
            self._parameters,
            self._buffers,
            calls,
            gradients if is_seen and not self._others else None,
            _read_axes(self._model, size),
            changed if len(calls) == 1 else {},
            list(self._find_gaps(gradients is not None, is_seen, changed)),
            {} if self._probe is None else dict(self._probe.snapshots),
        )

    def _refuse(self, sentence: str) -> NoReturn:
        """End the program because its step cannot be captured."""
        self._is_done = True
        self._save(sentence)
        raise StepsDone

    def _save(self, result: CapturedStep | str) -> None:
        rank, _ = read_identity()
        torch.save(result, Path(self._folder, name_step_file(rank)))

    def _find_gaps(
        self, has_gradients: bool, is_seen: bool, changed: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, str]]:
        if self._others:
            names = ", ".join(self._others)
            yield "gradients", f"not compared: the step also calls {names}, which was not replayed"
        elif not has_gradients:
            yield (
                "gradients",
                "not compared: the optimizer steps during backward, or not at all, so that there "
                "is no moment at which all gradients exist",
            )
        elif not is_seen:
            yield (
                "gradients",
                "not compared: backward does not pass through a tensor that the model returns, in "
                "dicts, lists, tuples or dataclasses",
            )
        if self._opaque:
            names = ", ".join(self._opaque)
            yield "inputs", f"arguments of type {names} were the single process's own"
        if changed and len(self._calls) > 1:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            yield (
                "buffers",
                f"what the step writes into {min(changed)}{more} was not compared: it calls the "
                "model several times, between which ranks may exchange buffers",
            )
        if self._rng.has_drawn:
            yield (
                "random numbers",
                "those that the model draws, as for dropout, were replaced by their mean in both "
                "versions, and are not compared",
            )


@final
class ModelRng(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers by their mean while `is_active()`, and knows whether any were."""

    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self, is_active: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_active = is_active
        self._mean = MeanRngMode()
        self.has_drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if not is_overload(func) or not is_random(func, args, kwargs) or not self._is_active():
            return func(*args, **kwargs)
        self.has_drawn = True
        return self._mean.__torch_dispatch__(func, types, args, kwargs)


def _preceded_by(before: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        return function(*args, **kwargs)

    return call


def clone_tensors(value: Any) -> Any:
    """The value with copies, which autograd knows, in place of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if not is_dataclass(value) or isinstance(value, type | dict):
        is_container = isinstance(value, list | tuple | dict)
        return map_leaves(clone_tensors, value) if is_container else value
    duplicate = copy(value)
    for item in fields(value):
        object.__setattr__(duplicate, item.name, clone_tensors(getattr(value, item.name)))
    return duplicate


def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that autograd does not know; it requires a gradient if the tensor does."""
    with torch.no_grad():
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def to_full(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor; all ranks call it in the same order."""
    with torch.no_grad(), quiet_collectives():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        dense = full if full.layout is torch.strided else full.to_dense()
        return dense.detach().cpu().requires_grad_(tensor.requires_grad)


def copy_all_full(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Full copies; names of one tensor share a copy."""
    copies: dict[int, torch.Tensor] = {}
    result = {}
    for name, tensor in named:
        if id(tensor) not in copies:
            copies[id(tensor)] = to_full(copy_tensor(tensor)).detach()
        result[name] = copies[id(tensor)]
    return result


def _note_gradient(call: CapturedCall, index: int, gradient: torch.Tensor) -> None:
    known = call.gradients[index]
    copied = gradient.detach().clone()
    call.gradients[index] = copied if known is None else known + copied


def _read_axes(model: nn.Module, size: int) -> dict[str, int]:
    """The names and sizes of the model's mesh; empty if none contains all ranks."""
    meshes = [mesh for mesh in meshes_of(model) if mesh.size() == size and mesh.mesh_dim_names]
    if not meshes:
        return {}
    mesh = max(meshes, key=lambda mesh: mesh.ndim)
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
