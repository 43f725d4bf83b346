"""Compiles a graph, runs it, and compares its results with eager execution."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, final

import torch
from torch import Tensor, fx

from shardscope._torch.dynamo import find_backend, patched_inductor, watched_compiles
from shardscope._torch.random_state import preserved_random_state, seed_torch
from shardscope._torch.tree import map_tensor_leaves
from shardscope.compile.diagnose.accuracy.check_result import (
    CheckResult,
    describe_error,
    format_error,
)
from shardscope.compile.diagnose.accuracy.compare import (
    SubgraphRuns,
    check_determinism,
    check_second_run,
    compare_runs,
    list_wrong,
)
from shardscope.compile.diagnose.subgraph import (
    Compiler,
    PhaseCallback,
    RunValues,
    Subgraph,
    copy_inputs,
    ignore_phase,
)
from shardscope.compile.explain.explain import run_as_it_is
from shardscope.errors import BackendError, CompileError
from shardscope.numerics import RngUseMode
from shardscope.record import Condition


def freeze_rng_ops(subgraph: Subgraph, *, seed: int) -> Subgraph | None:
    """The subgraph with each random op replaced by its eager result; None if it has no random op.

    The arguments of a random op become outputs, so that the ops before it are still compared.
    """
    recorder = _RngRecorder(subgraph.graph)
    seed_torch(seed)
    with torch.set_grad_enabled(subgraph.with_gradients):
        recorder.run(*copy_inputs(subgraph.inputs))
    if not recorder.rng_results:
        return None
    graph = fx.Graph()
    has_gradients = subgraph.with_gradients and any(
        isinstance(value, Tensor) and value.requires_grad for value in subgraph.inputs
    )
    freezer = _RngFreezer(graph, recorder.rng_results, has_gradients)
    inputs = freezer.fill(subgraph.graph.graph, subgraph.inputs)
    return replace(subgraph, graph=fx.GraphModule(subgraph.graph, graph), inputs=inputs)


@final
class _RngRecorder(fx.Interpreter):
    """Runs a graph and stores the results of random ops by node name."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.rng_results: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        watching = RngUseMode()
        with watching:
            result = super().run_node(n)
        if watching.has_drawn and n.op.startswith("call_"):
            self.rng_results[n.name] = _detach(result)
        return result


def _detach(value: Any) -> Any:
    return map_tensor_leaves(lambda tensor: tensor.detach().clone(), value)


@final
class _RngFreezer:
    """Copies a graph with placeholders in place of random ops."""

    def __init__(self, graph: fx.Graph, rng_results: dict[str, Any], has_gradients: bool) -> None:
        self._graph = graph
        self._rng_results = rng_results
        self._has_gradients = has_gradients
        self._copies: dict[fx.Node, Any] = {}
        self._rng_arguments: list[fx.Node] = []  # arguments of random ops
        self._added: list[Tensor] = []

    def fill(self, graph: fx.Graph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Copy `graph`, and return the inputs of the copy."""
        for node in graph.nodes:
            if node.op == "placeholder":
                self._copies[node] = self._graph.node_copy(node)
        for name in self._rng_nodes_in(graph):  # placeholders come first
            self._rng_results[name] = self._add_placeholder(name, self._rng_results[name])
        for node in graph.nodes:
            if node.op == "output":
                self._end(node)
            elif node.name in self._rng_results:
                self._skip(node)
            elif node.op != "placeholder":
                self._copy(node)
        self._graph.lint()
        return (*inputs, *self._added)

    def _rng_nodes_in(self, graph: fx.Graph) -> Iterator[str]:
        return (node.name for node in graph.nodes if node.name in self._rng_results)

    def _add_placeholder(self, name: str, value: Any) -> Any:
        """A placeholder for a tensor, or a list of placeholders for the results of an op."""
        if isinstance(value, list | tuple):
            return [
                self._add_placeholder(f"{name}_{index}", item) for index, item in enumerate(value)
            ]
        if not isinstance(value, Tensor):
            return value
        needs_gradient = self._has_gradients and value.is_floating_point()
        self._added.append(value.requires_grad_(needs_gradient))
        return self._graph.placeholder(f"drawn_{name}")

    def _skip(self, node: fx.Node) -> None:
        placed = self._rng_results[node.name]
        for argument in node.all_input_nodes:
            copied = self._copies[argument]
            if isinstance(copied, fx.Node) and copied.op != "placeholder":
                self._rng_arguments.append(copied)
        self._copies[node] = placed
        if _writes(node):  # later nodes read the random numbers from it
            self._copies[node.all_input_nodes[0]] = placed

    def _copy(self, node: fx.Node) -> None:
        source, index = node.args if node.target is operator.getitem else (None, None)
        copied = self._copies.get(source) if isinstance(source, fx.Node) else None
        if isinstance(copied, list) and isinstance(index, int):
            self._copies[node] = copied[index]
        else:
            self._copies[node] = self._graph.node_copy(
                node, lambda argument: self._copies[argument]
            )

    def _end(self, node: fx.Node) -> None:
        returned = node.args[0]
        outputs = list(returned) if isinstance(returned, list | tuple) else [returned]
        copied = [
            self._copies[output] if isinstance(output, fx.Node) else output for output in outputs
        ]
        self._graph.output((*copied, *dict.fromkeys(self._rng_arguments)))


def _writes(node: fx.Node) -> bool:
    """Whether a random op writes into its first argument."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return bool(node.all_input_nodes) and (is_in_place or bool(node.kwargs.get("inplace")))


_BY_VALUES = (Condition.WRONG_RESULT, Condition.NAN)
_NUM_QUICK_RUNS = 3  # runs with perturbed rounding
_MAX_REPLACED = 50  # values that are tried one after the other
_SAME_RANDOM_NUMBERS = {
    "fallback_random": True
}  # Inductor draws the same random numbers as eager execution


def check_accuracy(
    subgraph: Subgraph,
    compiler: Compiler,
    *,
    report_phase: PhaseCallback = ignore_phase,
    seed: int = 0,
) -> CheckResult:
    """Compile a subgraph, run it, and return how it compares with eager execution."""
    return AccuracyChecker(subgraph, seed=seed).check_accuracy(compiler, report_phase=report_phase)


def check_forward_once(
    subgraph: Subgraph, compiler: Compiler, *, report_phase: PhaseCallback = ignore_phase
) -> tuple[CheckResult, dict[str, Any]]:
    """Run the forward of a wrong subgraph once: the outcome and the wrong outputs in order."""
    runs = SubgraphRuns(subgraph, with_backward=False, max_perturbed=_NUM_QUICK_RUNS)
    with preserved_random_state(), patched_inductor(compiler.config):
        _ = runs.eager
        try:
            result = _CompiledRun.make(runs, resolve_backend(compiler), report_phase).run()
        except CompiledRunFailure as failure:
            return failure.outcome, {}
        wrong = list_wrong(result, runs)
        # A missing output has no value that could show where the error is.
        return compare_runs(result, runs), {
            name: result.values[name] for name in wrong if name in result.values
        }


def find_affecting_node(subgraph: Subgraph, values: Mapping[str, Any]) -> str:
    """The first node whose compiled value alone makes the results of the eager graph wrong."""
    runs = SubgraphRuns(subgraph, with_backward=False, max_perturbed=_NUM_QUICK_RUNS)
    with preserved_random_state():
        for name, value in list(values.items())[:_MAX_REPLACED]:
            if _is_wrong_with(subgraph, runs, {name: value}):
                return name
    return ""


def affects_results(
    subgraph: Subgraph,
    part: Subgraph,
    compiler: Compiler,
    *,
    report_phase: PhaseCallback = ignore_phase,
) -> bool:
    """Whether the wrong values of a compiled part of a graph make the graph's results wrong.

    True also if that cannot be determined, because the part raises or lacks an output.
    """
    runs = SubgraphRuns(part, with_backward=False)
    with preserved_random_state(), patched_inductor(compiler.config):
        try:
            result = _CompiledRun.make(runs, resolve_backend(compiler), report_phase).run()
        except CompiledRunFailure:
            return True
        (last,) = part.graph.graph.find_nodes(op="output")
        names = {
            f"output {place}": node.name
            for place, node in enumerate(last.args[0])
            if isinstance(node, torch.fx.Node)
        }
        if not names.keys() <= result.values.keys():  # a missing value shows nothing
            return True
        values = {node: result.values[output] for output, node in names.items()}
        full_runs = SubgraphRuns(subgraph, with_backward=False, max_perturbed=_NUM_QUICK_RUNS)
        return _is_wrong_with(subgraph, full_runs, values)


def _is_wrong_with(subgraph: Subgraph, runs: SubgraphRuns, values: Mapping[str, Any]) -> bool:
    """Whether the graph's results are wrong if these values replace the results of their nodes."""
    try:
        result = runs.run(lambda inputs: _ValueReplacer(subgraph.graph, values).run(*inputs))
    except Exception:  # noqa: BLE001 - wrong values may raise any error
        return True
    return compare_runs(result, runs).is_bad


@final
class _ValueReplacer(fx.Interpreter):
    """Runs a graph with `values` in place of the results of some nodes, by node name."""

    def __init__(self, graph: fx.GraphModule, values: Mapping[str, Any]) -> None:
        super().__init__(graph)
        self._values = values

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return self._values.get(n.name, result)


@final
class AccuracyChecker:
    """Compares compilers on one subgraph, whose eager runs are computed once."""

    def __init__(self, subgraph: Subgraph, *, seed: int = 0) -> None:
        self._seed = seed
        self._runs = SubgraphRuns(subgraph, seed=seed)

    def check_accuracy(
        self, compiler: Compiler, *, report_phase: PhaseCallback = ignore_phase
    ) -> CheckResult:
        """The outcome of one compiler.

        Raises CompileError if the subgraph fails in eager execution.
        """
        backend = resolve_backend(compiler)
        with preserved_random_state():
            _ = self._runs.eager
            with patched_inductor(compiler.config):
                try:
                    compiled_run = _CompiledRun.make(self._runs, backend, report_phase)
                    first = compiled_run.run()
                except CompiledRunFailure as failure:
                    return failure.outcome
                return self._compare_runs(compiled_run, first, compiler)

    def _compare_runs(
        self, compiled_run: _CompiledRun, first: RunValues, compiler: Compiler
    ) -> CheckResult:
        runs = _with_unchanged(self._runs, first)
        outcome = compare_runs(first, runs)
        if outcome.condition not in _BY_VALUES:
            return (
                outcome if outcome.is_bad else self._check_second_run(compiled_run, first, outcome)
            )
        if self._runs.uses_rng:
            frozen_outcome = self._check_without_rng(compiler, outcome)
            if frozen_outcome is not None:
                return frozen_outcome
        try:
            return check_determinism(outcome, first, compiled_run.run, runs)
        except CompiledRunFailure as failure:
            fact = f"it fails when it is run again; at first {outcome.fact}"
            return replace(failure.outcome, condition=Condition.NONDETERMINISTIC, fact=fact)

    def _check_second_run(
        self, compiled_run: _CompiledRun, first: RunValues, outcome: CheckResult
    ) -> CheckResult:
        """Compare a second run: CUDA graphs, for example, may be wrong from the second run on."""
        try:
            again = compiled_run.run()
        except CompiledRunFailure as failure:
            fact = f"it fails when it is run again: {failure.outcome.fact}"
            return replace(failure.outcome, condition=Condition.NONDETERMINISTIC, fact=fact)
        return check_second_run(outcome, first, again, _with_unchanged(self._runs, again))

    def _check_without_rng(self, compiler: Compiler, outcome: CheckResult) -> CheckResult | None:
        """The outcome with equal random numbers in both runs; None if that cannot be arranged."""
        rng_outcome = CheckResult(Condition.RNG, f"only its random numbers differ: {outcome.fact}")
        if compiler.backend == "inductor" and not compiler.config.get("fallback_random"):
            config = {**compiler.config, **_SAME_RANDOM_NUMBERS}
            checked = self.check_accuracy(replace(compiler, config=config))
        else:
            frozen = freeze_rng_ops(self._runs.subgraph, seed=self._seed)
            if frozen is None:
                return None
            checked = AccuracyChecker(frozen, seed=self._seed).check_accuracy(compiler)
        return replace(outcome, fact=checked.fact) if checked.is_bad else rng_outcome


def resolve_backend(compiler: Compiler) -> Callable[..., Any]:
    """The backend as a function, with the arguments that torch.compile would pass to it."""
    try:
        return find_backend(
            compiler.backend,
            options=compiler.options,
            mode=compiler.mode,
            dynamic=compiler.dynamic,
        )
    except Exception as error:
        backends = torch.compiler.list_backends(exclude_tags=())
        near = get_close_matches(compiler.name, [] if compiler.name in backends else backends, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Check its name, mode and options."
        raise CompileError(
            f"the backend {compiler.name} cannot be used ({format_error(error).rstrip('.')}). "
            f"{hint}"
        ) from error


@final
class CompiledRunFailure(Exception):  # noqa: N818 - it carries an outcome
    """Ends a compiled run with the outcome of an error that was raised."""

    def __init__(self, outcome: CheckResult) -> None:
        super().__init__(outcome.fact)
        self.outcome = outcome


@final
@dataclass
class _CompiledRun:
    """A compiled subgraph, and how to run it."""

    runs: SubgraphRuns
    compiled: Callable[..., Any]
    report_phase: PhaseCallback
    phase: str = "running"

    @classmethod
    def make(
        cls, runs: SubgraphRuns, backend: Callable[..., Any], report_phase: PhaseCallback
    ) -> _CompiledRun:
        """Compile as torch.compile does; raises CompiledRunFailure."""
        report_phase("compiling")
        subgraph = runs.subgraph
        try:
            with torch.set_grad_enabled(subgraph.with_gradients):
                compiled = _compile(subgraph, backend)
            if not callable(compiled):  # dynamo's message, which a script will show
                raise AssertionError("compiler_fn did not return callable")
        except BackendError:
            raise  # unknown options are the caller's mistake
        except (Exception, SystemExit) as error:
            raise CompiledRunFailure(describe_error(error, "compiling")) from error
        return cls(runs, compiled, report_phase)

    def run(self) -> RunValues:
        """Run the compiled subgraph; raises CompiledRunFailure."""
        self._enter_phase("running")
        try:
            with watched_compiles(self._begin_compiling, self._end_compiling):
                return self.runs.run(self._call, report_phase=self._enter_phase)
        except (Exception, SystemExit) as error:
            raise CompiledRunFailure(describe_error(error, self.phase)) from error

    def _call(self, inputs: Sequence[Any]) -> Any:
        # As torch.compile calls it, with or without the boxed calling convention.
        return self.compiled(*inputs)

    def _enter_phase(self, phase: str) -> None:
        self.phase = phase
        self.report_phase(phase)

    def _begin_compiling(self, is_backward: bool) -> None:
        """A compilation during a run has the time limit of a compilation."""
        self.report_phase(name_compiling(is_backward))

    def _end_compiling(self) -> None:
        self.report_phase(self.phase)


def name_compiling(is_backward: bool) -> str:
    """The phase in which a forward or backward is compiled."""
    return "compiling backward" if is_backward else "compiling"


def _compile(subgraph: Subgraph, backend: Callable[..., Any]) -> Any:
    """The compiled graph; a graph with symbolic sizes is compiled through dynamo."""
    if subgraph.has_symbolic_sizes and _is_traceable(subgraph):
        return _compile_symbolic(subgraph, backend)
    return backend(copy.deepcopy(subgraph.graph), copy_inputs(subgraph.inputs))


def _is_traceable(subgraph: Subgraph) -> bool:
    """Whether dynamo can trace one of its own graphs, which may contain private ops."""
    try:
        _compile_symbolic(subgraph, run_as_it_is)(*copy_inputs(subgraph.inputs))
    except Exception:  # noqa: BLE001 - then it is compiled with the fixed sizes of this call
        return False
    return True


def _compile_symbolic(subgraph: Subgraph, backend: Callable[..., Any]) -> Any:
    """The graph compiled with symbolic sizes, which dynamo creates in the first call."""
    torch.compiler.reset()
    return torch.compile(
        copy.deepcopy(subgraph.graph), backend=backend, dynamic=True, fullgraph=True
    )


@final
@dataclass(frozen=True)
class _RunsWithUnchangedInputs:
    """Eager runs, completed by the original values of inputs that only the compiled run changed."""

    runs: SubgraphRuns
    result: RunValues

    @property
    def eager(self) -> RunValues:
        return self._add(self.runs.eager)

    @property
    def exact(self) -> RunValues | None:
        exact = self.runs.exact
        return None if exact is None else self._add(exact)

    def run_perturbed(self, count: int) -> Sequence[RunValues]:
        return self.runs.run_perturbed(count)

    def run_again(self, count: int) -> Sequence[RunValues]:
        return [self._add(result) for result in self.runs.run_again(count)]

    def _add(self, result: RunValues) -> RunValues:
        unchanged = self.runs.unchanged(self.result)
        return RunValues({**unchanged, **result.values}, result.gradients) if unchanged else result


def _with_unchanged(runs: SubgraphRuns, result: RunValues) -> _RunsWithUnchangedInputs:
    return _RunsWithUnchangedInputs(runs, result)
