"""Checks a subgraph with parts of the compiler disabled, and records what the compiler did.

The process that compiles reports each part before it is applied, so that a crash or hang can be
attributed to the last one.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import fx

from shardscope._torch.aot import (
    AotRun,
    AotStep,
    Compile,
    CompilerInput,
    call_compiled,
    watched_aot,
)
from shardscope._torch.dispatch import is_overload
from shardscope._torch.inductor import (
    asked_for_parts,
    generated_code,
    inductor_settings,
    without_caches,
)
from shardscope._torch.random_state import seed_torch
from shardscope.compile.diagnose.accuracy import Application, CheckResult, CompilerLog
from shardscope.compile.diagnose.stage_bisect.bisect import (
    DECOMPOSITIONS,
    StageFinding,
    StageToggles,
    is_by_numbers,
    name_application,
)
from shardscope.compile.diagnose.subgraph import Compiler, Subgraph
from shardscope.record import Phase, Stage

_SEED = 17


def list_ops(aot: AotRun, *, is_backward: bool) -> Iterator[tuple[str, str]]:
    """Node names and ops of the graphs that AOT autograd passed to compilers, forward or
    backward.
    """
    for compiler_input in aot.handed:
        if compiler_input.is_backward == is_backward:
            for node in compiler_input.graph.graph.nodes:
                if _can_be_compiled_alone(node):
                    yield node.name, str(node.target)


def _can_be_compiled_alone(node: fx.Node) -> bool:
    return node.op == "call_function" and is_overload(node.target) and "val" in node.meta


def compile_apart(names: Collection[str], *, is_backward: bool) -> Callable[..., Any]:
    """A compile function that compiles the named ops, each as its own graph, and runs the rest."""

    def compile_graph(
        own: Compile, graph: fx.GraphModule, example_inputs: Sequence[Any], goes_back: bool
    ) -> Any:
        compiled = {
            node.name: own(*_make_graph(node))
            for node in graph.graph.nodes
            if goes_back == is_backward and node.name in names and _can_be_compiled_alone(node)
        }
        return _PartlyCompiled(graph, compiled).run

    return compile_graph


def _make_graph(node: fx.Node) -> tuple[fx.GraphModule, list[Any]]:
    """A graph of one op with placeholders for its arguments, and example values for them."""
    graph = fx.Graph()
    copies = {}
    for source in node.all_input_nodes:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta.update(source.meta)
    result = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(_take_outputs(graph, result)))
    return fx.GraphModule({}, graph), [source.meta["val"] for source in node.all_input_nodes]


def _take_outputs(graph: fx.Graph, result: fx.Node) -> list[fx.Node]:
    values = result.meta["val"]
    if not isinstance(values, tuple | list):
        return [result]
    outputs = [
        graph.call_function(operator.getitem, (result, index)) for index in range(len(values))
    ]
    for node, value in zip(outputs, values, strict=True):
        node.meta["val"] = value
    return outputs


@final
class _PartlyCompiled(fx.Interpreter):
    """Runs a graph in which compiled graphs replace some of the ops, by node name."""

    def __init__(self, graph: fx.GraphModule, compiled: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(graph)
        self._compiled = compiled

    def run_node(self, n: fx.Node) -> Any:
        if n.name not in self._compiled:
            return super().run_node(n)
        args = [self.env[source] for source in n.all_input_nodes]
        values = call_compiled(self._compiled[n.name], args)
        return tuple(values) if isinstance(n.meta["val"], tuple | list) else values[0]


def _compute(graph: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """The value of each node of a graph; for placeholders, the inputs before the run."""
    recorder = _ValueRecorder(graph)
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    with torch.random.fork_rng(), torch.no_grad():
        seed_torch(_SEED)
        recorder.run(*copies)
    return recorder.values | dict(zip(_placeholders(graph), inputs, strict=True))


@final
class _ValueRecorder(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = value = super().run_node(n)
        return value


def find_changed_op(aot: AotRun) -> str:
    """The first op of forward or backward whose value differs from the joint graph's."""
    # If the backend was called more than once, the last call counts.
    graphs = [graph for graph in aot.handed if graph.inputs is not None][-2:]
    joint = _compute_joint(aot.joint, graphs)
    changed = [op for compiler_input in graphs for op in _changed_ops(compiler_input, joint)]
    return changed[0] if joint and changed else ""


def _compute_joint(joint: fx.GraphModule | None, graphs: Sequence[CompilerInput]) -> dict[str, Any]:
    """The value of each node of the joint graph, for the inputs of forward and backward."""
    if joint is None:
        return {}
    inputs = {
        node.name: value
        for compiler_input in graphs
        for node, value in zip(
            _placeholders(compiler_input.graph), compiler_input.inputs or (), strict=False
        )
    }
    names = [node.name for node in _placeholders(joint)]
    if not all(name in inputs for name in names):
        return {}
    values = _compute(joint, [inputs[name] for name in names])
    return {node.name: value for node, value in values.items()}


def _changed_ops(compiler_input: CompilerInput, joint: Mapping[str, Any]) -> Iterator[str]:
    assert compiler_input.inputs is not None
    direction = "backward" if compiler_input.is_backward else "forward"
    for node, value in _compute(compiler_input.graph, compiler_input.inputs).items():
        if node.op != "call_function" or not is_overload(node.target):
            continue
        if node.name not in joint:
            inputs = [str(source.target) for source in node.all_input_nodes]
            yield f"{node.target} that was added after {', '.join(inputs)} in the {direction} graph"
        elif not _is_equal(value, joint[node.name]):
            yield f"{node.target} in the {direction} graph"


def _is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return len(left) == len(right) and all(map(_is_equal, left, right))
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        is_same_kind = (left.shape, left.dtype) == (right.shape, right.dtype)
        return is_same_kind and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
    return type(left) is type(right)


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


AccuracyCheck = Callable[[Subgraph, Compiler], CheckResult]

_SIGN_OF_INDUCTOR = "pre_grad_graph"  # requested once per graph, by Inductor only
_KERNEL = re.compile(r"^(\w+) = async_compile\.", re.MULTILINE)


def check_with_parts_disabled(
    subgraph: Subgraph,
    compiler: Compiler,
    toggles: StageToggles,
    *,
    check_accuracy: AccuracyCheck,
    phase: Phase,
) -> CheckResult:
    """Check a subgraph with these toggles, without caches; the result has a log.

    `phase` is the phase in which the subgraph is known to fail.
    """
    is_backward = phase is Phase.BACKWARD
    observer = _Observer(toggles)
    aot = observer.aot
    if toggles.apart is not None:
        aot.compile_with = compile_apart(toggles.apart, is_backward=is_backward)
    if toggles.backend is not None:
        compiler = Compiler(toggles.backend)
    with ExitStack() as stack:
        stack.enter_context(watched_aot(aot))
        stack.enter_context(asked_for_parts(observer.may_apply))
        stack.enter_context(without_caches())
        # Without Inductor settings Inductor need not be loaded, which takes seconds.
        if toggles.settings:
            stack.enter_context(inductor_settings(**toggles.settings))
            stack.enter_context(generated_code(observer.keep_source))
        outcome = check_accuracy(subgraph, compiler)
    ops = tuple(list_ops(aot, is_backward=is_backward))
    changed = find_changed_op(aot) if toggles.wants_changed_op and is_by_numbers(outcome) else ""
    return replace(outcome, log=replace(observer.log(), ops=ops, changed_op=changed))


def applies_to_graph(subsystem: str, step: AotStep) -> bool:
    """Whether a part is applied to the graph, and not to a graph that a pass traces internally."""
    return subsystem != _SIGN_OF_INDUCTOR and (
        subsystem not in DECOMPOSITIONS or step is AotStep.TRACING
    )


@final
class _Observer:
    """Enables and disables compiler parts by the toggles, and records which parts were applied."""

    def __init__(self, toggles: StageToggles) -> None:
        self.aot = AotRun(
            has_own_partition=toggles.has_own_partition,
            has_own_compilers=toggles.has_own_compilers,
            keeps_graphs=toggles.wants_ops or toggles.wants_changed_op,
            on_begin=self._begin,
        )
        self._toggles = toggles
        self._applications: list[Application] = []
        self._kernels: list[tuple[AotStep, str]] = []
        self._is_inductor = False
        self._num_limited = 0

    def may_apply(self, subsystem: str, what: str) -> bool:
        """Whether a part that is about to be applied is enabled."""
        if subsystem == _SIGN_OF_INDUCTOR:
            self._is_inductor = True
            self._start_over()
        if not applies_to_graph(subsystem, self.aot.step):
            return True
        self._applications.append(Application(subsystem, what, self.aot.step))
        if subsystem not in self._toggles.limited:
            return subsystem not in self._toggles.off
        self._num_limited += 1
        return self._num_limited <= self._toggles.limit

    def _begin(self) -> None:
        # Inductor has reported it already, before its own passes.
        if not self._is_inductor:
            self._start_over()

    def _start_over(self) -> None:
        """The check compiles again: only the last compilation counts."""
        self._applications.clear()
        self._num_limited = 0

    def keep_source(self, source: str) -> None:
        """Record the names of kernels in Inductor's generated code."""
        self._kernels += [(self.aot.step, name) for name in _KERNEL.findall(source)]

    def log(self) -> CompilerLog:
        """What was recorded."""
        return CompilerLog(
            is_complete=True,
            num_graphs=self.aot.num_graphs,
            is_inductor=self._is_inductor,
            applications=tuple(self._applications),
            kernels=tuple(self._kernels),
            partition=self.aot.partition,
        )


_STAGES = {
    AotStep.TRACING: Stage.AOT,
    AotStep.PARTITIONING: Stage.PARTITION,
}
_DECOMPOSITION = "decomposition of "


@contextmanager
def reported_stages(report_phase: Callable[[str], None]) -> Iterator[None]:
    """Report each step of AOT autograd, and each part of Inductor that is applied in it."""
    aot = AotRun(on_step=lambda step: report_phase(step.value))

    def may_apply(subsystem: str, what: str) -> bool:
        if applies_to_graph(subsystem, aot.step):
            part = name_application(Application(subsystem, what, aot.step))
            report_phase(f"{aot.step.value}: {part}")
        return True

    with watched_aot(aot), asked_for_parts(may_apply):
        yield


def finding_from_last_phase(last_phase: str) -> StageFinding:
    """The stage of a process that crashed or hung after it reported `last_phase`."""
    step, _, part = last_phase.partition(": ")
    aot_step = {member.value: member for member in AotStep}.get(step)
    stage = _STAGES.get(aot_step, Stage.BACKEND) if aot_step is not None else Stage.BACKEND
    if stage is Stage.AOT and part.startswith(_DECOMPOSITION):
        stage = Stage.DECOMPOSITION
    return StageFinding(stage, part=part, phase=_phase_of(step), notes=_explain(part))


def _phase_of(step: str) -> Phase:
    return Phase.BACKWARD if "backward" in step else Phase.FORWARD


def _explain(part: str) -> tuple[str, ...]:
    return ("The part is the last that was started before the process ended.",) if part else ()
