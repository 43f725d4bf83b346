"""The ops of a fragment as a user knows them: by name, module and line."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace
from torch import fx

from shardscope._torch.graph_switches import EXITS, SETTERS, is_level_machinery
from shardscope.comm.lines import user_source
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.repro.spelling import name_op
from shardscope.compile.explain.frames import function_name
from shardscope.compile.explain.graphs import module_of
from shardscope.record import Source, SuspectOp

__all__ = ["describe_ops"]

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
