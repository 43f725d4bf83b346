"""Describes the ops of a subgraph for a user: name, module and source line."""

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
from shardscope._torch.graph import EXITS, SETTERS, is_level_machinery
from shardscope.attribution.call_sites import user_source
from shardscope.compile.diagnose.accuracy.check_result import message_of
from shardscope.compile.diagnose.subgraph.op_names import name_op
from shardscope.compile.diagnose.subgraph.subgraph import Subgraph
from shardscope.compile.explain.frames import function_name
from shardscope.compile.explain.graphs import module_of
from shardscope.record import Source, SuspectOp

_OURS, _TORCHS = (
    f"{folder}{os.sep}"
    for folder in (Path(__file__).resolve().parents[3], Path(torch.__file__).parent)
)
_PYTHONS = f"{sysconfig.get_path('stdlib')}{os.sep}"
_GENERATED = ("<eval_with_key>", "<frozen ", "<string>")
_SWITCHES = {*SETTERS, *EXITS, *EXITS.values()}


def describe_ops(subgraph: Subgraph) -> tuple[SuspectOp, ...]:
    """The ops of a subgraph in order, without ops that compute nothing."""
    return tuple(
        SuspectOp(
            op=name_op(node),
            module=module_of(node) or None,
            source=_find_source(node),
        )
        for node in _list_ops(subgraph.graph)
    )


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


def _find_source(node: fx.Node) -> Source | None:
    """The user's line behind a node, with the name of the function that the user wrote."""
    source = user_source(node.meta.get("stack_trace") or "")
    return source and replace(source, function=function_name(source.function))


def _list_ops(graph: fx.GraphModule) -> Iterator[fx.Node]:
    nodes = [node for node in graph.graph.nodes if node.op.startswith("call_")]
    written = [node for node in nodes if not _is_support(node)]
    return iter(written or nodes)


def _is_support(node: fx.Node) -> bool:
    """Whether the node computes nothing: it takes an item of a tuple, or switches a mode."""
    return (
        name_op(node) == "operator.getitem"
        or node.target in _SWITCHES
        or is_level_machinery(node.target)
    )
