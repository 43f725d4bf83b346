"""`CheckResult`: how compiled code compares with eager execution, and how an error becomes one."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary, StackSummary, walk_tb
from types import FrameType
from typing import Any, final

import torch
from msgspec.structs import replace
from torch import fx

from shardscope._torch.aot import AotStep
from shardscope._torch.dynamo import is_compiling
from shardscope.attribution.call_sites import user_source
from shardscope.compile.diagnose.worker.harness import plain_words
from shardscope.compile.explain.frames import function_name
from shardscope.errors import CompileError
from shardscope.record import Condition, Deviation, Phase, SuspectOp

NUMBERS = (Condition.WRONG_RESULT, Condition.NAN)
_NODE = re.compile(r"%(\w+) : ")  # how fx prints the node that it was executing
_RESULT = re.compile(r"\s*(\w+) = ")  # a line of the code that fx generates for a graph
_GRAPH_CODE = "<eval_with_key>"
_MESSAGE = 4000  # characters of an error message that are stored
_OURS, _TORCHS = (
    f"{folder}{os.sep}"
    for folder in (Path(__file__).resolve().parents[3], Path(torch.__file__).parent)
)
_PYTHONS = f"{sysconfig.get_path('stdlib')}{os.sep}"
_GENERATED = ("<eval_with_key>", "<frozen ", "<string>")
_UNSTABLE = (*NUMBERS, Condition.NONDETERMINISTIC)
_WRAPPERS = (
    "BackendCompilerFailed",
    "InductorError",
    "LoweringException",
    "SubgraphLoweringException",
)


@final
@dataclass(frozen=True)
class Application:
    """A part of the compiler that was applied to a graph: a pass, a decomposition, a lowering."""

    subsystem: str  # as torch's CompilerBisector names it
    what: str
    step: AotStep


@final
@dataclass(frozen=True)
class CompilerLog:
    """What the compiler did during a check that was observed; empty if the process died."""

    is_complete: bool = False  # the check was observed to its end
    num_graphs: int = 0  # that AOT autograd received
    is_inductor: bool = False
    applications: tuple[Application, ...] = ()  # requested, whether enabled or not
    kernels: tuple[tuple[AotStep, str], ...] = ()  # that Inductor wrote
    partition: str = ""  # function that splits the joint graph into forward and backward
    ops: tuple[tuple[str, str], ...] = ()  # in the failing direction: node name and op
    changed_op: str = ""  # op of forward or backward that differs from the joint graph

    def applied(self, subsystems: frozenset[str]) -> list[Application]:
        """The applications of these subsystems, in order."""
        return [
            application for application in self.applications if application.subsystem in subsystems
        ]


@final
@dataclass(frozen=True)
class CheckResult:
    """How a compiled subgraph or function compares with eager execution.

    A worker that crashes or hangs while it checks is described by a result, too.
    """

    condition: Condition
    fact: str = ""
    phase: Phase = Phase.FORWARD  # where it shows first
    error: str = ""  # type and message of the error that was raised, or the signal
    signature: str = ""  # of an error: see make_signature
    deviation: Deviation | None = None
    hints: tuple[str, ...] = ()  # names of nodes that probably cause it
    suspects: tuple[SuspectOp, ...] = ()  # of an error: the line that raised it, and the op
    notes: tuple[str, ...] = ()  # what could not be compared
    log: CompilerLog = CompilerLog()  # recorded while the stage is bisected

    @property
    def is_bad(self) -> bool:
        """Whether the user should act on it."""
        return self.condition.is_bad

    def is_same(self, outcome: CheckResult) -> bool:
        """Whether both are the same failure: equal condition, phase and, for errors, signature."""
        return (self.condition, self.phase, self.signature) == (
            outcome.condition,
            outcome.phase,
            outcome.signature,
        )


def is_same_failure(first: CheckResult, second: CheckResult) -> bool:
    """Whether both fail in the same way; wrong numbers and NaN count as the same.

    Wrong numbers may show in different phases: a result may hide what its gradient shows. A program
    that reads uninitialized memory may be correct by coincidence.
    """
    if first.condition in _UNSTABLE and second.condition in _UNSTABLE:
        return True
    return first.is_same(second)


def describe_error(error: BaseException, phase: str) -> CheckResult:
    """The outcome of an error in a phase: compiling, running or backward."""
    is_compile_error = phase == "compiling" or is_compiling(error)
    cause = find_cause(error)
    return CheckResult(
        Condition.COMPILE_ERROR if is_compile_error else Condition.RUNTIME_ERROR,
        f"{'compiling' if is_compile_error else 'running'} it fails: {format_error(cause)}",
        Phase.BACKWARD if phase == "backward" else Phase.FORWARD,
        error=describe_text(cause),
        signature=make_signature(error),
        hints=find_hints(cause),
        suspects=find_failing_line(error),
    )


def describe_text(error: BaseException) -> str:
    """The type and the message of an error."""
    return f"{type(error).__name__}: {message_of(error)}"[:_MESSAGE]


def make_signature(error: BaseException) -> str:
    """What an error has in common in a smaller program: its cause's type and its message.

    Numbers, shapes, and names that the user chose are removed from the message.
    """
    error = find_cause(error)
    return f"{type(error).__module__}.{type(error).__qualname__}: {plain_words(message_of(error))}"


def message_of(error: BaseException) -> str:
    """The message of an error; empty if it cannot be formatted."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - `__str__` of a user's error may raise anything
        return ""


def find_cause(error: BaseException) -> BaseException:
    """The original error inside the errors that compilers wrap around it."""
    while type(error).__name__ in _WRAPPERS:
        inner = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error


def make_eager_failure(error: BaseException) -> CompileError:
    """The error to raise for a function that fails in eager execution."""
    return CompileError(
        f"the function itself fails in eager mode ({format_error(error)}). Fix that first."
    )


def format_error(error: BaseException, *, limit: int = 300) -> str:
    """The type of an error and the first line of its message."""
    text = message_of(error).strip()
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first[:limit]}" if first else type(error).__name__


def find_failing_line(error: BaseException, *, op: str = "") -> tuple[SuspectOp, ...]:
    """The user's line that raised an error, with the op if known; empty if no line is known."""
    # Errors of dynamo have the line in their message, and no frame of the user's code.
    named = user_source(message_of(error)) if is_compiling(error) else None
    raised = [
        FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in walk_tb(error.__traceback__)
        if _is_users(frame.f_code.co_filename)
    ]
    source = named or user_source("".join(StackSummary.from_list(raised[-1:]).format()))
    if source is None:
        return ()
    line = replace(source, function=function_name(source.function))
    return (SuspectOp(op=op or "this line", source=line),)


def _is_users(file: str) -> bool:
    if file.startswith((_OURS, _TORCHS, *_GENERATED)):
        return False
    return not file.startswith(_PYTHONS) or "site-packages" in file


def find_hints(error: BaseException) -> tuple[str, ...]:
    """Names of nodes that an error mentions, or in whose line it was raised."""
    named = _NODE.findall(message_of(error))
    raised = [name for frame, line in walk_tb(error.__traceback__) for name in _at(frame, line)]
    return tuple(dict.fromkeys([*named, *reversed(raised)]))


def _at(frame: FrameType, line: int) -> Iterator[str]:
    """The node whose line of generated code is executed, if any, and the nodes it came from."""
    file = frame.f_code.co_filename
    match = file.startswith(_GRAPH_CODE) and _RESULT.match(linecache.getline(file, line))
    if not match:
        return
    yield match[1]
    graph = frame.f_locals.get("self")
    if isinstance(graph, fx.GraphModule):
        for node in graph.graph.nodes:
            if node.name == match[1]:
                yield from _list_origins(node.meta.get("from_node") or ())


def _list_origins(sources: Sequence[Any]) -> Iterator[str]:
    """Names in earlier graphs, the earliest last."""
    for source in sources:
        yield source.name
        yield from _list_origins(source.from_node)
