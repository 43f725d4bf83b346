"""A drop-in for torch's `CommDebugMode`: its names and formats over our own counting."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.hooks import intercept
from shardscope._torch.dispatch import (
    TorchDispatchMode,
    has_fake_tensors,
    is_higher_order,
    op_packet,
)
from shardscope._torch.module_calls import watch_module_calls
from shardscope.attribution.module_names import ModuleNames
from shardscope.comm.collective_facts import GroupRegistry
from shardscope.comm.debug.counts import (
    GLOBAL,
    CollectiveCounts,
    Operation,
    OperationLists,
    Position,
    Positions,
    collective_packets,
    named_packet,
    op_key,
    torch_registry,
)
from shardscope.comm.debug.tables import (
    DebugResults,
    ModuleTracker,
    build_tree,
    format_module_table,
    format_table,
    strip_colours,
)
from shardscope.comm.recorder import Recorder
from shardscope.record import Collective, Gap, Phase

_BACKWARD = (Phase.BACKWARD, Phase.RECOMPUTE)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.owner: str | None = None  # of the last collective, until it is listed as an op
        self.is_muted = False


@final
class DebugSession:
    """Counts collectives and lists ops, by module."""

    def __init__(self, registry: Set[Any]) -> None:
        """`registry` is `comm_registry`, from which a user may have removed ops."""
        self._ignored = torch_registry() - registry
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._names = ModuleNames(None, keep_wrappers=True)
        self.recorder = Recorder(self._names, GroupRegistry(), rank=rank, emit=self._count_record)
        self.positions = Positions(self._names, self.recorder.calls)
        self.tracker = ModuleTracker(self.positions, self.recorder.report_gap)
        self.counts = CollectiveCounts()
        self.operations = OperationLists()
        self._thread = _ThreadState()
        self._lock = threading.RLock()

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Observe collectives and module calls on every thread until the context ends."""
        recorder = self.recorder
        with (
            recorder.calls.marking_threads(),
            watch_module_calls(recorder.calls),
            watch_module_calls(self.positions),
            watch_module_calls(self.tracker),
            intercept(self),
        ):
            yield

    def before(self, event: CollectiveEvent) -> None:
        """Count a collective, even if the recorder cannot make a record of it."""
        thread = self._thread
        if thread.is_muted or (self._ignored and named_packet(event.op) in self._ignored):
            return
        thread.owner = None
        # With a lock, so that the recorder writes each record on the thread that issued it.
        with self._lock:
            self.recorder.before(event)
        if thread.owner is None:
            self._count_at(op_key(event.op), self._position())

    def list_op(self, op: Any, args: Sequence[Any]) -> None:
        """Append an op that is about to run to the list of the running module."""
        position = self._position()
        self._list(op, args, position.module, position)

    def run_op(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], extra: set[Any]) -> Any:
        """Run an op and list it; also count it if it is in `extra`."""
        position = self._position()
        packet = op_packet(op)
        is_collective = packet in collective_packets()
        if not is_collective and packet in extra:
            self._count_at(packet, position)
            with self._muted():
                result = op(*args, **kwargs)
        else:
            result = op(*args, **kwargs)
        if not has_fake_tensors(args):
            module = self._take_owner() if is_collective else None
            self._list(op, args, module or position.module, position)
        return result

    def _count_record(self, record: object) -> None:
        if isinstance(record, Collective):
            # A checkpointed function that is not a module call has an owner too.
            owner = record.owner or self._position().module
            self._count(op_key(record.op), owner, is_backward=record.phase in _BACKWARD)

    def _count_at(self, key: Any, position: Position) -> None:
        try:
            self._count(key, position.module, is_backward=position.is_backward)
        except Exception as error:  # noqa: BLE001 - tracing must not fail the run
            self.recorder.report_gap(str(key), f"it was issued but not counted ({error!r})")

    def _list(self, op: Any, args: Sequence[Any], module: str, position: Position) -> None:
        try:
            self.operations.add(op, args, module, position)
        except Exception as error:  # noqa: BLE001 - tracing must not fail the run
            self.recorder.report_gap(str(op), f"it ran but could not be listed ({error!r})")

    def _count(self, key: Any, owner: str, *, is_backward: bool) -> None:
        self._thread.owner = owner
        for name in (owner.split(".")[0], owner):
            if not self.tracker.has_module(name):
                self.tracker.add_uncalled(name, self._names.module_named(name))
        self.counts.add(key, self.tracker.enclosing(owner), is_backward=is_backward)

    def _position(self) -> Position:
        try:
            return self.positions.current()
        except Exception as error:  # noqa: BLE001 - tracing must not fail the run
            self.recorder.report_gap("op", f"its module could not be determined ({error!r})")
            return Position(GLOBAL, is_in_backward(), False)

    def _take_owner(self) -> str | None:
        owner, self._thread.owner = self._thread.owner, None
        return owner

    @contextmanager
    def _muted(self) -> Iterator[None]:
        """Do not count the collectives that a user-defined collective consists of."""
        self._thread.is_muted = True
        try:
            yield
        finally:
            self._thread.is_muted = False


FileName = str | Path


class _NestedModes(threading.local):
    def __init__(self) -> None:
        self.depth = 0


class CommDebugMode(TorchDispatchMode):
    """Counts collectives by kind, module and pass; a drop-in for torch's class of this name.

    Collectives outside any module (gradient clipping, the optimizer) are counted for Global, under
    "forward", because torch has two passes only; those of recomputed activations are under
    "backward". Entering again starts from zero; results that were read before stay as they are.
    Entering while inside has no effect.

    Examples:
        >>> comm_mode = CommDebugMode()
        >>> with comm_mode:
        ...     model(batch).sum().backward()
        >>> comm_mode.get_comm_counts()
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.comm_registry = torch_registry()
        self._session = DebugSession(self.comm_registry)
        self._is_used = False
        self._num_entered = 0
        self._exit = ExitStack()
        self._lock = threading.Lock()
        self._thread = _NestedModes()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code stays compiled, and its collectives are observed as it runs."""
        return True

    def __enter__(self) -> Self:
        with self._lock:
            if self._num_entered == 0:
                self._start()
            self._num_entered += 1
        self._thread.depth += 1
        if self._thread.depth == 1:  # each thread has its own stack of modes
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        if self._thread.depth == 0:  # exited without having been entered
            return
        self._thread.depth -= 1
        if self._thread.depth == 0:
            super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        with self._lock:
            self._num_entered -= 1
            if self._num_entered == 0:
                self._exit.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_higher_order(func):
            return func(*args, **(kwargs or {}))
        if any(issubclass(cls, DTensor) for cls in types):
            # DTensor runs first and calls this again with the ops on local tensors.
            self._session.list_op(func, args)
            return NotImplemented
        return self._session.run_op(func, args, kwargs or {}, self.comm_registry)

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    @property
    def comm_counts(self) -> dict[Any, int]:
        """Number of collectives by op."""
        return self._session.counts.total

    @comm_counts.setter
    def comm_counts(self, counts: dict[Any, int]) -> None:
        self._session.counts.total = counts

    @property
    def comm_module_counts(self) -> dict[str, dict[str, dict[Any, int]]]:
        """Number of collectives by module, pass and op; a module's include its children's."""
        return self._session.counts.by_module

    @comm_module_counts.setter
    def comm_module_counts(self, counts: dict[str, dict[str, dict[Any, int]]]) -> None:
        self._session.counts.by_module = counts

    @property
    def comm_module_operation_counts(self) -> dict[str, dict[str, list[Operation]]]:
        """Every op by module. Equal ops are one object: copy an entry before changing it."""
        lists = self._session.operations.by_module
        for name in self.advanced_module_tracker.module_helper_dict if self._is_used else ():
            lists.setdefault(name, {"operations_list": []})
        return lists

    @comm_module_operation_counts.setter
    def comm_module_operation_counts(self, lists: dict[str, dict[str, list[Operation]]]) -> None:
        self._session.operations.by_module = lists

    @property
    def advanced_module_tracker(self) -> ModuleTracker:
        """The modules called, their nesting and their parameters."""
        return self._session.tracker

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What was observed but not understood; not in torch's class."""
        return tuple(self._session.recorder.gaps)

    def get_comm_counts(self) -> dict[Any, int]:
        """Number of collectives by op."""
        return self.comm_counts

    def get_total_counts(self) -> int:
        """Number of collectives in all."""
        return sum(self.comm_counts.values())

    def get_comm_module_counts(self) -> dict[str, dict[str, dict[Any, int]]]:
        """Number of collectives by module, pass and op."""
        return self.comm_module_counts

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """This rank's shards of parameters, by module and name."""
        return self.advanced_module_tracker.module_parameters_dict

    def get_sharding_info(self) -> dict[str, Any]:
        """Placements of DTensor parameters by qualified name, also while FSDP has gathered them."""
        return self.advanced_module_tracker.sharding_dict

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """The table of modules.

        0: collectives; 1: also module types, parameters, and ops on DTensors that are not trivial;
        2: all ops that are not trivial; 3: all ops.
        """
        return format_table(self._results(), noise_level)

    def generate_module_tracing_table(self) -> str:
        """The table of modules with only their collectives, as in older versions of torch."""
        return format_module_table(self._results())

    def log_comm_debug_tracing_table_to_file(
        self, file_name: FileName = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table to a file, without colours."""
        _write(file_name, strip_colours(self.generate_comm_debug_tracing_table(noise_level)))

    def log_module_tracing_table_to_file(self, file_name: FileName = "output.txt") -> None:
        """Write the older table to a file, without colours."""
        _write(file_name, strip_colours(self.generate_module_tracing_table()))

    def generate_json_dump(
        self, file_name: FileName = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write the tree of modules to a file, for a visualiser. Levels are those of the table."""
        _write(file_name, json.dumps(build_tree(self._results(), noise_level), indent=4))

    def print_paramater_info(self) -> None:
        """Print every parameter; the name is torch's."""
        self.advanced_module_tracker.print_paramater_info()

    def print_sharding_info(self) -> None:
        """Print the placements of every DTensor parameter."""
        self.advanced_module_tracker.print_sharding_info()

    def _start(self) -> None:
        session = DebugSession(self.comm_registry)
        with ExitStack() as stack:
            stack.enter_context(session.observe())
            self._exit = stack.pop_all()
        self._session = session
        self._is_used = True

    def _results(self) -> DebugResults:
        return DebugResults(
            modules=self.advanced_module_tracker.module_helper_dict,
            children=self.advanced_module_tracker.parent_dict,
            counts=self.comm_module_counts,
            operations=self.comm_module_operation_counts,
        )


def _write(file_name: FileName, text: str) -> None:
    Path(file_name).write_text(text, encoding="utf-8")
