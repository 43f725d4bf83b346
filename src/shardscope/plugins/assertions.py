"""Assertions about what a step says and holds; they fail with all that a person needs to know."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias, Unpack

from torch import nn
from torch.optim import Optimizer

from shardscope.comm.review import review
from shardscope.comm.trace import Trace
from shardscope.compile.explain.compare import review_explanations
from shardscope.compile.explain.explain import explain
from shardscope.contract import Breach, Contract, Figure, Limit, check, read_contract
from shardscope.contract.place import Place
from shardscope.contract.telling import render_breaches, summarize
from shardscope.errors import ContractError
from shardscope.plugins.comm_limits import CommLimits, read_comm_limits
from shardscope.plugins.stepping import (
    Mesh,
    Model,
    Step,
    built_model,
    call_step,
    find_recordings,
    trace_step,
)
from shardscope.record import Recording
from shardscope.shard.memory import Memory, memory
from shardscope.world import current_world

__all__ = [
    "BreachError",
    "assert_comm",
    "assert_contract",
    "assert_memory",
    "assert_no_graph_breaks",
]

__frames__ = "outermost"  # whoever called us did not write the step

Given: TypeAlias = Step | Recording | Trace | Memory | Sequence[Recording | Trace | Memory]
"""Something to run, or what was recorded of it."""


class BreachError(AssertionError):
    """Limits were exceeded; `breaches` lists them."""

    def __init__(self, breaches: Sequence[Breach], *, num_limits: int, name: str) -> None:
        super().__init__(
            f"{name}: {summarize(breaches, num_limits)}\n\n{render_breaches(breaches)}"
        )
        self.breaches = tuple(breaches)
        self._summary = f"{name}: {summarize(breaches, num_limits)}"

    def __repr__(self) -> str:
        return f"BreachError({self._summary!r})"


def assert_comm(
    step: Given,
    *,
    model: Model = None,
    mesh: Mesh = None,
    rank: int = 0,
    per_module: Mapping[str, CommLimits] | None = None,
    **limits: Unpack[CommLimits],
) -> None:
    """Fail unless the collectives of a step are within the limits.

    Counts are exact, and those of each rank.

    Args:
        step: `step()` or `step(model)`; or a trace or recording, and then nothing runs.
        model: A model, or a function that builds and shards one for the mesh. Tensors on meta get
            shapes without data.
        mesh: Axes of a simulated world, such as `{"tp": 4}`; by default the current world.
        rank: The rank of that world.
        per_module: Limits by module pattern. They hold for each module that matches, including its
            children.
        **limits: What a `[[contract.comm]]` table may contain, and counts by kind: `all_reduce=2`.

    Examples:
        >>> assert_comm(
        ...     lambda model: model(tokens).sum().backward(),
        ...     model=build,
        ...     mesh={"tp": 4},
        ...     phase="forward",
        ...     all_reduce=2,
        ...     max_bytes="64MiB",
        ...     per_module={"layers.*.attn": {"all_reduce": 1}},
        ... )
    """
    __tracebackhide__ = True
    contract = read_comm_limits(limits, per_module, caller="assert_comm()")
    found = find_recordings(step)
    if found is None:
        found = [trace_step(_checked(step), model=model, mesh=mesh, rank=rank)]
    _hold(contract, found, "assert_comm()")


def assert_contract(
    given: Given,
    contract: str | os.PathLike[str] | Contract = "shardscope.toml",
    *,
    model: Model = None,
    mesh: Mesh = None,
    rank: int = 0,
) -> None:
    """Fail unless a step keeps within a contract.

    A limit on something that was not measured fails: a trace alone has no memory or graph breaks.

    Args:
        given: What `assert_comm` takes as a step, or a list of recordings by several instruments.
        contract: The path of a contract, or a `Contract`.
        model: A model, or a function that builds and shards one for the mesh. Tensors on meta get
            shapes without data.
        mesh: Axes of a simulated world, such as `{"tp": 4}`; by default the current world.
        rank: The rank of that world.

    Examples:
        >>> assert_contract(step, "shardscope.toml", model=build, mesh={"tp": 4})
    """
    __tracebackhide__ = True
    name = "assert_contract()" if isinstance(contract, Contract) else os.fspath(contract)
    limits = contract if isinstance(contract, Contract) else read_contract(contract)
    found = find_recordings(given)
    if found is None:
        found = [trace_step(_checked(given), model=model, mesh=mesh, rank=rank)]
    _hold(limits, found, name)


def assert_memory(
    step: Step | Recording | Memory,
    *,
    max_peak: int | str,
    model: Model = None,
    mesh: Mesh = None,
    rank: int = 0,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
) -> None:
    """Fail if the peak memory of a step on a GPU, as estimated by `memory`, exceeds a limit.

    Args:
        step: `step()` or `step(model)`; or a recording or a result of `memory`.
        max_peak: Bytes, or a size such as `"1GiB"`.
        model: A model, or a function that builds and shards one for the mesh. Tensors on meta get
            shapes without data.
        mesh: Axes of a simulated world, such as `{"tp": 4}`; by default the current world.
        rank: The rank of that world.
        optimizer: The optimizer, or a function that makes one from the model.

    Examples:
        >>> assert_memory(step, model=build, mesh={"tp": 8}, max_peak="60GiB")
    """
    __tracebackhide__ = True
    most = Place("assert_memory()", {}).at("max_peak").as_size(max_peak)
    found = find_recordings(step)
    if found is None:
        found = [_tell_memory(_checked(step), model, mesh, rank, optimizer)]
    _hold(Contract((Limit(figure=Figure.PEAK_MEMORY, most=most),)), found, "assert_memory()")


def assert_no_graph_breaks(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Fail unless torch.compile makes one graph of a function, as `explain` reports it.

    Args:
        fn: A function or module.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Examples:
        >>> assert_no_graph_breaks(model, tokens)
    """
    __tracebackhide__ = True
    figures = (Figure.GRAPH_BREAKS, Figure.SKIPPED_FUNCTIONS)
    contract = Contract(tuple(Limit(figure=figure, most=0) for figure in figures))
    _hold(contract, [explain(fn, *args, **kwargs)], "assert_no_graph_breaks()")


def _hold(contract: Contract, recordings: Sequence[Recording], name: str) -> None:
    __tracebackhide__ = True
    reviewed = [review_explanations(review(one)) for one in recordings]
    breaches = check(contract, *reviewed)
    if breaches:
        raise BreachError(breaches, num_limits=len(contract.limits), name=name)


def _checked(step: Any) -> Step:
    if isinstance(step, nn.Module) or not callable(step):
        raise ContractError(
            f"An assertion got {type(step).__name__} instead of a step. Give it a function "
            "that runs one (lambda model: model(batch)), or a trace or recording of one."
        )
    checked: Step = step
    return checked


def _tell_memory(
    step: Step,
    model: Model,
    mesh: Mesh,
    rank: int,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None,
) -> Recording:
    """In a world if one is asked for; alone otherwise, as `memory` can."""
    is_alone = mesh is None and current_world() is None
    with ExitStack() as stack:
        if not is_alone or not isinstance(model, nn.Module):
            model, _ = stack.enter_context(built_model(model, mesh=mesh, rank=rank))
        if model is None:
            raise ContractError("assert_memory() needs the model whose memory it is: model=…")
        own = model
        return memory(own, lambda: call_step(step, own), optimizer).recording
