"""An op dispatched on DTensors of the model's own sizes: what moves, what it sends, what it raises.

Nothing is computed: the tensors have no data. Whether the numbers are right is `numbers.py`'s.
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

from shardscope._torch.calls import CollectiveCall, num_bytes
from shardscope._torch.fakes import NO_DATA, without_data
from shardscope._torch.frames import Role
from shardscope._torch.intercept import Issued, intercept
from shardscope._torch.propagation import (
    Decision,
    Place,
    added_handlers,
    forget_decisions,
    implicit_replicas,
    local_part,
    quiet_collectives,
    watch_decisions,
)
from shardscope._torch.simulated_group import meshes_with_data
from shardscope.comm.stack import read_stack
from shardscope.comm.traffic import wire_bytes
from shardscope.record import CollectiveKind
from shardscope.shard.outputs import tensors_in
from shardscope.shard.signature import Signature, TensorSpec

__all__ = ["MAX_TRIED", "Dispatcher", "Outcome", "describe"]

# For an op without a rule DTensor may try thousands of layouts of its parts, each time anew.
MAX_TRIED = 30_000


@dataclass
class Outcome:
    """What happened when an op was dispatched. `sent` has bytes by what was moved, and why."""

    decisions: list[Decision] = field(default_factory=list)
    sent: list[tuple[Place | None, Place | None, int]] = field(default_factory=list)
    outputs: list[Place | None] = field(default_factory=list)
    error: str = ""
    is_unknown: bool = False  # DTensor does not know the op, or one of its parts
    failed_op: Any = None  # for which nothing could be decided: the op, or a part of it
    is_handled: bool = False  # in DTensor's place, by what the program asked for
    num_tried: int = 0  # layouts of parts that were tried to find a rule
    is_stopped: bool = False  # after too many of them: nothing is known
    is_unfinished: bool = False  # it was decided, and then wanted values of tensors without data
    absurdity: str = ""  # a layout of the results that cannot be

    @property
    def num_bytes(self) -> int:
        """What this rank sends in all."""
        return sum(size for _, _, size in self.sent)


@final
class Dispatcher:
    """Dispatches calls, one at a time, and watches what DTensor does with each.

    With `is_implicit`, plain tensors that meet DTensors count as whole on every rank.
    """

    def __init__(self, *, device: torch.device, is_implicit: bool) -> None:
        self._device = device
        self._is_implicit = is_implicit
        self._outcome = Outcome()
        self._thread = get_ident()

    @contextmanager
    def watching(self, handlers: Mapping[Any, Any] = MappingProxyType({})) -> Iterator[None]:
        """Be ready to dispatch; `handlers` run some ops in DTensor's place."""
        with ExitStack() as stack:
            stack.enter_context(_quiet())
            stack.enter_context(meshes_with_data())
            stack.enter_context(without_data())
            stack.enter_context(self.implicit())
            stack.enter_context(watch_decisions(self))
            stack.enter_context(added_handlers(handlers, self._note_handler))
            stack.enter_context(intercept(self))
            yield

    @contextmanager
    def implicit(self) -> Iterator[None]:
        """Let plain tensors meet DTensors, where that is agreed."""
        with implicit_replicas() if self._is_implicit else nullcontext():
            yield

    def dispatch(self, call: Signature) -> Outcome:
        """Make the call, with each tensor as its spec says that it lies on the mesh."""
        forget_decisions()
        self._outcome = outcome = Outcome()
        try:
            args, kwargs = call.arguments(self.make)
            outcome.decisions.clear()
            outcome.sent.clear()
            result = call.op(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            if isinstance(error, NO_DATA) and outcome.decisions and outcome.failed_op is None:
                outcome.is_unfinished = True  # our tensors are to blame: DTensor ran it
                return outcome
            outcome.error = describe(error)
            outcome.is_unknown = isinstance(error, NotImplementedError)
        else:
            for one in tensors_in(result):
                place = tuple(one.placements) if isinstance(one, DTensor) else None
                outcome.outputs.append(place)
                outcome.absurdity = outcome.absurdity or _find_absurdity(one, place)
        return outcome

    def before(self, issued: Issued) -> None:
        """A collective is about to be issued."""
        if get_ident() != self._thread:
            return
        stack = read_stack(sys._getframe(1))
        before, after = stack.held.get(Role.REDISTRIBUTE, (None, None))
        for single in issued.singles():
            self._outcome.sent.append(
                (
                    None if before is None else tuple(before.placements),
                    None if after is None else tuple(after.placements),
                    _wire_bytes(single.read()),
                )
            )

    def decided(self, decision: Decision) -> None:
        """DTensor is about to run an op."""
        self._outcome.decisions.append(decision)
        self._outcome.num_tried += decision.num_tried

    def tried(self, num_tried: int) -> None:
        """DTensor looks for a rule; it may take as long as it likes, so it is stopped."""
        if num_tried > MAX_TRIED:
            self._outcome.is_stopped = True
            raise _TooManyTriedError(f"DTensor tried {MAX_TRIED} placements of its decomposition")

    def failed(self, op: Any, num_tried: int) -> None:
        """DTensor cannot run an op."""
        self._outcome.failed_op = op
        self._outcome.num_tried += num_tried

    def moved(self) -> None:
        """Inputs are moved as was decided."""
        if self._outcome.decisions:
            self._outcome.decisions[-1].is_moved = True

    def _note_handler(self) -> None:
        self._outcome.is_handled = True

    def make(self, spec: TensorSpec) -> torch.Tensor:
        """A tensor like that, without data."""
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
    """Of a kind that DTensor does not take for the failure of one layout."""


@contextmanager
def _quiet() -> Iterator[None]:
    """What DTensor says of a CPU's mesh is not about the model."""
    with warnings.catch_warnings(), quiet_collectives():
        warnings.simplefilter("ignore")
        yield


def _find_absurdity(tensor: torch.Tensor, place: Place | None) -> str:
    for one in place or ():
        if isinstance(one, Shard) and one.dim >= tensor.dim():
            return f"its result has {tensor.dim()} dims but its spec is {one}"
    return ""


def _wire_bytes(call: CollectiveCall) -> int:
    put_in = sum(num_bytes(tensor) for tensor in call.inputs)
    num_ranks = call.group.size()
    got_out = put_in * num_ranks if call.kind is CollectiveKind.ALL_GATHER else put_in
    return wire_bytes(call.kind, put_in, got_out, num_ranks)


def describe(error: BaseException) -> str:
    """What was raised, on one line."""
    words = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {words}"[:300] if words else type(error).__name__
