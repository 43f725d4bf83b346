"""Captures the first step of a program's rank, and replays such steps on a single process.

`CaptureInstrument` observes a rank that computes; `ReplayInstrument` gets the model of the same
program, run as a single process, at its first training call, and calls it with what was captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.dispatch import TorchDispatchMode, is_overload
from shardscope._torch.fsdp import has_flat_parameters, meshes_of
from shardscope._torch.module_calls import replace_outermost_calls
from shardscope._torch.modules import named_modules_with_aliases, own_buffers, own_parameters
from shardscope.attribution.program_records import read_identity
from shardscope.attribution.tensors import map_tensors
from shardscope.errors import LaunchError
from shardscope.launch.steps import ModelCall, StepsDone
from shardscope.numerics import (
    convert_inputs_to_fp64,
    fp64_mode,
    is_random,
    main_dtype,
    perturb_ulp,
    perturb_ulp_,
)
from shardscope.parallel.equivalence import MeanRngMode, named_tensors
from shardscope.parallel.parity.captured_steps import (
    CapturedCall,
    CapturedStep,
    ReplayPlan,
    ReplayResult,
    join_parameter,
)
from shardscope.record import Recording

CAPTURE = "capture"
REPLAYS = ("replay", "replay-perturbed", "replay-fp64", "replay-fp64-perturbed")
"""The instruments of a single process: how it replays what was captured."""
PLAN = "plan.pt"
"""The file, in the folder of a replay, of what to replay."""
_SCALING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm")


def name_step_file(rank: int) -> str:
    """The file with the captured step of a rank."""
    return f"step{rank}.pt"


def name_replay_file(instrument: str) -> str:
    """The file with the result of a replay."""
    return f"{instrument}.pt"


@final
class CaptureInstrument:
    """Captures the first step of a rank, up to the moment before gradients are clipped or used.

    Random numbers that the model draws are replaced by their mean, as a single process would draw
    others; compiled functions run eagerly.
    """

    is_done = False

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._model: nn.Module | None = None
        self._parameters: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._calls: list[CapturedCall] = []
        self._others: dict[str, None] = {}  # classes of other models that were called
        self._is_in_model = False
        self._rng = _ModelRng(lambda: self._is_in_model or is_in_backward())
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
            raise LaunchError(
                "The program does not call what it trains as a module, so that its step cannot be "
                "captured. Call the model itself, not a method of it."
            )
        model = self._model = models[0]
        if has_flat_parameters(model):
            raise LaunchError(
                "The model is wrapped in FullyShardedDataParallel (FSDP1), whose weights have no "
                "shape of their own. Use fully_shard."
            )
        torch.compiler.set_stance("force_eager")
        self._parameters = _copy_full(_named_parameters(model))
        self._buffers = _copy_full(_named_buffers(model))
        self._stack.enter_context(self._rng)
        replace_outermost_calls(self._call)
        self._stack.callback(replace_outermost_calls, None)

    def end_step(self) -> None:
        """Called if the step has ended and no moment before it was seen."""
        self._save(None)

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
        inputs = _list_tensors((args, kwargs))
        self._is_in_model = True
        try:
            result = call(*args, **kwargs)
        finally:
            self._is_in_model = False
        # A loss may be computed from logits that are returned too: views get only the gradients
        # that come from outside the model.
        result = map_tensors(result, lambda tensor: tensor.view_as(tensor))
        outputs = list(named_tensors(result))
        captured = CapturedCall(
            inputs, [(path, _copy(tensor)) for path, tensor in outputs], [None] * len(outputs)
        )
        for index, (_, tensor) in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(_note_gradient, captured, index))
        self._calls.append(captured)
        return result

    def _begin_optimizer(self, optimizer: Any, *_: Any) -> None:
        if self._model is None or is_in_backward():
            return
        own = {id(parameter) for _, parameter in _named_parameters(self._model)}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._finish()

    def _finish(self) -> None:
        """Read the gradients, unless backward has not run, and end the program."""
        if self._model is None or self.is_done or not self._calls:
            return
        gradients = [
            (name, parameter.grad)
            for name, parameter in _named_parameters(self._model)
            if parameter.grad is not None
        ]
        if gradients:
            self._save(_copy_full(gradients))

    def _save(self, gradients: dict[str, torch.Tensor] | None) -> None:
        assert self._model is not None
        calls = [
            CapturedCall(
                [_to_full(tensor) for tensor in call.inputs],
                [(path, _to_full(tensor)) for path, tensor in call.outputs],
                [None if tensor is None else _to_full(tensor) for tensor in call.gradients],
            )
            for call in self._calls
        ]
        rank, size = read_identity()
        axes = _read_axes(self._model, size)
        gaps = list(self._find_gaps(has_gradients=gradients is not None))
        gradients = None if self._others else gradients
        step = CapturedStep(self._parameters, self._buffers, calls, gradients, axes, gaps)
        torch.save(step, Path(self._folder, name_step_file(rank)))
        self.is_done = True
        raise StepsDone

    def _find_gaps(self, *, has_gradients: bool) -> Iterator[tuple[str, str]]:
        assert self._model is not None
        if self._others:
            names = ", ".join(self._others)
            yield "gradients", f"not compared: the step also calls {names}, which was not replayed"
        elif not has_gradients:
            yield (
                "gradients",
                "not compared: the optimizer steps during backward, or not at all, so that there "
                "is no moment at which all gradients exist",
            )
        after = _copy_full(_named_buffers(self._model))
        changed = [
            name
            for name, buffer in self._buffers.items()
            if name in after and not torch.equal(buffer, after[name])
        ]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            yield "buffers", f"what the step writes into {changed[0]}{more} was not compared"
        if self._rng.has_drawn:
            yield (
                "random numbers",
                "those that the model draws, as for dropout, were replaced by their mean in both "
                "versions, and are not compared",
            )


@final
class ReplayInstrument:
    """Replays captured steps with the model of a program that runs as a single process.

    `name` says how: `replay`, with `-fp64` in double precision, with `-perturbed` with weights and
    inputs that are changed by one unit in the last place. Meshes of any shape have a single rank.
    """

    is_done = False

    def __init__(self, name: str, folder: str) -> None:
        self._name = name
        self._folder = folder
        self._stack = ExitStack()
        init_device_mesh = device_mesh.init_device_mesh

        @functools.wraps(init_device_mesh)
        def make_mesh(device_type: str, mesh_shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
            return init_device_mesh(device_type, (1,) * len(mesh_shape), *args, **kwargs)

        for owner in (device_mesh, dist):
            self._stack.enter_context(mock.patch.object(owner, "init_device_mesh", make_mesh))

    def start(self, models: list[nn.Module]) -> None:
        """Wait for the call of the model, whose arguments say how to pass captured inputs."""
        torch.compiler.set_stance("force_eager")
        if models:
            ModelCall(models[0], self._replay)

    def end_step(self) -> None:
        """The program is ended before."""

    def stop(self, error: BaseException | None) -> Recording | None:
        """There is no recording: the result is in a file."""
        self._stack.close()
        return None

    def _replay(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan: ReplayPlan = torch.load(Path(self._folder, PLAN), weights_only=False)
        is_fp64, is_perturbed = "fp64" in self._name, "perturbed" in self._name
        weights = _join_weights(model, plan)
        narrow = main_dtype(model)
        if is_perturbed:
            weights = dict(zip(weights, perturb_ulp(list(weights.values())), strict=True))
        if is_fp64:
            model.double()
        _load(_named_parameters(model), weights)
        _load(_named_buffers(model), plan.buffers)
        outputs = []
        with ExitStack() as stack:
            if is_fp64:
                stack.enter_context(fp64_mode(narrow))
            stack.enter_context(MeanRngMode())  # type: ignore[no-untyped-call]
            for group in plan.groups:
                outputs.append([])
                for call in group.calls:
                    inputs = call.inputs
                    if is_perturbed:
                        inputs = perturb_ulp_(nn.Module(), inputs)
                    if is_fp64:
                        inputs = convert_inputs_to_fp64(inputs)
                    result = _call_with(model, args, kwargs, inputs)
                    outputs[-1] += [(path, _copy(tensor)) for path, tensor in named_tensors(result)]
                    _run_backward(result, call, group.weight)
        named = [(name, p.grad) for name, p in _named_parameters(model) if p.grad is not None]
        outputs = [[(path, _to_full(value)) for path, value in group] for group in outputs]
        file = Path(self._folder, name_replay_file(self._name))
        torch.save(ReplayResult(outputs, _copy_full(named)), file)
        self.is_done = True
        raise StepsDone


@final
class _ModelRng(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers by their mean while `is_active()`, and knows whether any were."""

    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self, is_active: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_active = is_active
        self._mean = MeanRngMode()  # type: ignore[no-untyped-call]
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


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter under each of its names, without those of torch's wrappers."""
    for path, module in named_modules_with_aliases(model):
        for name, parameter in own_parameters(module):
            yield f"{path}.{name}".lstrip("."), parameter


def _named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in named_modules_with_aliases(model):
        for name, buffer in own_buffers(module):
            yield f"{path}.{name}".lstrip("."), buffer


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _to_full(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor; all ranks call it in the same order."""
    with torch.no_grad():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        dense = full if full.layout is torch.strided else full.to_dense()
        return dense.detach().cpu().requires_grad_(tensor.requires_grad)


def _copy_full(named: Any) -> dict[str, torch.Tensor]:
    """Full copies; names of one tensor share a copy."""
    copies: dict[int, torch.Tensor] = {}
    result = {}
    for name, tensor in named:
        if id(tensor) not in copies:
            copies[id(tensor)] = _to_full(_copy(tensor)).detach()
        result[name] = copies[id(tensor)]
    return result


def _list_tensors(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(_copy(tensor))
        return tensor

    map_tensors(value, note)
    return tensors


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


def _join_weights(model: nn.Module, plan: ReplayPlan) -> dict[str, torch.Tensor]:
    """The full weights of the captured step for each parameter of the single process's model."""
    weights = {}
    own = dict(_named_parameters(model))
    for names, fact in (
        (own.keys() - plan.parameters.keys(), "no rank has"),
        (plan.parameters.keys() - own.keys(), "only the ranks have"),
    ):
        if names:
            raise LaunchError(
                f"The parameter {min(names)} is one that {fact}, and the single process's model "
                "cannot get the same weights. Pipeline stages, and experts that each rank numbers "
                "by itself, cannot be compared."
            )
    for name, parameter in own.items():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        weight = join_parameter(plan.parameters[name], local.detach(), plan.axes)
        if weight is None:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in plan.parameters[name][:2])
            raise LaunchError(
                f"How the ranks shard {name} is not clear: they have {shapes}, and a single "
                f"process {list(local.shape)}. Initialize the full weight with one seed and give "
                "each rank its slice, or make it a DTensor."
            )
        weights[name] = weight
    return weights


def _load(named: Iterator[tuple[str, torch.Tensor]], values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in named:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if name in values and values[name].shape == local.shape:
                local.copy_(values[name])


def _call_with(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
) -> Any:
    """Call the model with these tensors in place of those in its own arguments."""
    own = _list_tensors((args, kwargs))
    if len(own) != len(inputs):
        raise LaunchError(
            f"The ranks call the model with {len(inputs)} tensors and a single process with "
            f"{len(own)}, so that the calls cannot be compared."
        )
    pending = iter(inputs)

    def exchange(tensor: torch.Tensor) -> torch.Tensor:
        value = _copy(next(pending))
        return _distribute_like(tensor, value)

    args, kwargs = map_tensors((args, kwargs), exchange)
    return model(*args, **kwargs)


def _distribute_like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` as a DTensor if `tensor` is one: on a mesh of one rank, of any placements."""
    if not isinstance(tensor, DTensor):
        return value
    return DTensor.from_local(value, tensor.device_mesh, tensor.placements, run_check=False)


def _run_backward(result: Any, call: CapturedCall, weight: float) -> None:
    tensors = [tensor for _, tensor in named_tensors(result)]
    pairs = [
        (tensor, _distribute_like(tensor, (gradient * weight).to(tensor.dtype)))
        for tensor, gradient in zip(tensors, call.gradients, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    if pairs:
        outputs, gradients = zip(*pairs, strict=True)
        torch.autograd.backward(outputs, gradients)
