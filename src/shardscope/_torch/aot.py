"""AOT autograd: tracing, decomposing and partitioning for a backend, with stages that can be
observed and replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, final
from unittest.mock import patch

import torch
from functorch.compile import (  # type: ignore[import-untyped]
    aot_module_simplified,
    default_partition,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardscope._torch.decompositions import inductor_table
from shardscope._torch.dispatch import detect_fake_mode
from shardscope._torch.export import enable_python_dispatcher
from shardscope._torch.private import find_name

aot_function = find_name(
    "torch._functorch.aot_autograd.aot_function", "reproduce the graphs of torch's op coverage tool"
)


def trace_graphs(function: Callable[..., Any], *args: Any) -> list[torch.fx.GraphModule]:
    """Run `function` and the backward of its outputs, and return the graphs of both."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm)

    compiled = aot_function(function, fw_compiler=keep, decompositions=dict(inductor_table()))
    outputs = [output for output in compiled(*args) if output.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return graphs


aot_autograd = find_name(
    "torch._dynamo.backends.common.aot_autograd",
    "trace forward and backward for shardscope's backends",
)
functorch_config = find_name(
    "torch._functorch.config",
    "respect torch's settings for checking fake implementations and its bisector",
)
_DynamoError = find_name(
    "torch._dynamo.exc.TorchDynamoException", "raise what torch's eager_noexcept raises"
)
_BoxedCodeGen = find_name("torch.fx.graph._BoxedCodeGen", "free inputs after their last use")

Compiled = Callable[..., Any]
Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Compiled]
Partition = Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]

partition_by_default: Partition = default_partition
partition_by_min_cut: Partition = min_cut_rematerialization_partition


def partition_for_inductor(
    joint: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Partition a joint graph as Inductor does: recompute ops that would be fused."""
    kwargs.setdefault("compiler", "inductor")
    return partition_by_min_cut(joint, joint_inputs, **kwargs)


def compile_ahead(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Compiler,
    backward: Compiler | None = None,
    partition: Partition = partition_by_default,
    table: Mapping[Any, Callable[..., Any]] | None = None,
    keeps_mutations: bool = False,
) -> Compiled:
    """Trace forward and backward ahead of time, and pass each graph to its compiler."""
    compile_graph = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward or forward,
        inference_compiler=forward,
        partition_fn=partition,
        decompositions=None if table is None else dict(table),
        keep_inference_input_mutations=keeps_mutations,
    )
    compiled: Compiled = compile_graph(gm, example_inputs)
    return compiled


@contextmanager
def config_of_decomp_partition() -> Iterator[None]:
    """The settings of torch's backend aot_eager_decomp_partition, with its bisector's changes."""
    from torch._inductor.compiler_bisector import CompilerBisector

    changes: dict[str, Any] = {"unlift_effect_tokens": True}
    changes.update(CompilerBisector.get_config_change("aot_eager_decomp_partition") or {})
    with functorch_config.patch(changes):
        yield


def crossref_setting() -> str:
    """The ops that torch's setting asks to cross-check: 'off', 'custom_ops' or 'all'."""
    return str(functorch_config.fake_tensor_crossref or "off")


def graph_run_error(sentence: str) -> Exception:
    """The exception that torch raises for a graph that failed at run time."""
    error: Exception = _DynamoError(sentence)
    return error


def give_boxed_code(gm: torch.fx.GraphModule) -> None:
    """Make `gm.forward` take a list, which it empties; values are freed after their last use."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()


def as_boxed(compiled: Compiled, *, takes_list: bool = False) -> Compiled:
    """Wrap `compiled` to be called with a list, unless it is marked as boxed already."""
    if getattr(compiled, "_boxed_call", False):
        return compiled

    def run(args: list[Any]) -> Any:
        if takes_list:
            return compiled(args)
        values = tuple(args)
        args.clear()
        return compiled(*values)

    run._boxed_call = True
    return run


staged_aot_autograd = find_name(
    "torch._functorch.aot_autograd", "observe and replace the stages of AOT autograd"
)

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class AotStep(StrEnum):
    """The step that AOT autograd is in; inference counts as forward."""

    OUTSIDE = "outside"
    TRACING = "tracing"
    PARTITIONING = "partitioning"
    COMPILING_FORWARD = "compiling forward"
    COMPILING_BACKWARD = "compiling backward"
    RUNNING_FORWARD = "running forward"
    RUNNING_BACKWARD = "running backward"


@final
@dataclass
class CompilerInput:
    """A graph that was passed to a compiler, and the inputs of its first run."""

    graph: fx.GraphModule
    is_backward: bool
    inputs: tuple[Any, ...] | None = None


@final
@dataclass
class AotRun:
    """A run of a backend: the stages to replace, and what was observed."""

    has_own_partition: bool = True  # otherwise torch's default partition
    has_own_compilers: bool = True  # otherwise graphs run eagerly
    # Calls the backend's compiler with a graph, its inputs and whether it is a backward.
    compile_with: Callable[[Compile, fx.GraphModule, Sequence[Any], bool], Any] | None = None
    keeps_graphs: bool = False  # copy the graphs and their first inputs
    on_step: Callable[[AotStep], None] | None = None
    on_begin: Callable[[], None] | None = None  # when AOT autograd gets a graph
    num_graphs: int = 0  # that AOT autograd got
    joint: fx.GraphModule | None = None  # as passed to the partition
    partition: str = ""  # name of the function
    handed: list[CompilerInput] = field(default_factory=list)
    steps: list[AotStep] = field(default_factory=lambda: [AotStep.OUTSIDE])

    @property
    def step(self) -> AotStep:
        """The current step."""
        return self.steps[-1]

    def begin(self) -> None:
        """Count a graph that AOT autograd gets."""
        self.num_graphs += 1
        if self.on_begin is not None:
            self.on_begin()

    @contextmanager
    def doing(self, step: AotStep) -> Iterator[None]:
        """Be in a step until the context ends."""
        self.steps.append(step)
        self._report_step()
        try:
            yield
        finally:
            self.steps.pop()
            self._report_step()

    def _report_step(self) -> None:
        if self.on_step is not None:
            self.on_step(self.step)


@contextmanager
def watched_aot(run: AotRun) -> Iterator[None]:
    """Observe and replace stages of AOT autograd, as `run` requests, until the context ends."""
    create, capture = (
        staged_aot_autograd.create_aot_state,
        staged_aot_autograd.aot_stage1_graph_capture,
    )
    compile_graphs = staged_aot_autograd.aot_stage2_compile

    def trace(function: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*args: Any, **kwargs: Any) -> Any:
            # A trace made by a pass of Inductor is not a step of the backend.
            if run.step is not AotStep.OUTSIDE:
                return function(*args, **kwargs)
            if function is create:
                run.begin()
            with run.doing(AotStep.TRACING):
                return function(*args, **kwargs)

        return traced

    def compile_stage(
        state: Any, captured: Any, partition: Any, forward: Any, *more_compilers: Any
    ) -> Any:
        if run.step is not AotStep.OUTSIDE:
            return compile_graphs(state, captured, partition, forward, *more_compilers)
        backward, inference = (*more_compilers, None, None)[:2]
        return compile_graphs(
            state,
            captured,
            _watch_partition(run, partition),
            _watch_compiler(run, forward, is_backward=False),
            _watch_compiler(run, backward or forward, is_backward=True),
            _watch_compiler(run, inference or forward, is_backward=False),
        )

    with (
        patch.object(staged_aot_autograd, "create_aot_state", trace(create)),
        patch.object(staged_aot_autograd, "aot_stage1_graph_capture", trace(capture)),
        patch.object(staged_aot_autograd, "aot_stage2_compile", compile_stage),
    ):
        yield


def _watch_partition(run: AotRun, backend_partition: Callable[..., Any]) -> Callable[..., Any]:
    partition_graph = backend_partition if run.has_own_partition else default_partition
    run.partition = getattr(partition_graph, "__name__", type(partition_graph).__name__)

    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        with run.doing(AotStep.PARTITIONING):
            # Subgraphs of higher-order ops come first, the entire joint graph last.
            run.joint = _copy_graph(joint) if run.keeps_graphs else None
            return partition_graph(joint, joint_inputs, **kwargs)

    return partition


def _watch_compiler(
    run: AotRun, backend_compiler: Callable[..., Any], *, is_backward: bool
) -> Callable[..., Any]:
    compile_step = AotStep.COMPILING_BACKWARD if is_backward else AotStep.COMPILING_FORWARD
    run_step = AotStep.RUNNING_BACKWARD if is_backward else AotStep.RUNNING_FORWARD

    def compile_graph(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        compiler_input = CompilerInput(
            _copy_graph(graph) if run.keeps_graphs else graph, is_backward
        )
        if run.keeps_graphs:
            run.handed.append(compiler_input)
        if not run.has_own_compilers:
            compiled: Callable[..., Any] = graph
        else:
            with run.doing(compile_step):
                compiled = (run.compile_with or _compile_unchanged)(
                    backend_compiler, graph, example_inputs, is_backward
                )

        def execute(args: list[Any]) -> Any:
            if run.keeps_graphs and compiler_input.inputs is None:
                compiler_input.inputs = tuple(_copy_value(value) for value in args)
            with run.doing(run_step):
                return call_compiled(compiled, args)

        execute._boxed_call = True
        return execute

    return compile_graph


def _compile_unchanged(
    backend_compiler: Compile,
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    is_backward: bool,
) -> Any:
    return backend_compiler(graph, example_inputs)


def call_compiled(compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call the result of a compiler, with a list if it is boxed, else with positional arguments."""
    return compiled(list(args)) if getattr(compiled, "_boxed_call", False) else compiled(*args)


def run_ahead(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Trace a graph ahead of time and run the traced graph eagerly."""
    compiled = aot_module_simplified(graph, list(inputs), fw_compiler=_run_eagerly)
    return compiled(*inputs)


def _run_eagerly(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    return make_boxed_func(graph)


def _copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy with the same nodes and names; node metadata and tensors are shared."""
    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, nodes)


def _copy_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def trace_pre_dispatch(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> torch.fx.GraphModule:
    """Trace `gm` to ATen ops before autograd and decompositions (pre-dispatch)."""
    inputs = _fake_inputs(gm, example_inputs)

    def run(*args: Any) -> Any:
        return torch.fx.Interpreter(gm).run(*args)

    # Tracing runs the graph: real inputs that it mutates would be mutated once more.
    fake_mode = detect_fake_mode(inputs)
    mode: Literal["real", "fake"] = "fake" if fake_mode is None else "real"
    trace = make_fx(run, tracing_mode=mode, pre_dispatch=True, _allow_non_fake_inputs=True)
    with enable_python_dispatcher(), _fake_mode_for_new_tensors(fake_mode):
        traced: torch.fx.GraphModule = trace(*inputs)
    return traced


@contextmanager
def _fake_mode_for_new_tensors(fake_mode: Any) -> Iterator[None]:
    """Make tensors that the graph creates fake too, since fake and real ones do not mix."""
    if fake_mode is None:
        yield
        return
    before, fake_mode.allow_non_fake_inputs = fake_mode.allow_non_fake_inputs, True
    try:
        with fake_mode:
            yield
    finally:
        fake_mode.allow_non_fake_inputs = before


def _fake_inputs(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """The fake inputs that dynamo traced with; `example_inputs` if dynamo did not make `gm`."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if all("example_value" in node.meta for node in placeholders):
        return [node.meta["example_value"] for node in placeholders]
    return list(example_inputs)


invoke_subgraph_infer = find_name(
    "torch._higher_order_ops.invoke_subgraph.invoke_subgraph_infer",
    "keep a compiled graph a single call when it is traced",
)


def call_as_subgraph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """Wrap `gm` in the higher-order op `invoke_subgraph`, which stays a single call in traces."""

    def invoke(*operands: Any) -> Any:
        return invoke_subgraph_infer(gm, *operands)

    # Dynamo may trace a call of this function; it must not trace into it.
    return as_boxed(torch.compiler.disable(torch.compiler.allow_in_graph(invoke)))
