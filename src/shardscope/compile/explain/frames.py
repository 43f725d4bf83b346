"""The log of dynamo's compilations, frame by frame, with the ops of each graph."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, final

import torch
from torch import fx

from shardscope._torch.collectives.functional import (
    find_group,
    inner_graphs,
    is_bookkeeping,
    is_collective_name,
    name_target,
)
from shardscope._torch.dispatch import is_higher_order
from shardscope._torch.dynamo import FrameEnd, Line, Stop
from shardscope.compile.explain.guards import RawGuard, read_failed_guard
from shardscope.record import OpKind

_KINDS = {
    "call_function": OpKind.FUNCTION,
    "call_method": OpKind.METHOD,
    "call_module": OpKind.MODULE,
}


@dataclass(frozen=True, slots=True)
class RawOp:
    """An op of a graph, with the stack trace of its line."""

    kind: OpKind
    op: str
    result: str
    module: str
    within: str
    stack_trace: str
    group: tuple[int, ...] | None  # ranks, if it is a collective


@dataclass(frozen=True, slots=True)
class RawGraph:
    """A graph of dynamo, with its ops."""

    compile_id: str
    num_inputs: int
    num_outputs: int
    is_broken: bool
    reason: str
    ops: tuple[RawOp, ...]


def read_graph(graph: fx.GraphModule, compile_id: str) -> RawGraph:
    """Read the ops, inputs and end of a graph that dynamo made."""
    why = getattr(graph, "compile_subgraph_reason", None)
    nodes = graph.graph.nodes
    (output,) = (node for node in nodes if node.op == "output")
    return RawGraph(
        compile_id=compile_id,
        num_inputs=sum(node.op == "placeholder" for node in nodes),
        num_outputs=len(output.args[0]),
        is_broken=bool(getattr(why, "graph_break", False)),
        reason=str(getattr(why, "reason", "")),
        ops=tuple(_read_ops(graph, "")),
    )


def list_targets(graph: fx.GraphModule) -> list[Any]:
    """The targets of all nodes of a graph and its subgraphs, except bookkeeping."""
    targets: list[Any] = []
    for node in graph.graph.nodes:
        if node.op in _KINDS:
            targets += [node.target] if _kind_of(node) is not OpKind.BOOKKEEPING else []
            targets += [target for _, inner in inner_graphs(node) for target in list_targets(inner)]
    return targets


def _read_ops(graph: fx.GraphModule, within: str) -> Iterator[RawOp]:
    for node in graph.graph.nodes:
        if node.op not in _KINDS:
            continue
        op = _read_op(node, within)
        yield op
        for name, inner in inner_graphs(node):
            inner_name = f"{node.name}.{name}"
            yield from _read_ops(inner, f"{within}/{inner_name}" if within else inner_name)


def _read_op(node: fx.Node, within: str) -> RawOp:
    name = name_target(node)
    return RawOp(
        kind=_kind_of(node),
        op=name,
        result=_describe(node.meta.get("example_value")),
        module=module_of(node),
        within=within,
        stack_trace=node.meta.get("stack_trace") or "",
        group=find_group(node) if is_collective_name(name) else None,
    )


def _kind_of(node: fx.Node) -> OpKind:
    if is_higher_order(node.target):
        return OpKind.HIGHER_ORDER
    return OpKind.BOOKKEEPING if is_bookkeeping(node) else _KINDS[node.op]


def _describe(value: Any) -> str:
    """The dtype and shape of a value, as `float32[8, ?]`; `?` is a dynamic size."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) if isinstance(size, int) else "?" for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(_describe(item) for item in value)})"
    return "" if value is None else type(value).__name__


def module_of(node: fx.Node) -> str:
    """The name of the module that a node belongs to; "" for none or the compiled module."""
    stack = node.meta.get("nn_module_stack") or {}
    name = str(next(reversed(stack.values()))[0]) if stack else ""
    return _clean(name)


def _clean(name: str) -> str:
    """A module name from dynamo's: `layers.0.up` for `L['self'].layers[0].up`."""
    name = name.removeprefix("L['self']").removeprefix("L['fn']").replace("._modules", "")
    name = name.removeprefix("L").removeprefix("G") if name.startswith(("L['", "G['")) else name
    for old, new in (("['", "."), ("']", ""), ("[", "."), ("]", "")):
        name = name.replace(old, new)
    return name.removeprefix(".")


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
        self._open.append(frame)
        if not _is_writing(code, caller):
            self.frames.append(frame)

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


def _is_writing(code: CodeType, caller: FrameType | None) -> bool:
    """Whether a function is called to write what the program prints, by a replaced stream.

    W&B and others replace `sys.stdout.write` by a Python function, which is no part of the program.
    """
    methods = [getattr(stream, "write", None) for stream in (sys.stdout, sys.stderr)]
    functions = (getattr(method, "__func__", method) for method in methods)
    writers = {getattr(function, "__code__", None) for function in functions} - {None}
    while writers and code not in writers and caller is not None:
        code, caller = caller.f_code, caller.f_back
    return code in writers


def _read_callers(frame: FrameType | None) -> tuple[Line, ...]:
    lines: list[Line] = []
    while frame is not None:
        code = frame.f_code
        lines.append(Line(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(reversed(lines))
