"""What AOT autograd does on behalf of a backend, step by step, with parts of it replaced.

Whatever a backend calls (`aot_module_simplified`, `aot_function`, `aot_autograd`), the work is done
by the same three functions: they are wrapped while a context lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, final
from unittest.mock import patch

import torch
from functorch.compile import (  # type: ignore[import-untyped]
    aot_module_simplified,
    default_partition,
    make_boxed_func,
)
from torch import fx

from shardscope._torch.private import find_name

__all__ = ["AotRun", "AotStep", "Compile", "Handed", "call_compiled", "run_ahead", "watched_aot"]

aot_autograd = find_name(
    "torch._functorch.aot_autograd", "observe and replace the stages of AOT autograd"
)

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class AotStep(StrEnum):
    """What is going on inside AOT autograd; inference counts as forward."""

    OUTSIDE = "outside"
    TRACING = "tracing"
    PARTITIONING = "partitioning"
    COMPILING_FORWARD = "compiling forward"
    COMPILING_BACKWARD = "compiling backward"
    RUNNING_FORWARD = "running forward"
    RUNNING_BACKWARD = "running backward"


@final
@dataclass
class Handed:
    """A graph that was handed to a compiler, and the values that what it made was first run on."""

    graph: fx.GraphModule
    is_backward: bool
    inputs: tuple[Any, ...] | None = None


@final
@dataclass
class AotRun:
    """One run of a backend: what of it is replaced, and what was seen."""

    has_own_partition: bool = True  # otherwise torch's plain one
    has_own_compilers: bool = True  # otherwise graphs are run as they are
    # Calls the backend's own compiler, given forward or backward, as it sees fit.
    compile_with: Callable[[Compile, fx.GraphModule, Sequence[Any], bool], Any] | None = None
    keeps_graphs: bool = False  # they, and the values that go in, are copied
    on_step: Callable[[AotStep], None] | None = None
    on_begin: Callable[[], None] | None = None  # when AOT autograd is handed a graph
    num_graphs: int = 0  # that AOT autograd was handed
    joint: fx.GraphModule | None = None  # as it is handed to the partition
    partition: str = ""  # name of the function
    handed: list[Handed] = field(default_factory=list)
    steps: list[AotStep] = field(default_factory=lambda: [AotStep.OUTSIDE])

    @property
    def step(self) -> AotStep:
        """What is going on now."""
        return self.steps[-1]

    def begin(self) -> None:
        """AOT autograd is handed a graph."""
        self.num_graphs += 1
        if self.on_begin is not None:
            self.on_begin()

    @contextmanager
    def doing(self, step: AotStep) -> Iterator[None]:
        """Be in a step until the context ends."""
        self.steps.append(step)
        self._tell()
        try:
            yield
        finally:
            self.steps.pop()
            self._tell()

    def _tell(self) -> None:
        if self.on_step is not None:
            self.on_step(self.step)


@contextmanager
def watched_aot(run: AotRun) -> Iterator[None]:
    """See and replace, as `run` says, what AOT autograd does until the context ends."""
    create, capture = aot_autograd.create_aot_state, aot_autograd.aot_stage1_graph_capture
    compile_graphs = aot_autograd.aot_stage2_compile

    def trace(function: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            # What passes of Inductor trace for themselves is no step of the backend's.
            if run.step is not AotStep.OUTSIDE:
                return function(*args, **kwargs)
            if function is create:
                run.begin()
            with run.doing(AotStep.TRACING):
                return function(*args, **kwargs)

        return traced

    def compile_stage(state: Any, captured: Any, partition: Any, forward: Any, *others: Any) -> Any:
        if run.step is not AotStep.OUTSIDE:
            return compile_graphs(state, captured, partition, forward, *others)
        backward, inference = (*others, None, None)[:2]
        return compile_graphs(
            state,
            captured,
            _watch_partition(run, partition),
            _watch_compiler(run, forward, is_backward=False),
            _watch_compiler(run, backward or forward, is_backward=True),
            _watch_compiler(run, inference or forward, is_backward=False),
        )

    with (
        patch.object(aot_autograd, "create_aot_state", trace(create)),
        patch.object(aot_autograd, "aot_stage1_graph_capture", trace(capture)),
        patch.object(aot_autograd, "aot_stage2_compile", compile_stage),
    ):
        yield


def _watch_partition(run: AotRun, own: Callable[..., Any]) -> Callable[..., Any]:
    inner = own if run.has_own_partition else default_partition
    run.partition = getattr(inner, "__name__", type(inner).__name__)

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        with run.doing(AotStep.PARTITIONING):
            # Subgraphs of higher-order ops come first, the whole last.
            run.joint = _copy_graph(joint) if run.keeps_graphs else None
            return inner(joint, joint_inputs, **kwargs)

    return partition


def _watch_compiler(
    run: AotRun, own: Callable[..., Any], *, is_backward: bool
) -> Callable[..., Any]:
    making = AotStep.COMPILING_BACKWARD if is_backward else AotStep.COMPILING_FORWARD
    running = AotStep.RUNNING_BACKWARD if is_backward else AotStep.RUNNING_FORWARD

    def compile_graph(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        handed = Handed(_copy_graph(graph) if run.keeps_graphs else graph, is_backward)
        if run.keeps_graphs:
            run.handed.append(handed)
        if not run.has_own_compilers:
            compiled: Callable[..., Any] = graph
        else:
            with run.doing(making):
                compiled = (run.compile_with or _compile_whole)(
                    own, graph, example_inputs, is_backward
                )

        def execute(args: list[Any]) -> Any:
            if run.keeps_graphs and handed.inputs is None:
                handed.inputs = tuple(_copy_value(one) for one in args)
            with run.doing(running):
                return call_compiled(compiled, args)

        execute._boxed_call = True
        return execute

    return compile_graph


def _compile_whole(
    own: Compile, graph: fx.GraphModule, example_inputs: Sequence[Any], is_backward: bool
) -> Any:
    return own(graph, example_inputs)


def call_compiled(compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call what a compiler made, whichever way it takes its arguments."""
    return compiled(list(args)) if getattr(compiled, "_boxed_call", False) else compiled(*args)


def run_ahead(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Trace a graph ahead of time and run what was traced, as it is."""
    compiled = aot_module_simplified(graph, list(inputs), fw_compiler=_run_as_it_is)
    return compiled(*inputs)


def _run_as_it_is(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    return make_boxed_func(graph)


def _copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """The same nodes under the same names; what they know, and tensors held, are shared."""
    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, nodes)


def _copy_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
