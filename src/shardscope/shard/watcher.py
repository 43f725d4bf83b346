"""Sees every op of a step, and writes down what it allocates and what that is for."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.device_moves import moves_within_cpu, on_device
from shardscope._torch.dispatch import (
    READ_VALUE,
    DataDependentOutputException,
    TorchDispatchMode,
    without_modes,
)
from shardscope._torch.fake_models import StandIns
from shardscope._torch.frames import running_param_group
from shardscope._torch.fsdp import is_fully_sharded, param_group_shares
from shardscope._torch.fsdp_groups import flat_shares, has_flat_parameters
from shardscope._torch.intercept import Issued, intercept
from shardscope._torch.modules import every_module
from shardscope._torch.running import is_compiled_running, watched_offloading
from shardscope._torch.storages import is_wrapper_type, watched_resizes
from shardscope._torch.trial_runs import TrialRuns
from shardscope._torch.workspaces import CUBLAS_BYTES, MATRIX_OPS, workspace_bytes
from shardscope.comm.names import NO_MODULE, ModuleNames
from shardscope.record import MemoryKind
from shardscope.shard.ledger import Ledger, Shares
from shardscope.shard.live import LiveStorages
from shardscope.shard.place import Places

__all__ = ["Watcher"]

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


@final
class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode under which a step is run."""

    def __init__(
        self, names: ModuleNames, places: Places, stand_ins: StandIns, *, device_type: str
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()
        self.num_values_read = 0  # of tensors that have none
        self.has_compiled = False
        self.has_offloaded = False
        self._names = names
        self._places = places
        self._stand_ins = stand_ins
        self._device_type = device_type
        self._live = LiveStorages(
            self.ledger, device_type=device_type, read_place=places.read, stand_ins=stand_ins
        )
        self._is_fully_sharded = any(map(is_fully_sharded, names.roots()))
        self._has_flat_parameters = any(map(has_flat_parameters, names.roots()))
        self._trials = TrialRuns()
        self._is_wrapper: dict[type, bool] = {}
        self._has_workspace: set[bool] = set()  # of cuBLAS, in forward and in backward
        self._hooks: dict[int, RemovableHandle] = {}  # by the parameter
        self._parameters: list[_Tensor] = []  # kept, so that their ids stay theirs
        for model in names.roots():
            self._meet_model(model)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See everything until the context ends."""
        try:
            with (
                self._trials.watching(),
                moves_within_cpu() if self._device_type == "cpu" else nullcontext(),
                watched_resizes(self._live.resize),
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
        if self._trials.is_on():
            return op(*args, **(kwargs or {}))
        inputs = list(_tensors(args))
        if kwargs:
            inputs.extend(_tensors(kwargs.values()))
        if any(self._wraps(cls) for cls in types):
            for tensor in inputs:
                if isinstance(tensor, nn.Parameter):
                    self._meet_parameter(tensor)
            return NotImplemented  # to see the ops that the wrapper makes of it
        if not self.has_compiled and not is_in_backward():
            self.has_compiled = is_compiled_running(sys._getframe())
        if op is READ_VALUE:
            return self._read_value(args[0])
        if op not in _LIFTS:  # of what Python has just made: torch knows its value, and should
            for tensor in inputs:
                self._meet_input(tensor)
            if any(map(self._stand_ins.are_needed, inputs)):
                args, kwargs = self._stand_in(args), self._stand_in(kwargs or {})
        if kwargs:
            kwargs = on_device(kwargs, self._device_type)
        result = op(*args, **(kwargs or {}))
        self._note_result(op, args, kwargs, result)
        return result

    def before(self, issued: Issued) -> None:
        """Collectives: what they read and write is for communication, if for nothing else."""
        for single in issued.singles():
            call = single.read()
            shares = self._find_bucket(call.inputs) or self._find_param_group()
            for tensor in (*call.inputs, *(call.outputs or ())):
                for allocation in self._live.meet_held(tensor):
                    allocation.is_communicated = True
                    is_buffer = allocation.is_buffer and issued.op.startswith("c10d.")
                    if is_buffer or shares:
                        allocation.claim(MemoryKind.COMMUNICATION, shares)

    def _find_bucket(self, tensors: Sequence[_Tensor]) -> Shares | None:
        """Whose gradients are in a bucket that DDP reduces, if these tensors are one."""
        bucket = self._places.find_bucket(sum(tensor.numel() for tensor in tensors))
        if bucket is None:
            return None
        return {id(one): (self._names.owner_of(one), one.numel()) for one in bucket.parameters}

    def _read_value(self, tensor: _Tensor) -> Any:
        """Zero, where there is no value: losses are logged and norms looked at in most steps."""
        if self._stand_ins.are_needed(tensor):
            with without_modes():
                return READ_VALUE(tensor)
        try:
            return READ_VALUE(tensor)
        except DataDependentOutputException:
            self.num_values_read += 1
            if tensor.dtype == torch.bool:
                return False
            return 0.0 if tensor.is_floating_point() else 0

    def _note_offloading(self) -> None:
        self.has_offloaded = True

    def meet_optimizer(self, optimizer: Optimizer) -> None:
        """The optimizer's state is its own, and the gradients of its parameters are gradients."""
        for group in optimizer.param_groups:
            is_on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                self.claim_gradient(parameter)
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, _Tensor):
                        self._claim(value, MemoryKind.OPTIMIZER_STATE, of=parameter)
                        for allocation in self._live.meet_held(value):
                            # Counters of steps stay on the host unless a kernel wants them.
                            allocation.is_on_host = value.dim() == 0 and not is_on_device

    def claim_gradient(self, parameter: _Tensor) -> None:
        """What is in a parameter's `.grad` is a gradient."""
        if parameter.grad is not None:
            self._claim(parameter.grad, MemoryKind.GRADIENTS, of=parameter)

    def _claim(
        self, tensor: _Tensor, kind: MemoryKind, *, of: _Tensor, otherwise: int = NO_MODULE
    ) -> None:
        """The tensor is of this kind, and belongs to the module that holds a parameter.

        `otherwise` is whose it is where no module holds the parameter. A flat parameter of FSDP1's
        stands for many, each of which has a share.
        """
        owner = self._names.owner_of(of)
        for allocation, start, size in self._live.meet_parts(tensor):
            shares: dict[Hashable, tuple[int, int]] = {
                (start, number): (self._names.find(module), num_elements)
                for number, (module, num_elements) in enumerate(flat_shares(of, tensor))
            }
            if not shares and max(owner, otherwise) != NO_MODULE:
                shares[start] = (otherwise if owner == NO_MODULE else owner, size)
            allocation.claim(kind, shares)

    def _meet_model(self, model: nn.Module) -> None:
        for module in every_module(model):
            index = self._names.find(module)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                # A tied one is one module's, to which its gradient and state belong as well.
                self._claim(tensor, MemoryKind.PARAMETERS, of=tensor, otherwise=index)
                self._watch_gradient(tensor)
                self.claim_gradient(tensor)

    def _meet_input(self, tensor: _Tensor) -> None:
        allocation = self._live.meet_old(tensor)
        if allocation is None or allocation.kind not in _UNSETTLED:
            return
        if isinstance(tensor, nn.Parameter):
            self._meet_parameter(tensor)

    def _meet_parameter(self, parameter: nn.Parameter) -> None:
        """A parameter that the model did not have when the step began: FSDP has gathered it.

        FSDP1 keeps the parameter, and gives it other memory.
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
        for tensor in _tensors((result,)):
            allocation = self._live.meet_new(tensor)
            if allocation is not None and op in _EMPTY:
                allocation.is_buffer = True
        if op in MATRIX_OPS and is_in_backward() not in self._has_workspace:
            self._has_workspace.add(is_in_backward())
            place = self._places.read()._replace(module=NO_MODULE)
            self.ledger.begin(CUBLAS_BYTES, place).claim(MemoryKind.TEMPORARIES)
        elif op.namespace == "fsdp":
            self._note_fsdp(args, kwargs)
        num_bytes = workspace_bytes(op, args)
        if num_bytes:
            self.ledger.use_briefly(num_bytes, self._places.read())

    def _note_fsdp(self, args: Any, kwargs: Any) -> None:
        """FSDP's own ops copy between parameters or gradients and the buffers of collectives."""
        shares = self._find_param_group()
        for tensor in _tensors((*args, *(kwargs or {}).values())):
            for allocation in self._live.meet_held(tensor):
                if allocation.is_buffer:
                    allocation.claim(MemoryKind.COMMUNICATION, shares)

    def _find_param_group(self) -> Shares:
        """The shares of the parameters that FSDP2 gathers or reduces now; none if it does not."""
        group = running_param_group(sys._getframe())
        return {
            number: (self._names.find(module), num_elements)
            for number, (module, num_elements) in enumerate(param_group_shares(group))
        }

    def _stand_in(self, value: Any) -> Any:
        """Arguments in which tensors with data have given way to their stand-ins."""
        if isinstance(value, _Tensor):
            return self._stand_ins.of(value)
        if isinstance(value, dict):
            return {name: self._stand_in(one) for name, one in value.items()}
        if type(value) in (tuple, list):
            return type(value)(map(self._stand_in, value))
        return value

    def _wraps(self, cls: type) -> bool:
        known = self._is_wrapper.get(cls)
        if known is None:
            known = self._is_wrapper[cls] = is_wrapper_type(cls)
        return known


def _tensors(values: Iterable[Any]) -> Iterator[_Tensor]:
    for value in values:
        if isinstance(value, _Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
