"""Graphs traced before autograd and autocast see their ops, without touching real tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shardscope._torch.dispatch import detect_fake_mode
from shardscope._torch.programs import enable_python_dispatcher

__all__ = ["trace_pre_dispatch"]


def trace_pre_dispatch(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> torch.fx.GraphModule:
    """`gm` in the ops that reach the dispatcher first."""
    inputs = _as_fakes(gm, example_inputs)

    def run(*args: Any) -> Any:
        return torch.fx.Interpreter(gm).run(*args)

    # Tracing runs the graph: on real inputs, what it writes into would be written into once more.
    fakes = detect_fake_mode(inputs)
    mode: Literal["real", "fake"] = "fake" if fakes is None else "real"
    trace = make_fx(run, tracing_mode=mode, pre_dispatch=True, _allow_non_fake_inputs=True)
    with enable_python_dispatcher(), _also_for_what_is_made(fakes):
        traced: torch.fx.GraphModule = trace(*inputs)
    return traced


@contextmanager
def _also_for_what_is_made(fakes: Any) -> Iterator[None]:
    """Tensors that the graph makes itself are as fake as its inputs, or the two do not mix."""
    if fakes is None:
        yield
        return
    before, fakes.allow_non_fake_inputs = fakes.allow_non_fake_inputs, True
    try:
        with fakes:
            yield
    finally:
        fakes.allow_non_fake_inputs = before


def _as_fakes(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """What dynamo itself traced with, symbols and all; the inputs given if it was not dynamo."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if all("example_value" in node.meta for node in placeholders):
        return [node.meta["example_value"] for node in placeholders]
    return list(example_inputs)
