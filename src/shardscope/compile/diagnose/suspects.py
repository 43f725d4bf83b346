"""The ops of a fragment as a user knows them: by name, module and line."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from traceback import FrameSummary, StackSummary, walk_tb

import torch
from msgspec.structs import replace
from torch import fx

from shardscope._torch.compiling import is_compiling
from shardscope._torch.graph_switches import EXITS, SETTERS, is_level_machinery
from shardscope.comm.lines import user_source
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.outcome import message_of
from shardscope.compile.diagnose.repro.spelling import name_op
from shardscope.compile.explain.frames import function_name
from shardscope.compile.explain.graphs import module_of
from shardscope.record import Source, SuspectOp

__all__ = ["describe_ops", "find_failing_line"]

_OURS, _TORCHS = (
    f"{folder}{os.sep}"
    for folder in (Path(__file__).resolve().parents[2], Path(torch.__file__).parent)
)
_PYTHONS = f"{sysconfig.get_path('stdlib')}{os.sep}"
_GENERATED = ("<eval_with_key>", "<frozen ", "<string>")
_SWITCHES = {*SETTERS, *EXITS, *EXITS.values()}


def describe_ops(fragment: Fragment) -> tuple[SuspectOp, ...]:
    """Its ops in order, without what only serves them."""
    return tuple(
        SuspectOp(
            op=name_op(node),
            module=module_of(node) or None,
            source=_find_source(node),
        )
        for node in _list_ops(fragment.graph)
    )


def find_failing_line(error: BaseException, *, op: str = "") -> tuple[SuspectOp, ...]:
    """The user's line that raised an error, and the op, if it is known; nothing if no line is."""
    # What dynamo raises tells the line in its message, and has no frame of the user's.
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


def _find_source(node: fx.Node) -> Source | None:
    """The user's line, in the function that the user wrote."""
    source = user_source(node.meta.get("stack_trace") or "")
    return source and replace(source, function=function_name(source.function))


def _list_ops(graph: fx.GraphModule) -> Iterator[fx.Node]:
    nodes = [node for node in graph.graph.nodes if node.op.startswith("call_")]
    written = [node for node in nodes if not _is_support(node)]
    return iter(written or nodes)


def _is_support(node: fx.Node) -> bool:
    """Whether it takes a tuple apart, or turns something on or off: no op that computes."""
    return (
        name_op(node) == "operator.getitem"
        or node.target in _SWITCHES
        or is_level_machinery(node.target)
    )
