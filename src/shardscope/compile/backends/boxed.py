"""Compilers that compile nothing: they run a graph as it is, and let go of its inputs early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import fx

from shardscope._torch.aot_backends import Compiled, Compiler, as_boxed, give_boxed_code
from shardscope._torch.checking_modes import check_fakes
from shardscope.compile.backends.graphs import copy_graph

__all__ = ["checking_compiler", "is_builtin", "run_boxed", "run_boxed_within"]

Surroundings = Callable[[], AbstractContextManager[Any]]


def run_boxed(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Run `gm` as it is on a list of inputs, which is emptied: each is freed after its last use."""
    boxed = copy_graph(gm)
    give_boxed_code(boxed)
    return as_boxed(boxed.forward, takes_list=True)


def run_boxed_within(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, surroundings: Surroundings
) -> Compiled:
    """The same, each call within a context that `surroundings` makes."""
    run = run_boxed(gm, example_inputs)

    def run_within(args: list[Any]) -> Any:
        with surroundings():
            return run(args)

    return as_boxed(run_within, takes_list=True)


def is_builtin(op: Any) -> bool:
    """Whether the op is torch's own, whose fakes are tested elsewhere."""
    return op.namespace in ("aten", "prims", "prim")


def checking_compiler(check: str) -> Compiler:
    """What checks no fake ('off'), those of 'custom_ops', or those of 'all' ops."""
    if check == "off":
        return run_boxed
    trusted = is_builtin if check == "custom_ops" else None
    return partial(run_boxed_within, surroundings=lambda: check_fakes(trusted))
