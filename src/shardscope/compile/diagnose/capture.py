"""The graphs that dynamo makes of a function, with the values they are called with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import fx

from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.leaves import is_computed, make_computed

__all__ = ["Captured", "capture"]


@final
@dataclass(frozen=True)
class Captured:
    """Graphs in the order in which they were first called; `error` is what ended the run."""

    fragments: tuple[Fragment, ...]
    error: Exception | None = None


def capture(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dynamic: bool | None = None,
) -> Captured:
    """Call a function once, compiled by a backend that runs graphs as they are and keeps them.

    Whoever calls this keeps the state of everything that the function may change.
    """
    tape = _Tape()
    compiled = torch.compile(fn, backend=tape.take, dynamic=dynamic)
    try:
        compiled(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - dynamo's, the graph's or the user's: told apart later
        return Captured(tuple(tape.fragments), error)
    return Captured(tuple(tape.fragments))


@final
class _Tape:
    def __init__(self) -> None:
        self.fragments: list[Fragment] = []

    def take(self, graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        """A backend: the graph itself, which is remembered when it is called first.

        `forward` is called because a GraphModule that is called prints the errors of its ops.
        """
        is_taken = False

        def run(*values: Any) -> Any:
            nonlocal is_taken
            if is_taken:
                return graph.forward(*values)
            is_taken = True
            given, kept = copy_values(values), _keep(graph)
            has_open_sizes = any(map(_is_open, graph.graph.find_nodes(op="placeholder")))
            fragment = Fragment(kept, given, torch.is_grad_enabled(), has_open_sizes)
            self.fragments.append(fragment)
            return graph.forward(*values)

        return run


def _keep(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with all that it holds: dynamo takes parameters away when their optimizer dies."""
    kept = fx.GraphModule(graph, graph.graph)
    kept.meta.update(graph.meta)
    return kept


def _is_open(placeholder: fx.Node) -> bool:
    """Whether the size of an input, or a number that is one, is a symbol in the graph."""
    example = placeholder.meta.get("example_value")
    if isinstance(example, torch.Tensor) and example.layout is torch.strided:
        return any(isinstance(size, torch.SymInt) for size in example.shape)
    return isinstance(example, torch.SymInt | torch.SymFloat)


def copy_values(values: Sequence[Any]) -> tuple[Any, ...]:
    """Values as they are now, which share memory where the originals do."""
    leaves = copy.deepcopy([_detach(one) for one in values], {})
    return tuple(
        make_computed(leaf) if isinstance(one, torch.Tensor) and is_computed(one) else leaf
        for one, leaf in zip(values, leaves, strict=True)
    )


def _detach(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)
