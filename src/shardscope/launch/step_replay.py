"""Replays captured steps with the model of a program that runs as a single process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.module_calls import replaced_outermost_calls
from shardscope._torch.modules import preserved_numbers
from shardscope._torch.random_state import preserved_random_state
from shardscope._torch.tree import leaves, map_leaves
from shardscope.launch.instrument import Instrument
from shardscope.launch.step_capture import (
    PROBED,
    ModelRng,
    clone_tensors,
    copy_all_full,
    copy_tensor,
    to_full,
    to_local,
)
from shardscope.launch.step_data import DataMode
from shardscope.launch.step_training import StepsObserver
from shardscope.launch.steps import StepsDone
from shardscope.numerics import (
    convert_inputs_to_fp64,
    fp64_mode,
    main_dtype,
    perturb_ulp,
    perturb_ulp_,
)
from shardscope.parallel.equivalence import (
    MeanRngMode,
    OriginalNames,
    named_buffers,
    named_parameters,
    named_tensors,
)
from shardscope.parallel.parity.captured_steps import (
    CapturedCall,
    Constant,
    ReplayPlan,
    ReplayResult,
    join_parameter,
)
from shardscope.parallel.parity.probe import ModuleProbe
from shardscope.record import Recording

REPLAYS = ("replay", "replay-perturbed", "replay-fp64", "replay-fp64-perturbed")
"""The instruments of a single process: how it replays what was captured."""
PLAN = "plan.pt"
"""The file, in the folder of a replay, of what to replay."""


class _ReplayError(Exception):
    """Says in a sentence why a step cannot be replayed."""


class _CallError(Exception):
    """Says in a sentence why a single process cannot call its model as the ranks do."""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.200}"


def name_replay_file(instrument: str) -> str:
    """The file with the result of a replay, or with a sentence that says why there is none."""
    return f"{instrument}.pt"


def name_training_file(instrument: str) -> str:
    """The file with the entire steps that a single process takes after a replay."""
    return f"{instrument}-training.pt"


@final
class ReplayInstrument(Instrument):
    """Replays captured steps with the model of a program that runs as a single process.

    After that the program takes its own steps, with the data of all ranks. `name` says how:
    `replay`, with `-fp64` in double precision, with `-perturbed` with weights and inputs that are
    changed by one unit in the last place. Meshes of any shape have a single rank.
    """

    def __init__(self, name: str, folder: str) -> None:
        self._name = name
        self._folder = folder
        self._is_fp64, self._is_perturbed = "fp64" in name, "perturbed" in name
        self._plan: ReplayPlan = torch.load(Path(folder, PLAN), weights_only=False)
        self._stack = ExitStack()
        self._model: nn.Module | None = None
        self._is_in_model = False
        self._observer: StepsObserver | None = None
        self._data = DataMode(self._is_inside, self._plan.data)
        self._stack.enter_context(self._data.watching())
        init_device_mesh = device_mesh.init_device_mesh

        @functools.wraps(init_device_mesh)
        def make_mesh(
            device_type: str, mesh_shape: Sequence[int], *args: Any, **kwargs: Any
        ) -> Any:
            return init_device_mesh(device_type, (1,) * len(mesh_shape), *args, **kwargs)

        for owner in (device_mesh, dist):
            self._stack.enter_context(mock.patch.object(owner, "init_device_mesh", make_mesh))

    def start(self, models: list[nn.Module]) -> None:
        """Wait for the call of the model, whose arguments say how to pass captured inputs."""
        torch.compiler.set_stance("force_eager")
        if models:
            self._model = models[0]
            self._stack.enter_context(replaced_outermost_calls(self._call))

    def end_step(self) -> None:
        """A step has ended: save what was observed so far."""
        if self._observer is not None:
            self._observer.end_step()
            training = self._observer.training
            training.problems = list(self._data.problems)
            torch.save(training, Path(self._folder, name_training_file(self._name)))

    def _is_inside(self) -> bool:
        """Whether the model or an optimizer is running."""
        return self._is_in_model or (self._observer is not None and self._observer.is_in_optimizer)

    def stop(self, error: BaseException | None) -> Recording | None:
        """There is no recording: the result is in a file."""
        self._stack.close()
        return None

    def _call(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        is_trained = module is self._model and module.training and torch.is_grad_enabled()
        if not is_trained or is_in_backward():
            return call(*args, **kwargs)
        if self._observer is None:
            with preserved_random_state(), preserved_numbers(module):
                self._replay(module, (args, kwargs))
            self._observer = self._observe(module)
        args, kwargs = self._data.take_arguments((args, kwargs), "argument of the model")
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._observer.note_call([to_local(copy_tensor(tensor)) for tensor in tensors])
        if self._is_perturbed:
            args, kwargs = perturb_ulp_(nn.Module(), (args, kwargs))
        if self._is_fp64:
            args, kwargs = convert_inputs_to_fp64((args, kwargs))
        self._is_in_model = True
        try:
            result = clone_tensors(call(*args, **kwargs))
        finally:
            self._is_in_model = False
        outputs = [tensor for _, tensor in named_tensors(result)]
        self._data.note_outputs(outputs)
        self._observer.note_outputs(outputs)
        return result

    def _replay(self, model: nn.Module, arguments: Any) -> None:
        """Replay the calls of the ranks, and save what the model computes."""
        result: ReplayResult | str
        try:
            self._is_in_model = True
            result = self._make_result(model, arguments)
        except _ReplayError as error:
            result = str(error)
        finally:
            self._is_in_model = False
        torch.save(result, Path(self._folder, name_replay_file(self._name)))
        if isinstance(result, str) or PROBED in self._name:
            self._is_done = True
            raise StepsDone

    def _observe(self, model: nn.Module) -> StepsObserver:
        """Let the program go on with its own steps, from the weights of the ranks."""
        _load(named_buffers(model), self._plan.buffers)
        rng = ModelRng(lambda: self._is_in_model or is_in_backward())
        self._stack.enter_context(rng)
        if self._is_fp64:
            self._stack.enter_context(fp64_mode(self._narrow))
        observer = StepsObserver(model, self._exchange_gradients, self._exchange_settings)
        self._stack.enter_context(observer.watching())
        return observer

    def _exchange_gradients(self, parameters: Mapping[str, torch.Tensor], step: int) -> None:
        """Go on with the gradients of the ranks, so that what follows is compared by itself."""
        if step >= len(self._plan.gradients):
            return
        gradients = self._plan.gradients[step]
        values = dict(gradients)
        if self._is_perturbed:
            values = dict(zip(gradients, perturb_ulp(list(gradients.values())), strict=True))
        owned = ((name, p.grad) for name, p in parameters.items() if p.grad is not None)
        _load(iter(owned), values)

    def _exchange_settings(self, optimizer: Optimizer, names: Mapping[int, str], step: int) -> None:
        """Go on with the settings of the ranks' optimizer, such as the learning rate."""
        settings = self._plan.settings[step] if step < len(self._plan.settings) else {}
        for group in optimizer.param_groups:
            name = next((names[id(p)] for p in group["params"] if id(p) in names), None)
            for setting, values in settings.items():
                if name in values and setting in group and group[setting] != values[name]:
                    group[setting] = values[name]

    def _make_result(self, model: nn.Module, arguments: Any) -> ReplayResult:
        plan, is_fp64, is_perturbed = self._plan, self._is_fp64, self._is_perturbed
        weights = full = _join_weights(model, plan)
        narrow = self._narrow = main_dtype(model)
        if is_perturbed:
            weights = dict(zip(weights, perturb_ulp(list(weights.values())), strict=True))
        if is_fp64:
            model.double()
        _load(named_parameters(model), weights)
        _synchronize_gradients(model)
        result = ReplayResult([], [], {}, full, ModuleProbe() if PROBED in self._name else None)
        with ExitStack() as stack:
            if is_fp64:
                stack.enter_context(fp64_mode(narrow))
            stack.enter_context(MeanRngMode())
            try:
                self._replay_groups(model, arguments, result)
            except Exception as error:  # noqa: BLE001 - entire steps can still be compared
                reason = str(error) if isinstance(error, _CallError) else _describe(error)
                model.zero_grad(set_to_none=True)
                return ReplayResult([], [], {}, full, failure=reason)
        return result

    def _replay_groups(self, model: nn.Module, arguments: Any, result: ReplayResult) -> None:
        """Replay the calls of each group of ranks, and add what they compute to `result`."""
        for group in self._plan.groups:
            with ExitStack() as probing:
                if result.probe is not None and group is self._plan.groups[0]:
                    probing.enter_context(result.probe.attached(model, OriginalNames(model)))
                _load(named_buffers(model), self._plan.buffers)
                calls = [
                    _change(call, is_perturbed=self._is_perturbed, is_fp64=self._is_fp64)
                    for call in group.calls
                ]
                _replay_group(model, arguments, calls, group.weight, result)


def _join_weights(model: nn.Module, plan: ReplayPlan) -> dict[str, torch.Tensor]:
    """The full weights of the captured step for each parameter of the single process's model."""
    weights = {}
    own = dict(named_parameters(model))
    for names, fact in (
        (own.keys() - plan.parameters.keys(), "no rank has"),
        (plan.parameters.keys() - own.keys(), "only the ranks have"),
    ):
        if names:
            raise _ReplayError(
                f"The parameter {min(names)} is one that {fact}, and the single process's model "
                "cannot get the same weights. Pipeline stages, and experts that each rank numbers "
                "by itself, cannot be compared."
            )
    for name, parameter in own.items():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        weight = join_parameter(plan.parameters[name], local.detach(), plan.axes)
        if weight is None:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in plan.parameters[name][:2])
            raise _ReplayError(
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


def _synchronize_gradients(model: nn.Module) -> None:
    """Let FSDP leave gradients after each backward, also if the first is not the last of a step."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_is_last_backward(True)
            module.set_requires_gradient_sync(True, recurse=False)


def _change(call: CapturedCall, *, is_perturbed: bool, is_fp64: bool) -> CapturedCall:
    """The call with inputs that are changed in the last place, or in double precision."""
    inputs = call.inputs
    if is_perturbed:
        inputs = perturb_ulp_(nn.Module(), inputs)
    if is_fp64:
        inputs = convert_inputs_to_fp64(inputs)
    return dataclasses.replace(call, inputs=inputs)


def _replay_group(
    model: nn.Module,
    arguments: Any,
    calls: Sequence[CapturedCall],
    weight: float,
    result: ReplayResult,
) -> None:
    """Run forward and backward of a group's calls, and add what they compute to `result`."""
    outputs: list[tuple[str, torch.Tensor]] = []
    for call in calls:
        output = _call_with(model, arguments, call)
        outputs += [(path, to_full(copy_tensor(tensor))) for path, tensor in named_tensors(output)]
        _run_backward(output, call)
    result.outputs.append(outputs)
    result.buffers.append(copy_all_full(named_buffers(model)))
    named = [(name, p.grad) for name, p in named_parameters(model) if p.grad is not None]
    totals: dict[int, torch.Tensor] = {}  # of tied parameters one
    for (name, gradient), full in zip(named, copy_all_full(named).values(), strict=True):
        if id(gradient) not in totals:
            known = result.gradients.get(name)
            totals[id(gradient)] = full * weight if known is None else known + full * weight
        result.gradients[name] = totals[id(gradient)]
    model.zero_grad(set_to_none=True)


def _call_with(model: nn.Module, arguments: Any, call: CapturedCall) -> Any:
    """Call the model with captured tensors and values in place of those in its own arguments."""
    own = leaves(arguments)
    num_tensors = sum(isinstance(leaf, torch.Tensor) for leaf in own)
    num_constants = sum(isinstance(leaf, Constant) for leaf in own)
    if (num_tensors, num_constants) != (len(call.inputs), len(call.constants)):
        raise _CallError(
            f"The ranks call the model with {len(call.inputs)} tensors and {len(call.constants)} "
            f"plain values, and a single process with {num_tensors} and {num_constants}, so that "
            "the calls cannot be compared."
        )
    tensors, constants = iter(call.inputs), iter(call.constants)

    def exchange(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _distribute_like(leaf, copy_tensor(next(tensors)))
        return next(constants) if isinstance(leaf, Constant) else leaf

    args, kwargs = map_leaves(exchange, arguments)
    return model(*args, **kwargs)


def _distribute_like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` as a DTensor if `tensor` is one: on a mesh of one rank, of any placements."""
    if not isinstance(tensor, DTensor):
        return value
    return DTensor.from_local(value, tensor.device_mesh, tensor.placements, run_check=False)


def _run_backward(result: Any, call: CapturedCall) -> None:
    tensors = [tensor for _, tensor in named_tensors(result)]
    pairs = [
        (tensor, _distribute_like(tensor, gradient.to(tensor.dtype)))
        for tensor, gradient in zip(tensors, call.gradients, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    if pairs:
        outputs, gradients = zip(*pairs, strict=True)
        torch.autograd.backward(outputs, gradients)
