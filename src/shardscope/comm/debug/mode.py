"""A drop-in for torch's `CommDebugMode`: its names and formats over our counting."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.distributed.tensor import DTensor

from shardscope._torch.dispatch import TorchDispatchMode, is_higher_order
from shardscope.comm.debug.counts import torch_registry
from shardscope.comm.debug.operations import Operation
from shardscope.comm.debug.session import DebugSession
from shardscope.comm.debug.tables import (
    DebugResults,
    build_tree,
    format_module_table,
    format_table,
    strip_colours,
)
from shardscope.comm.debug.tracker import ModuleTracker
from shardscope.record import Gap

__all__ = ["CommDebugMode"]

FileName = str | Path


class _Thread(threading.local):
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
        self._thread = _Thread()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled: its collectives are seen as it runs."""
        return True

    def __enter__(self) -> Self:
        with self._lock:
            if self._num_entered == 0:
                self._start()
            self._num_entered += 1
        self._thread.depth += 1
        if self._thread.depth == 1:  # modes are a stack of each thread's own
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        if self._thread.depth == 0:  # left without having been entered
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
            # DTensor goes first and comes back with the ops on what this rank holds.
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
        """The modules called, how they nest and what they hold."""
        return self._session.tracker

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What was seen and not understood; torch's class has no such thing."""
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
        """Parameters by module and name, as this rank holds them."""
        return self.advanced_module_tracker.module_parameters_dict

    def get_sharding_info(self) -> dict[str, Any]:
        """Placements of DTensor parameters by full name, also while FSDP has them gathered."""
        return self.advanced_module_tracker.sharding_dict

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """The table of modules.

        0: collectives; 1: also module types, parameters, and ops on DTensors that are not trivial;
        2: all ops that are not trivial; 3: all ops.
        """
        return format_table(self._results(), noise_level)

    def generate_module_tracing_table(self) -> str:
        """The table of modules with their collectives alone, as older versions of torch made it."""
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
            stack.enter_context(session.watch())
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
