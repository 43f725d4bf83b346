"""Observes every op of a step and logs its allocations with their purpose."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.hooks import intercept
from shardscope._torch.cuda.workspaces import CublasHandles, workspace_bytes
from shardscope._torch.dispatch import (
    READ_VALUE,
    DataDependentOutputException,
    TorchDispatchMode,
    disable_dispatch_modes,
)
from shardscope._torch.dtensor import ShapePropagationTracker
from shardscope._torch.fake import moves_within_cpu, on_device
from shardscope._torch.fake_models import FakeSubstitution
from shardscope._torch.frames import (
    is_compiled_mask_running,
    is_compiled_running,
    running_param_group,
    watched_offloading,
)
from shardscope._torch.fsdp import (
    flat_shares,
    has_flat_parameters,
    is_fully_sharded,
    param_group_shares,
)
from shardscope._torch.modules import every_module
from shardscope._torch.storage import is_wrapper_type, watched_resizes
from shardscope._torch.tree import map_tensor_leaves, tensor_leaves
from shardscope.attribution.module_names import NO_MODULE, ModuleNames
from shardscope.errors import MemoryProfileError, ShardscopeError
from shardscope.record import MemoryKind
from shardscope.record.text import describe_error
from shardscope.shard.memory.allocations import AllocationLog, LiveStorages, Shares
from shardscope.shard.memory.module_phase import PhaseTracker

_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_LIFTS = {_aten.lift.default, _aten.lift_fresh.default, _aten.lift_fresh_copy.default}
_UNSETTLED = (None, MemoryKind.COMMUNICATION)
_Tensor = torch.Tensor
_MethodT = TypeVar("_MethodT", bound=Callable[..., None])


def _keep_running(method: _MethodT) -> _MethodT:
    """Let a live step continue after an error of ours: the observation ends with `failure`."""

    @functools.wraps(method)
    def call(self: MemoryMode, *args: Any, **kwargs: Any) -> None:
        if not self._is_live:
            method(self, *args, **kwargs)
        elif self.failure is None:
            try:
                method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - observing must not end the training
                self.failure = error

    return call  # type: ignore[return-value]


@final
class MemoryMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode under which a step is run.

    A live step is one of a training run with data: its ops get what they would get without us, and
    after an error of ours it continues, unobserved, with `failure` set.
    """

    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(
        self,
        names: ModuleNames,
        phase_tracker: PhaseTracker,
        substitution: FakeSubstitution,
        *,
        device_type: str,
        is_live: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failure: Exception | None = None
        self._is_live = is_live
        self.allocation_log = AllocationLog(phase_tracker.lines.read)
        self.num_values_read = 0  # of tensors that have none
        self.has_compiled = False
        self.has_offloaded = False
        self._names = names
        self._phase_tracker = phase_tracker
        self._substitution = substitution
        self._device_type = device_type
        self._live = LiveStorages(
            self.allocation_log,
            device_type=device_type,
            read_current=phase_tracker.read,
            substitution=substitution,
        )
        self._is_fully_sharded = any(map(is_fully_sharded, names.roots()))
        self._has_flat_parameters = any(map(has_flat_parameters, names.roots()))
        self._trials = ShapePropagationTracker()
        self._is_wrapper: dict[type, bool] = {}
        self._cublas_handles = CublasHandles()
        self._hooks: dict[int, RemovableHandle] = {}  # by the parameter
        self._parameters: list[_Tensor] = []  # kept alive, so that their ids stay unique
        for model in names.roots():
            self._register_model(model)

    @property
    def _needs_moves(self) -> bool:
        """Whether the CPU stands for a GPU to which tensors are moved."""
        return self._device_type == "cpu" and not self._is_live

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe ops, resizes and collectives until the context ends."""
        try:
            with (
                self._trials.watching(),
                moves_within_cpu() if self._needs_moves else nullcontext(),
                watched_resizes(self._note_resize),
                watched_offloading(self._note_offloading),
                intercept(self),
                self,
            ):
                yield
        finally:
            for hook in self._hooks.values():
                hook.remove()
            self._hooks.clear()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._trials.is_on() or self.failure is not None:
            return op(*args, **(kwargs or {}))
        if self._is_live:
            return self._observe_live(op, types, args, kwargs or {})
        inputs = tensor_leaves(args)
        if kwargs:
            inputs.extend(tensor_leaves(kwargs))
        if any(self._wraps(cls) for cls in types):
            for tensor in inputs:
                if isinstance(tensor, nn.Parameter):
                    self._register_parameter(tensor)
            return NotImplemented  # to see the ops that the wrapper subclass runs
        if not self.has_compiled and not is_in_backward():
            self.has_compiled = is_compiled_running(sys._getframe())
        if op is READ_VALUE:
            return self._read_value(args[0])
        self._phase_tracker.lines.note_op()
        if self.has_compiled and is_compiled_mask_running(sys._getframe()):
            return op(*args, **on_device(kwargs or {}, self._device_type))
        if op not in _LIFTS:  # of constants from Python, whose values torch must keep
            for tensor in inputs:
                self._register_input(tensor)
            if any(map(self._substitution.are_needed, inputs)):
                args, kwargs = self._substitute(args), self._substitute(kwargs or {})
        if kwargs:
            kwargs = on_device(kwargs, self._device_type)
        result = op(*args, **(kwargs or {}))
        self._note_result(op, args, kwargs, result)
        return result

    def _observe_live(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op as it is, and log what it allocates."""
        if any(self._wraps(cls) for cls in types):
            self._note_live_inputs(nn.Parameter, args, kwargs)
            return NotImplemented  # to see the ops that the wrapper subclass runs
        if not self.has_compiled and not is_in_backward():
            self.has_compiled = is_compiled_running(sys._getframe())
        self._note_live_inputs(_Tensor, args, kwargs)
        result = op(*args, **kwargs)
        self._note_live_result(op, args, kwargs, result)
        return result

    @_keep_running
    def _note_live_inputs(self, cls: type, args: Any, kwargs: Any) -> None:
        for tensor in (*tensor_leaves(args), *tensor_leaves(kwargs)):
            if cls is nn.Parameter and isinstance(tensor, nn.Parameter):
                self._register_parameter(tensor)
            elif cls is not nn.Parameter:
                self._register_input(tensor)

    @_keep_running
    def _note_live_result(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._note_result(op, args, kwargs, result)

    @_keep_running
    def before(self, event: CollectiveEvent) -> None:
        """Called before a collective: the tensors it reads and writes are communication buffers."""
        for collective in event.singles():
            call = collective.read()
            shares = self._find_bucket(call.inputs) or self._find_param_group()
            for tensor in (*call.inputs, *(call.outputs or ())):
                for allocation in self._live.find_allocations(tensor):
                    allocation.is_communicated = True
                    is_buffer = allocation.is_buffer and event.op.startswith("c10d.")
                    if is_buffer or shares:
                        allocation.claim(MemoryKind.COMMUNICATION, shares)

    def _find_bucket(self, tensors: Sequence[_Tensor]) -> Shares | None:
        """The shares of the gradients in DDP's bucket, if these tensors are one."""
        bucket = self._phase_tracker.find_bucket(sum(tensor.numel() for tensor in tensors))
        if bucket is None:
            return None
        return {
            id(parameter): (self._names.owner_of(parameter), parameter.numel())
            for parameter in bucket.parameters
        }

    def _read_value(self, tensor: _Tensor) -> Any:
        """What `.item()` returns: zero without data, as most steps only log a loss or a norm."""
        if self._substitution.are_needed(tensor):
            with disable_dispatch_modes():
                return READ_VALUE(tensor)
        try:
            return READ_VALUE(tensor)
        except DataDependentOutputException:
            self.num_values_read += 1
            if tensor.dtype == torch.bool:
                return False
            return 0.0 if tensor.is_floating_point() else 0

    @_keep_running
    def _note_resize(self, storage: torch.UntypedStorage) -> None:
        self._live.resize(storage)

    def _note_offloading(self) -> None:
        self.has_offloaded = True

    @_keep_running
    def observe_optimizer(self, optimizer: Optimizer) -> None:
        """Claim an optimizer's state, and the gradients of its parameters."""
        for group in optimizer.param_groups:
            is_on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                self.claim_gradient(parameter)
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, _Tensor):
                        self._claim(value, MemoryKind.OPTIMIZER_STATE, of=parameter)
                        for allocation in self._live.find_allocations(value):
                            # Counters of steps stay on the host unless a kernel wants them.
                            allocation.is_on_host = value.dim() == 0 and not is_on_device

    @_keep_running
    def claim_gradient(self, parameter: _Tensor) -> None:
        """Claim a parameter's `.grad` as a gradient."""
        if parameter.grad is not None:
            self._claim(parameter.grad, MemoryKind.GRADIENTS, of=parameter)

    def _claim(
        self, tensor: _Tensor, kind: MemoryKind, *, of: _Tensor, otherwise: int = NO_MODULE
    ) -> None:
        """Claim the tensor as this kind, for the module that owns the parameter `of`.

        `otherwise` is the owner if no module owns the parameter. A flat parameter of FSDP1 contains
        many parameters, each of which has a share.
        """
        owner = self._names.owner_of(of)
        for allocation, start, size in self._live.find_parts(tensor):
            shares: dict[Hashable, tuple[int, int]] = {
                (start, number): (self._names.find(module), num_elements)
                for number, (module, num_elements) in enumerate(flat_shares(of, tensor))
            }
            if not shares and max(owner, otherwise) != NO_MODULE:
                shares[start] = (otherwise if owner == NO_MODULE else owner, size)
            allocation.claim(kind, shares)

    def _register_model(self, model: nn.Module) -> None:
        for module in every_module(model):
            index = self._names.find(module)
            # A module may have an attribute of its own that is called buffers.
            buffers = nn.Module.buffers(module, recurse=False)
            for tensor in (*module.parameters(recurse=False), *buffers):
                # A tied parameter belongs to one module, and so do its gradient and state.
                self._claim(tensor, MemoryKind.PARAMETERS, of=tensor, otherwise=index)
                self._watch_gradient(tensor)
                self.claim_gradient(tensor)

    def _register_input(self, tensor: _Tensor) -> None:
        allocation = self._live.find_existing(tensor)
        if allocation is None or allocation.kind not in _UNSETTLED:
            return
        if isinstance(tensor, nn.Parameter):
            self._register_parameter(tensor)

    def _register_parameter(self, parameter: nn.Parameter) -> None:
        """Claim a parameter that the model did not have when the step began: FSDP gathered it.

        FSDP1 keeps the parameter, and changes its storage.
        """
        if id(parameter) in self._hooks and not self._has_flat_parameters:
            return
        is_sharded = self._is_fully_sharded or self._has_flat_parameters
        kind = MemoryKind.GATHERED if is_sharded else MemoryKind.PARAMETERS
        self._claim(parameter, kind, of=parameter)
        self._watch_gradient(parameter)

    def _watch_gradient(self, tensor: _Tensor) -> None:
        if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._hooks:
            self._parameters.append(tensor)
            hook = tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self.claim_gradient
            )
            self._hooks[id(tensor)] = hook

    def _note_result(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        for tensor in tensor_leaves(result):
            allocation = self._live.find_or_begin(tensor)
            if allocation is not None and op in _EMPTY:
                allocation.is_buffer = True
        handle_bytes = self._cublas_handles.create_for(op)
        if handle_bytes:
            charged_to = self._phase_tracker.read()._replace(module=NO_MODULE)
            self.allocation_log.begin(handle_bytes, charged_to).claim(MemoryKind.TEMPORARIES)
        elif op.namespace == "fsdp":
            self._note_fsdp(args, kwargs)
        num_bytes = workspace_bytes(op, args)
        if num_bytes:
            self.allocation_log.use_briefly(num_bytes, self._phase_tracker.read())

    def _note_fsdp(self, args: Any, kwargs: Any) -> None:
        """Claim the buffers that FSDP's own ops copy parameters or gradients to and from."""
        shares = self._find_param_group()
        for tensor in tensor_leaves((args, kwargs or {})):
            for allocation in self._live.find_allocations(tensor):
                if allocation.is_buffer:
                    allocation.claim(MemoryKind.COMMUNICATION, shares)

    def _find_param_group(self) -> Shares:
        """The shares of the parameters that FSDP2 gathers or reduces now; empty if it does not."""
        group = running_param_group(sys._getframe())
        return {
            number: (self._names.find(module), num_elements)
            for number, (module, num_elements) in enumerate(param_group_shares(group))
        }

    def _substitute(self, value: Any) -> Any:
        """Arguments in which tensors with data are replaced by fake ones."""
        return map_tensor_leaves(self._substitution.of, value)

    def _wraps(self, cls: type) -> bool:
        known = self._is_wrapper.get(cls)
        if known is None:
            known = self._is_wrapper[cls] = is_wrapper_type(cls)
        return known


_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[2])
_WITH_DATA = (
    'or run it with data: in a simulated world, `with simulate(mesh={"dp": 1})`, without '
    "materialize()"
)
_NO_WORKERS = "Take the batch before memory() is called, or use a DataLoader with num_workers=0"
_NO_CUDA = "Remove calls of torch.cuda where there is no GPU"
_REMEDIES = {  # by a part of torch's message, for tensors without data
    "DataLoader worker process": _NO_WORKERS,
    "Attempted to set the storage of a tensor on device": _NO_WORKERS,
    "Torch not compiled with CUDA enabled": _NO_CUDA,
    "not linked with support for cuda": _NO_CUDA,
    "Found no NVIDIA driver": _NO_CUDA,
    "No CUDA GPUs are available": _NO_CUDA,
    "shape_env must not be None": "Nested tensors need data: pad them",
    "have been used in the graph": (
        "Take parameters from the model in the step, not before memory() is called"
    ),
}


@contextmanager
def explain_failures(watcher: MemoryMode) -> Iterator[None]:
    """Explain errors that the lack of data caused, or may have caused; reraise others."""
    try:
        yield
    except Exception as error:
        remedy = _find_remedy(error)
        if remedy:
            raise MemoryProfileError(
                f"the step failed on tensors without data: {_describe(error)}. {remedy}, "
                f"{_WITH_DATA}."
            ) from error
        if watcher.num_values_read and not isinstance(error, ShardscopeError):
            raise MemoryProfileError(
                "the step failed after it had read values of tensors that have none, which "
                f"read as zero: {_describe(error)}. Remove what depends on values, {_WITH_DATA}."
            ) from error
        raise


def _find_remedy(error: Exception) -> str:
    if isinstance(error, ShardscopeError):
        return ""
    text = str(error)
    return next((remedy for words, remedy in _REMEDIES.items() if words in text), "")


def _describe(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith(("<", _TORCH, _OURS))]
    where = f" ({user_frames[-1].filename}, line {user_frames[-1].lineno})" if user_frames else ""
    return describe_error(error).rstrip(" .") + where
