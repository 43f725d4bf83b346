"""`explain(fn, …)`: how many graphs torch.compile makes of a function, and why not one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx

from shardscope._torch.compile_caches import fresh_caches, is_compiler_off, quiet_compiler
from shardscope._torch.private import explain_moved_names
from shardscope.comm.run import read_identity
from shardscope.compile.call_state import everything_kept
from shardscope.compile.explain.explaining import explaining
from shardscope.errors import CompileError
from shardscope.record import Gap, Recording, replace_surrogates

__all__ = ["explain", "name_of", "one_at_a_time", "quiet_compiler", "run_as_it_is"]

one_at_a_time = threading.RLock()
"""For who sets dynamo's caches aside: they are one for all threads."""


@explain_moved_names
def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Recording:
    """Compile a function, call it once, and report graphs, graph breaks and recompilations.

    The function is compiled from scratch with a backend that runs its graphs eagerly. All compiler
    state, weights, buffers, gradients, arguments, train and eval mode and random state are
    restored. If the function raises, what was compiled until then is reported, with a finding. To
    observe many calls, another backend, or guards, use `explaining`.

    Args:
        fn: A function or module.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Examples:
        >>> recording = explain(model, tokens)
        >>> recording.explanations[0].num_graphs
    """
    if not callable(fn):
        raise CompileError(
            f"explain() got {type(fn).__name__}, which cannot be called. Give it the function or "
            "module first, and then what it is called with."
        )
    if is_compiler_off():
        raise CompileError(
            "torch.compile is switched off (TORCHDYNAMO_DISABLE, or torch._dynamo.config.disable), "
            "so there is nothing to explain. Switch it on."
        )
    with (
        one_at_a_time,
        everything_kept(fn, args, kwargs) as state,
        fresh_caches(),
        suppress(Exception),  # what the function raises is in the explanation
        explaining(target=name_of(fn)) as explained,
    ):
        torch.compile(fn, backend=run_as_it_is)(*args, **kwargs)
    recording = explained.recording
    if state.is_complete:
        return recording
    fact = (
        f"{name_of(fn)} can reach too many objects to restore all of them: what the call changed "
        "in the others stays changed"
    )
    gap = Gap(place="explain", fact=fact, rank=read_identity()[0])
    return replace(recording, gaps=(*recording.gaps, gap))


def run_as_it_is(graph: fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
    """A backend that changes nothing."""
    return graph.forward


def name_of(fn: Any) -> str:
    """What to call a function in a report."""
    inner = getattr(fn, "func", fn)  # a partial's
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    return replace_surrogates(str(name).rpartition("<locals>.")[2])
