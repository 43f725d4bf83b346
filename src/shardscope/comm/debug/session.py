"""What one `with CommDebugMode()` learns: counts of collectives, lists of ops, modules."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, final

import torch.distributed as dist

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.dispatch import has_fakes, op_packet
from shardscope._torch.intercept import Issued, intercept
from shardscope._torch.module_calls import watch_module_calls
from shardscope.comm.debug.counts import (
    CollectiveCounts,
    named_packet,
    op_key,
    torch_registry,
    watched_packets,
)
from shardscope.comm.debug.operations import OperationLists
from shardscope.comm.debug.position import GLOBAL, Position, Positions
from shardscope.comm.debug.tracker import ModuleTracker
from shardscope.comm.groups import GroupBook
from shardscope.comm.names import ModuleNames
from shardscope.comm.recorder import Recorder
from shardscope.record import Collective, Phase

__all__ = ["DebugSession"]

_BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.owner: str | None = None  # of the collective issued last and not yet listed as an op
        self.is_muted = False


@final
class DebugSession:
    """An observer of collectives and a listener to ops."""

    def __init__(self, registry: Set[Any]) -> None:
        """`registry` is torch's set of ops, from which a user may have taken some."""
        self._ignored = torch_registry() - registry
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._names = ModuleNames(None, keep_wrappers=True)
        self.recorder = Recorder(self._names, GroupBook(), rank=rank, emit=self._hear)
        self.positions = Positions(self._names, self.recorder.calls)
        self.tracker = ModuleTracker(self.positions, self.recorder.report_gap)
        self.counts = CollectiveCounts()
        self.operations = OperationLists()
        self._thread = _Thread()
        self._lock = threading.RLock()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch collectives and module calls on every thread until the context ends."""
        recorder = self.recorder
        with (
            recorder.calls.watching(),
            watch_module_calls(recorder.calls),
            watch_module_calls(self.positions),
            watch_module_calls(self.tracker),
            intercept(self),
        ):
            yield

    def before(self, issued: Issued) -> None:
        """Count a collective, also one of which the recorder can make nothing else."""
        thread = self._thread
        if thread.is_muted or (self._ignored and named_packet(issued.op) in self._ignored):
            return
        thread.owner = None
        # One at a time, so that the recorder writes each on the thread that issued it.
        with self._lock:
            self.recorder.before(issued)
        if thread.owner is None:
            self._count_at(op_key(issued.op), self._position())

    def list_op(self, op: Any, args: Sequence[Any]) -> None:
        """Put an op that is about to run on the list of the module at work."""
        position = self._position()
        self._list(op, args, position.module, position)

    def run_op(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], extra: set[Any]) -> Any:
        """Run an op and list it; count it too if it is one of `extra`."""
        position = self._position()
        packet = op_packet(op)
        is_collective = packet in watched_packets()
        if not is_collective and packet in extra:
            self._count_at(packet, position)
            with self._muted():
                result = op(*args, **kwargs)
        else:
            result = op(*args, **kwargs)
        if not has_fakes(args):
            module = self._take_owner() if is_collective else None
            self._list(op, args, module or position.module, position)
        return result

    def _hear(self, record: object) -> None:
        if isinstance(record, Collective):
            # A checkpointed function that is no module's call has an owner all the same.
            owner = record.owner or self._position().module
            self._count(op_key(record.op), owner, is_backward=record.phase in _BACKWARD)

    def _count_at(self, key: Any, position: Position) -> None:
        try:
            self._count(key, position.module, is_backward=position.is_backward)
        except Exception as error:  # noqa: BLE001 - watching must not kill
            self.recorder.report_gap(str(key), f"it was issued but not counted ({error!r})")

    def _list(self, op: Any, args: Sequence[Any], module: str, position: Position) -> None:
        try:
            self.operations.add(op, args, module, position)
        except Exception as error:  # noqa: BLE001 - watching must not kill
            self.recorder.report_gap(str(op), f"it ran but could not be listed ({error!r})")

    def _count(self, key: Any, owner: str, *, is_backward: bool) -> None:
        self._thread.owner = owner
        for name in (owner.split(".")[0], owner):
            if not self.tracker.has_met(name):
                self.tracker.add_uncalled(name, self._names.module_named(name))
        self.counts.add(key, self.tracker.enclosing(owner), is_backward=is_backward)

    def _position(self) -> Position:
        try:
            return self.positions.current()
        except Exception as error:  # noqa: BLE001 - watching must not kill
            self.recorder.report_gap("op", f"its module could not be determined ({error!r})")
            return Position(GLOBAL, is_in_backward(), False)

    def _take_owner(self) -> str | None:
        owner, self._thread.owner = self._thread.owner, None
        return owner

    @contextmanager
    def _muted(self) -> Iterator[None]:
        """What a collective of the user's own is made of is not counted beside it."""
        self._thread.is_muted = True
        try:
            yield
        finally:
            self._thread.is_muted = False
