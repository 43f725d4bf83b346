"""The log of dynamo's compilations, frame by frame, from which explanations are made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, final

import torch
from torch import fx

from shardscope._torch.dynamo import FrameEnd, Line, Stop
from shardscope.compile.explain.graphs import RawGraph, read_graph
from shardscope.compile.explain.guards import RawGuard, read_failed_guard

_RESUMED = "torch_dynamo_resume_in_"
_DYNAMO = os.path.join(os.path.dirname(torch.__file__), "_dynamo") + os.sep


@dataclass
class Frame:
    """A compilation of a function by dynamo."""

    name: str
    file: str
    line: int
    callers: tuple[Line, ...]  # outermost first
    stop: Stop | None = None
    graphs: list[RawGraph] = field(default_factory=list)
    reasons: list[Any] = field(default_factory=list)  # torch's GraphCompileReasons
    failed_guard: RawGuard | None = None
    end: FrameEnd | None = None

    @property
    def is_resumed(self) -> bool:
        """Whether it is the rest of a function after a graph break."""
        return _RESUMED in self.name

    @property
    def is_torchs(self) -> bool:
        """Whether it is a wrapper function of dynamo around what is compiled."""
        return self.file.startswith(_DYNAMO)

    @property
    def is_recompile(self) -> bool:
        """Whether the function was compiled before, with other guards."""
        return self.failed_guard is not None and self.end is not None and self.end.is_compiled


@final
class FrameLog:
    """Records the compiler's events."""

    def __init__(self, *, has_guards: bool = False) -> None:
        self.has_guards = has_guards
        self.frames: list[Frame] = []  # in the order of their start
        self.errors: list[str] = []  # in our own code
        self._open: list[Frame] = []

    def begin_frame(self, code: CodeType, caller: FrameType | None, scope: dict[str, Any]) -> None:
        name = code.co_qualname.rpartition("<locals>.")[2]
        frame = Frame(name, code.co_filename, code.co_firstlineno, _read_callers(caller))
        self.frames.append(frame)
        self._open.append(frame)

    def end_frame(self, end: FrameEnd) -> None:
        if not self._open:  # observation may have started in the middle of a frame
            return
        frame = self._open.pop()
        frame.end = end
        if end.error is not None and frame.stop is None:  # a break that raises is not logged
            frame.stop = end.stop

    def see_stop(self, stop: Stop) -> None:
        if self._open:
            self._open[-1].stop = stop

    def see_recompile(self, reasons: Sequence[str], values: Mapping[str, Any]) -> None:
        if self._open:
            self._open[-1].failed_guard = read_failed_guard(reasons, values)

    def see_graph(self, graph: fx.GraphModule, compile_id: str) -> None:
        if self._open:
            self._open[-1].graphs.append(read_graph(graph, compile_id))
            self._open[-1].reasons.append(getattr(graph, "compile_subgraph_reason", None))

    def fail(self, error: Exception) -> None:
        self.errors.append(f"{type(error).__name__}: {error}")


def function_name(name: str) -> str:
    """The name without dynamo's prefix: `Net.forward` for its resume functions too."""
    before, resumed, after = name.partition(_RESUMED)
    return before + after.rpartition("_at_")[0] if resumed else name


def _read_callers(frame: FrameType | None) -> tuple[Line, ...]:
    lines: list[Line] = []
    while frame is not None:
        code = frame.f_code
        lines.append(Line(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(reversed(lines))
