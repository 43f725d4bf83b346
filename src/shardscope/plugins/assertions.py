"""Assertions about the collectives, memory and graphs of a step, run in a simulated world."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import Parameter, signature
from typing import Any, TypeAlias, TypedDict, Unpack

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardscope.comm.findings import review
from shardscope.comm.trace import Trace, trace
from shardscope.compile.explain.compare import review_explanations
from shardscope.compile.explain.explain import explain
from shardscope.contract import Contract, Figure, Limit, Violation, check, read_contract
from shardscope.contract.limits import BOUNDS, COMM_KEYS, SELECTORS
from shardscope.contract.toml_reader import TomlLocation, read_comm
from shardscope.contract.violation_text import render_violations, summarize
from shardscope.errors import ContractError
from shardscope.record import CollectiveKind, Recording
from shardscope.shard.memory.memory import Memory, memory
from shardscope.world import current_world, simulate

_KINDS = tuple(map(str, CollectiveKind))
_WORDS = (*_KINDS, *COMM_KEYS)

Name = str | Sequence[str]


class CommLimits(TypedDict, total=False):
    """Counts of collectives by kind and in total, limits on bytes, and which collectives count."""

    all_reduce: int
    all_gather: int
    reduce_scatter: int
    all_to_all: int
    broadcast: int
    reduce: int
    gather: int
    scatter: int
    send: int
    recv: int
    barrier: int
    count: int
    min_count: int
    max_count: int
    bytes: int | str
    min_bytes: int | str
    max_bytes: int | str
    wire_bytes: int | str
    min_wire_bytes: int | str
    max_wire_bytes: int | str
    output_bytes: int | str
    min_output_bytes: int | str
    max_output_bytes: int | str
    module: str
    phase: Name
    axis: Name
    kind: Name
    cause: Name


def read_comm_limits(
    limits: Mapping[str, Any], per_module: Mapping[str, Mapping[str, Any]] | None, *, caller: str
) -> Contract:
    """A contract with the limits in the arguments, which have the keys of a contract file."""
    location = TomlLocation(caller, {})
    common = {key: limits[key] for key in SELECTORS if key in limits and key != "module"}
    tables = list(_list_tables(location, limits))
    for pattern, module_limits in (per_module or {}).items():
        module_location = location.at(pattern)
        table = module_location.as_table(module_limits)
        tables += _list_tables(module_location, {**common, **table, "module": pattern})
    if not tables:
        raise ContractError(
            f'{caller} has no limit. Pass at least one, such as all_reduce=2 or max_bytes="64MiB".'
        )
    return Contract(tuple(limit for table in tables for limit, _ in read_comm(location, table)))


def _list_tables(location: TomlLocation, limits: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A table for each kind that is limited, and one for the limits on all kinds together."""
    location.check_keys(limits, _WORDS)
    selector = {key: _as_list(limits[key]) for key in SELECTORS if key in limits}
    bounds = {key: value for key, value in limits.items() if key in BOUNDS}
    for kind in _KINDS:
        if kind in limits:
            yield {**selector, "kind": kind, "count": limits[kind]}
    if bounds:
        yield {**selector, **bounds}


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


__frames__ = "outermost"  # our callers are not the user's step

Mesh: TypeAlias = Mapping[str, int] | DeviceMesh | None
"""Axes of a world to simulate, or the mesh of the one that there is."""

Model: TypeAlias = nn.Module | Callable[[DeviceMesh], nn.Module] | None
"""The model whose names count, or a function that builds and shards it for a mesh."""

Step: TypeAlias = Callable[..., object]
"""What to run: `step()` or `step(model)`."""


def find_recordings(source: Any) -> list[Recording] | None:
    """The recordings in an assertion's argument, or None if that is a step to run."""
    if isinstance(source, Recording):
        return [source]
    if isinstance(source, Sequence) and not isinstance(source, str):
        per_item = [find_recordings(item) for item in source]
        if any(item is None for item in per_item):
            return None
        return [
            recording
            for recordings in per_item
            if recordings is not None
            for recording in recordings
        ]
    attribute = getattr(source, "recording", None)
    attribute = attribute() if callable(attribute) else attribute
    return [attribute] if isinstance(attribute, Recording) else None


def trace_step(step: Step, *, model: Model, mesh: Mesh, rank: int) -> Recording:
    """Trace a step in the current world or in a simulated one."""
    with built_model(model, mesh=mesh, rank=rank) as (built, own_mesh):
        traced = trace(built, mesh=own_mesh)
        with traced:
            call_step(step, built)
        return traced.recording


@contextmanager
def built_model(
    model: Model, *, mesh: Mesh, rank: int = 0
) -> Iterator[tuple[nn.Module | None, DeviceMesh | None]]:
    """The model in its world, and the world's mesh; a model on meta is materialized."""
    with _in_world(mesh, rank) as own_mesh:
        if model is not None and not isinstance(model, nn.Module):
            model = _build(model, own_mesh)
        world = current_world()
        if world is not None and model is not None and _is_on_meta(model):
            world.materialize(model)
        yield model, own_mesh


def call_step(step: Step, model: nn.Module | None) -> object:
    """`step(model)` if it takes one, else `step()`."""
    return step(model) if model is not None and _takes_model(step) else step()


@contextmanager
def _in_world(mesh: Mesh, rank: int) -> Iterator[DeviceMesh | None]:
    world = current_world()
    if isinstance(mesh, DeviceMesh):
        yield mesh
    elif world is not None:
        _check_same_axes(mesh, world.axes)
        yield world.mesh
    elif mesh is not None:
        with simulate(mesh, rank=rank) as simulated:
            yield simulated.mesh
    elif dist.is_initialized():
        yield None
    else:
        raise ContractError(
            "There is no world for the step to run in. Name the axes of one to simulate, "
            'mesh={"dp": 2, "tp": 4}, or use the fixture shardscope_world.'
        )


def _check_same_axes(mesh: Mapping[str, int] | None, axes: Mapping[str, int]) -> None:
    if mesh is not None and dict(mesh) != dict(axes):
        raise ContractError(
            f"mesh={dict(mesh)} was asked for in a simulated world of {dict(axes)}. Leave mesh "
            "out, or leave that world first."
        )


def _build(model: Callable[..., Any], mesh: DeviceMesh | None) -> nn.Module:
    built = model(mesh)
    if not isinstance(built, nn.Module):
        raise ContractError(
            f"model= returned {type(built).__name__} where it should build and shard the model for "
            "a mesh. Return the model itself."
        )
    return built


def _is_on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _takes_model(step: Step) -> bool:
    try:
        parameters = signature(step).parameters.values()
    except (TypeError, ValueError):
        return False
    takes = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)
    return any(
        parameter.kind in takes and parameter.default is Parameter.empty for parameter in parameters
    )


StepOrRecordings: TypeAlias = (
    Step | Recording | Trace | Memory | Sequence[Recording | Trace | Memory]
)
"""Something to run, or what was recorded of it."""


class BreachError(AssertionError):
    """Limits were exceeded; `breaches` lists them."""

    def __init__(self, violations: Sequence[Violation], *, num_limits: int, name: str) -> None:
        super().__init__(
            f"{name}: {summarize(violations, num_limits)}\n\n{render_violations(violations)}"
        )
        self.breaches = tuple(violations)
        self._summary = f"{name}: {summarize(violations, num_limits)}"

    def __repr__(self) -> str:
        return f"BreachError({self._summary!r})"


def assert_comm(
    step: StepOrRecordings,
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
    recordings = find_recordings(step)
    if recordings is None:
        recordings = [trace_step(_checked(step), model=model, mesh=mesh, rank=rank)]
    _check_limits(contract, recordings, "assert_comm()")


def assert_contract(
    given: StepOrRecordings,
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
    recordings = find_recordings(given)
    if recordings is None:
        recordings = [trace_step(_checked(given), model=model, mesh=mesh, rank=rank)]
    _check_limits(limits, recordings, name)


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
    most = TomlLocation("assert_memory()", {}).at("max_peak").as_size(max_peak)
    recordings = find_recordings(step)
    if recordings is None:
        recordings = [_estimate_memory(_checked(step), model, mesh, rank, optimizer)]
    _check_limits(
        Contract((Limit(figure=Figure.PEAK_MEMORY, most=most),)), recordings, "assert_memory()"
    )


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
    _check_limits(contract, [explain(fn, *args, **kwargs)], "assert_no_graph_breaks()")


def _check_limits(contract: Contract, recordings: Sequence[Recording], name: str) -> None:
    __tracebackhide__ = True
    reviewed = [review_explanations(review(recording)) for recording in recordings]
    violations = check(contract, *reviewed)
    if violations:
        raise BreachError(violations, num_limits=len(contract.limits), name=name)


def _checked(step: Any) -> Step:
    if isinstance(step, nn.Module) or not callable(step):
        raise ContractError(
            f"An assertion got {type(step).__name__} instead of a step. Give it a function "
            "that runs one (lambda model: model(batch)), or a trace or recording of one."
        )
    checked: Step = step
    return checked


def _estimate_memory(
    step: Step,
    model: Model,
    mesh: Mesh,
    rank: int,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None,
) -> Recording:
    """Estimate the memory of a step, in a world if a mesh is given or one is current."""
    is_alone = mesh is None and current_world() is None
    with ExitStack() as stack:
        if not is_alone or not isinstance(model, nn.Module):
            model, _ = stack.enter_context(built_model(model, mesh=mesh, rank=rank))
        if model is None:
            raise ContractError("assert_memory() needs the model whose memory it is: model=…")
        own = model
        return memory(own, lambda: call_step(step, own), optimizer).recording
