"""Dispatches an op on DTensors of the model's own sizes: which inputs are redistributed, how many
bytes are sent, what is raised.

Nothing is computed: the tensors have no data. `numeric_check.py` compares values.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import get_ident
from types import MappingProxyType
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor, Shard

from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.hooks import intercept
from shardscope._torch.collectives.schema import CollectiveCall, num_bytes
from shardscope._torch.dtensor import (
    Decision,
    MeshPlacements,
    added_handlers,
    forget_decisions,
    implicit_replicas,
    local_part,
    quiet_collectives,
    watch_decisions,
)
from shardscope._torch.fake import NO_DATA, without_data
from shardscope._torch.frames import Role
from shardscope._torch.process_groups.simulated_tensors import meshes_with_data
from shardscope.attribution.call_sites import read_stack
from shardscope.attribution.tensors import tensors_in
from shardscope.record import CollectiveKind
from shardscope.record.base import wire_bytes
from shardscope.shard.coverage.op_calls import Signature, TensorSpec

# For an op without a rule DTensor may try thousands of placements of its decomposition, each time.
MAX_TRIED = 30_000


@dataclass
class DispatchResult:
    """What happened when an op was dispatched.

    `sent` has, for each collective, the placements before and after the redistribution it belongs
    to (None if it belongs to none) and the bytes that this rank sends.
    """

    decisions: list[Decision] = field(default_factory=list)
    sent: list[tuple[MeshPlacements | None, MeshPlacements | None, int]] = field(
        default_factory=list
    )
    outputs: list[MeshPlacements | None] = field(default_factory=list)
    error: str = ""
    is_unknown: bool = False  # DTensor does not know the op, or one of its parts
    failed_op: Any = None  # that has no strategy: the op, or an op of its decomposition
    is_handled: bool = False  # by a handler that the program registered, instead of DTensor
    num_tried: int = 0  # placements of the decomposition that were tried to find a rule
    is_stopped: bool = False  # after too many of them: nothing is known
    is_unfinished: bool = False  # a strategy was chosen, and then the op read values without data
    invalid_placement: str = ""  # of a result, such as a shard of a dim that it does not have

    @property
    def num_bytes(self) -> int:
        """The bytes that this rank sends in total."""
        return sum(size for _, _, size in self.sent)


@final
class Dispatcher:
    """Dispatches calls, one at a time, and observes what DTensor does with each.

    With `is_implicit`, plain tensors that are mixed with DTensors count as replicated.
    """

    def __init__(self, *, device: torch.device, is_implicit: bool) -> None:
        self._device = device
        self._is_implicit = is_implicit
        self._result = DispatchResult()
        self._thread = get_ident()

    @contextmanager
    def watching(self, handlers: Mapping[Any, Any] = MappingProxyType({})) -> Iterator[None]:
        """Observe DTensor until the context ends; `handlers` run some ops instead of DTensor."""
        with ExitStack() as stack:
            stack.enter_context(_quiet())
            stack.enter_context(meshes_with_data())
            stack.enter_context(without_data())
            stack.enter_context(self.implicit())
            stack.enter_context(watch_decisions(self))
            stack.enter_context(added_handlers(handlers, self._on_handler))
            stack.enter_context(intercept(self))
            yield

    @contextmanager
    def implicit(self) -> Iterator[None]:
        """Allow ops that mix plain tensors with DTensors, if `is_implicit`."""
        with implicit_replicas() if self._is_implicit else nullcontext():
            yield

    def dispatch(self, call: Signature) -> DispatchResult:
        """Call the op, with each tensor placed on the mesh as its spec says."""
        forget_decisions()
        self._result = dispatch_result = DispatchResult()
        try:
            args, kwargs = call.arguments(self.make)
            dispatch_result.decisions.clear()
            dispatch_result.sent.clear()
            result = call.op(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - any error is a result
            if (
                isinstance(error, NO_DATA)
                and dispatch_result.decisions
                and dispatch_result.failed_op is None
            ):
                dispatch_result.is_unfinished = (
                    True  # because our tensors have no data: DTensor ran it
                )
                return dispatch_result
            dispatch_result.error = describe(error)
            dispatch_result.is_unknown = isinstance(error, NotImplementedError)
        else:
            for tensor in tensors_in(result):
                placements = tuple(tensor.placements) if isinstance(tensor, DTensor) else None
                dispatch_result.outputs.append(placements)
                dispatch_result.invalid_placement = (
                    dispatch_result.invalid_placement or _find_invalid_placement(tensor, placements)
                )
        return dispatch_result

    def before(self, event: CollectiveEvent) -> None:
        """Called before a collective is issued."""
        if get_ident() != self._thread:
            return
        stack = read_stack(sys._getframe(1))
        before, after = stack.frame_locals.get(Role.REDISTRIBUTE, (None, None))
        for collective in event.singles():
            self._result.sent.append(
                (
                    None if before is None else tuple(before.placements),
                    None if after is None else tuple(after.placements),
                    _wire_bytes(collective.read()),
                )
            )

    def decided(self, decision: Decision) -> None:
        """Called when DTensor has chosen a strategy and is about to run an op."""
        self._result.decisions.append(decision)
        self._result.num_tried += decision.num_tried

    def tried(self, num_tried: int) -> None:
        """Called while DTensor looks for a rule; stops it after too many tries."""
        if num_tried > MAX_TRIED:
            self._result.is_stopped = True
            raise _TooManyTriedError(f"DTensor tried {MAX_TRIED} placements of its decomposition")

    def failed(self, op: Any, num_tried: int) -> None:
        """Called when DTensor cannot run an op."""
        self._result.failed_op = op
        self._result.num_tried += num_tried

    def moved(self) -> None:
        """Called when DTensor redistributes the inputs as it decided."""
        if self._result.decisions:
            self._result.decisions[-1].is_moved = True

    def _on_handler(self) -> None:
        self._result.is_handled = True

    def make(self, spec: TensorSpec) -> torch.Tensor:
        """A tensor with this spec, without data."""
        if spec.layout is not torch.strided:
            raise TypeError(f"it takes a tensor of {spec.layout}, and a DTensor is strided")
        if spec.placements is None or spec.mesh is None:
            return torch.empty_strided(
                spec.shape, spec.stride, dtype=spec.dtype, device=self._device
            )
        shape = local_part(spec.shape, spec.mesh, spec.placements)
        local = torch.empty(shape, dtype=spec.dtype, device=self._device)
        return DTensor.from_local(
            local,
            spec.mesh,
            spec.placements,
            run_check=False,
            shape=torch.Size(spec.shape),
            stride=spec.stride,
        )


@final
class _TooManyTriedError(Exception):
    """An error that DTensor does not take for the failure of a single placement."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings: those of DTensor about CPU meshes do not concern the model."""
    with warnings.catch_warnings(), quiet_collectives():
        warnings.simplefilter("ignore")
        yield


def _find_invalid_placement(tensor: torch.Tensor, placements: MeshPlacements | None) -> str:
    for placement in placements or ():
        if isinstance(placement, Shard) and placement.dim >= tensor.dim():
            return f"its result has {tensor.dim()} dims but its spec is {placement}"
    return ""


def _wire_bytes(call: CollectiveCall) -> int:
    input_bytes = sum(num_bytes(tensor) for tensor in call.inputs)
    num_ranks = call.group.size()
    output_bytes = (
        input_bytes * num_ranks if call.kind is CollectiveKind.ALL_GATHER else input_bytes
    )
    return wire_bytes(call.kind, input_bytes, output_bytes, num_ranks)


def describe(error: BaseException) -> str:
    """An error's type and message, on one line."""
    words = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {words}"[:300] if words else type(error).__name__
