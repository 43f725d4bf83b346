"""Graph breaks by source line, with suggested fixes."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from shardscope._torch.dynamo import Line, Stop, find_break_id
from shardscope.attribution.call_sites import TORCH_FOLDER, shown_path
from shardscope.compile.explain.frames import Frame, function_name
from shardscope.record import BreakSite, Source, replace_surrogates

_FSDP_FOLDER = os.path.join(TORCH_FOLDER, "distributed", "fsdp") + os.sep

# By words in torch's name for the break and in its message; the first match is used.
_FIXES: tuple[tuple[str, str, str], ...] = (
    (
        "Tensor.item()",
        "",
        "keep the value a tensor (x * t instead of x * t.item()), or let graphs hold it: "
        "torch._dynamo.config.capture_scalar_outputs = True",
    ),
    (
        "Data-dependent branching",
        "",
        "compute both and choose: torch.where(cond, a, b); or torch.cond(cond, f, g, (x,))",
    ),
    (
        "Data-dependent assertion",
        "",
        "torch._assert_async(cond), or check before the compiled function is called",
    ),
    (
        "Dynamic shape operator",
        "",
        "use a form of fixed shape (torch.where(cond, x, 0) instead of x[cond]), or "
        "torch._dynamo.config.capture_dynamic_output_shape_ops = True",
    ),
    (
        "",
        "builtin operator `print`",
        "print outside the compiled function, or "
        "torch._dynamo.config.reorderable_logging_functions.add(print)",
    ),
    (
        "Call to `torch._dynamo.graph_break()`",
        "",
        "remove the call to torch._dynamo.graph_break()",
    ),
    (
        "Skip calling `torch.compiler.disable()`d function",
        "",
        "remove @torch.compiler.disable, or call the function before or after the compiled one",
    ),
    (
        "Attempt to trace generator",
        "",
        "collect the values in a list: return [f(x) for x in xs] instead of yield",
    ),
    (
        "logging.Logger method",
        "",
        "log outside the compiled function, or if not torch.compiler.is_compiling(): log(...)",
    ),
    (
        "RNN, GRU, or LSTM",
        "",
        "torch._dynamo.config.allow_rnn = True lets graphs hold them",
    ),
    (
        "Attempted to inline function marked as skipped",
        "",
        "call it outside the compiled function",
    ),
    (
        "Attempted to call function marked as skipped",
        "",
        "move the call out of the compiled function, or wrap it in @torch.library.custom_op",
    ),
    (
        "Unsupported context manager",
        "",
        "enter the context outside the compiled function: with ctx: compiled(x)",
    ),
    (
        "Failed to trace builtin operator",
        "",
        "do this outside the compiled function, or with a torch op",
    ),
    (
        "Unsupported function call",
        "",
        "call it outside the compiled function, or wrap it in @torch.library.custom_op",
    ),
    (
        "Observed exception",
        "",
        "check before the compiled function is called, and raise there",
    ),
    (
        "import",
        "",
        "import at the top of the file",
    ),
    (
        "backward()",
        "",
        "call .backward() outside the compiled function",
    ),
)


_TORCHS_OWN = "torch breaks the graph here itself: call this outside the compiled function"
_FSDP = (
    "FSDP's hooks cannot be part of a graph: compile the layers before they are sharded, one "
    "by one (layer.compile(); fully_shard(layer))"
)


def suggest_fix(kind: str, message: str, *, file: str = "") -> str:
    """An example of a fix for a break of this kind, or an empty string."""
    if file.startswith(_FSDP_FOLDER):
        return _FSDP
    if file.startswith(TORCH_FOLDER) and "graph_break()" in kind:
        return _TORCHS_OWN
    for in_kind, in_message, fix in _FIXES:
        if in_kind.lower() in kind.lower() and in_message in message:
            return fix
    return ""


_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = str(Path(__file__).resolve().parents[2]) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NEXT = "*** While handling this graph break, another graph break occurred: ***"
_PARTS = re.compile(
    r"(?P<kind>[^\n]*)(?:\n  Higher Order Operator: [^\n]*)?"
    r"(?:\n  Explanation: (?P<explanation>.*?))?"
    r"(?P<hints>(?:\n  Hint: .*?)*)?"
    r"(?:\n\n?  Developer debug context:.*|\Z)",
    re.DOTALL,
)
# For a branch, torch shows how its condition was computed, with full paths.
_AFTERWORDS = "The branch condition involves"
_MAX_TEXT = 600


@dataclass
class _Site:
    """A break site whose events are still being counted."""

    kind: str
    source: Source
    stop: Stop
    num_events: int = 0


@final
class Sites:
    """Counts break events by site; a retry of the same trace is not a new event."""

    def __init__(self) -> None:
        self._sites: dict[tuple[str, int, str], _Site] = {}
        # By the full stack: how deep below the compiled function the last stop was.
        self._depths: dict[tuple[object, ...], int] = {}

    def add(self, frame: Frame, stop: Stop) -> int:
        """Count the stop of a frame's trace, and return the index of its site.

        Dynamo inlines calls. If it stops in an inlined call, it stops there again for every
        function on the stack, as each is compiled in turn: the same lines, at a lower depth.
        """
        kind = _first_kind(stop)
        lines = stop.stack or (Line(frame.file, frame.line, frame.name),)
        innermost = _innermost((*_inner_callers(frame.callers), *lines))
        key = (innermost.file, innermost.line, kind)
        if key not in self._sites:
            self._sites[key] = _Site(kind, make_source(innermost), stop)
        where = (key, *_full_stack(frame.callers, lines))
        depth = len(lines)
        if depth >= self._depths.get(where, 0):
            self._sites[key].num_events += 1
        self._depths[where] = depth
        return list(self._sites).index(key)

    @property
    def num_events(self) -> int:
        """The number of events counted so far."""
        return sum(site.num_events for site in self._sites.values())

    def make_records(self) -> tuple[BreakSite, ...]:
        """The records of the sites, in the order of their first events."""
        return tuple(_make_record(site) for site in self._sites.values())


def _full_stack(callers: Sequence[Line], lines: Sequence[Line]) -> tuple[tuple[str, int], ...]:
    """The user's lines from the outermost in; a resumed function is listed once."""
    stack: list[Line] = []
    for line in (*callers, *lines):
        if _is_foreign(line.file):
            continue
        is_resumed = line.function != function_name(line.function)
        if is_resumed and stack and _is_same_function(stack[-1], line):
            stack.pop()
        stack.append(line)
    return tuple((line.file, line.line) for line in stack)


def _is_same_function(line: Line, previous: Line) -> bool:
    return line.file == previous.file and function_name(line.function) == function_name(
        previous.function
    )


def _inner_callers(callers: Sequence[Line]) -> Sequence[Line]:
    """The callers inside what is explained, without the code that called `explain`."""
    ours = [index for index, line in enumerate(callers) if line.file.startswith(_OURS)]
    return callers[ours[-1] + 1 :] if ours else callers


def _innermost(lines: Sequence[Line]) -> Line:
    own = [line for line in lines if not _is_foreign(line.file)]
    return (own or list(lines))[-1]


def _is_foreign(file: str) -> bool:
    """Whether a file is part of torch, this package or Python, so that the user cannot edit it."""
    is_pythons = file.startswith(_STDLIB) and "site-packages" not in file
    return is_pythons or file.startswith((_TORCH, _OURS))


def make_source(line: Line) -> Source:
    """The record of a line."""
    text = line.text or linecache.getline(line.file, line.line)
    return Source(
        file=replace_surrogates(shown_path(line.file)),
        line=line.line,
        function=function_name(line.function),
        text=replace_surrogates(text.strip().partition("\n")[0][:200]),
    )


def first_line(frame: Frame) -> Source | None:
    """The line where a function begins or resumes; None for a function generated by dynamo."""
    if frame.is_torchs:
        return None
    return make_source(Line(frame.file, frame.line, frame.name))


def _first_kind(stop: Stop) -> str:
    """The kind of the first break, without later ones that follow from it."""
    first = stop.message.partition(_NEXT)[0]
    return first.strip().partition("\n")[0].strip() if _NEXT in stop.message else stop.kind


def _make_record(site: _Site) -> BreakSite:
    explanation, hints = _read_message(site.stop.message)
    return BreakSite(
        source=site.source,
        num_events=site.num_events,
        reason=_clean_text(site.kind),
        explanation=explanation,
        break_id=find_break_id(site.kind),
        hints=hints,
        fix=suggest_fix(site.kind, site.stop.message, file=_last_file(site.stop)),
    )


def _last_file(stop: Stop) -> str:
    return stop.stack[-1].file if stop.stack else ""


def _read_message(message: str) -> tuple[str, tuple[str, ...]]:
    match = _PARTS.match(message.partition(_NEXT)[0].strip())
    if match is None or match["explanation"] is None:
        return _clean_text(message), ()
    hints = [_clean_text(hint) for hint in (match["hints"] or "").split("\n  Hint: ")[1:]]
    return _clean_text(match["explanation"].partition(_AFTERWORDS)[0]), tuple(hints)


def _clean_text(text: str) -> str:
    """The text as one line, without addresses, which differ between runs."""
    text = " ".join(_ADDRESS.sub("", text).split())
    return replace_surrogates(text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…")
