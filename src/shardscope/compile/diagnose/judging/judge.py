"""Compiles a fragment, runs it, and compares its results with eager execution.

Crashes and hangs end or block the process: callers run this in a worker process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, final

import torch
from torch import fx

from shardscope._torch.compiling import (
    find_backend,
    is_compiling,
    patched_inductor,
    watched_compiles,
)
from shardscope._torch.random_state import preserved_random_state
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.judging.chance import take_out_draws
from shardscope.compile.diagnose.judging.copies import copy_inputs
from shardscope.compile.diagnose.judging.reference import FragmentRuns, say_error
from shardscope.compile.diagnose.judging.runs import Announce, Result, say_nothing
from shardscope.compile.diagnose.judging.weigh import (
    list_wrong,
    weigh,
    weigh_again,
    weigh_second,
)
from shardscope.compile.diagnose.outcome import Outcome, find_cause, make_signature, message_of
from shardscope.compile.diagnose.searching.hints import find_hints
from shardscope.compile.diagnose.suspects import find_failing_line
from shardscope.compile.explain.explain import run_as_it_is
from shardscope.errors import BackendError, CompileError
from shardscope.record import Condition, Phase

__all__ = [
    "Judge",
    "TrialFailure",
    "describe_error",
    "describe_text",
    "find_reaching",
    "glance",
    "judge",
    "name_compiling",
    "reaches",
    "resolve",
]

_BY_VALUES = (Condition.WRONG_RESULT, Condition.NAN)
_MESSAGE = 4000  # characters of an error that are kept
_NUM_AT_A_GLANCE = 3  # runs with perturbed rounding
_MAX_REPLACED = 50  # values that are tried one after the other
_SAME_DRAWS = {"fallback_random": True}  # inductor's: draw as eager execution does


def judge(
    fragment: Fragment, compiler: Compiler, *, announce: Announce = say_nothing, seed: int = 0
) -> Outcome:
    """Compile a fragment, run it, and return how it compares with eager execution."""
    return Judge(fragment, seed=seed).judge(compiler, announce=announce)


def glance(
    fragment: Fragment, compiler: Compiler, *, announce: Announce = say_nothing
) -> tuple[Outcome, dict[str, Any]]:
    """Run the forward of a wrong fragment once, and list its wrong outputs in order."""
    runs = FragmentRuns(fragment, pulls_back=False, max_others=_NUM_AT_A_GLANCE)
    with preserved_random_state(), patched_inductor(compiler.config):
        _ = runs.eager
        try:
            found = _Trial.make(runs, resolve(compiler), announce).run()
        except TrialFailure as failure:
            return failure.outcome, {}
        wrong = list_wrong(found, runs)
        # An output that is missing has no value that could show where the fault is.
        return weigh(found, runs), {
            name: found.values[name] for name in wrong if name in found.values
        }


def find_reaching(fragment: Fragment, values: Mapping[str, Any]) -> str:
    """The first node whose value alone, put into the eager graph, makes its results wrong."""
    runs = FragmentRuns(fragment, pulls_back=False, max_others=_NUM_AT_A_GLANCE)
    with preserved_random_state():
        for name, value in list(values.items())[:_MAX_REPLACED]:
            if _is_wrong_with(fragment, runs, {name: value}):
                return name
    return ""


def reaches(
    fragment: Fragment, part: Fragment, compiler: Compiler, *, announce: Announce = say_nothing
) -> bool:
    """Whether what a compiled part of a graph gets wrong makes the graph's results wrong.

    True also where that cannot be determined, because the part raises or lacks an output.
    """
    runs = FragmentRuns(part, pulls_back=False)
    with preserved_random_state(), patched_inductor(compiler.config):
        try:
            found = _Trial.make(runs, resolve(compiler), announce).run()
        except TrialFailure:
            return True
        (last,) = part.graph.graph.find_nodes(op="output")
        names = {
            f"output {place}": node.name
            for place, node in enumerate(last.args[0])
            if isinstance(node, torch.fx.Node)
        }
        if not names.keys() <= found.values.keys():  # a missing value says nothing
            return True
        values = {node: found.values[output] for output, node in names.items()}
        whole = FragmentRuns(fragment, pulls_back=False, max_others=_NUM_AT_A_GLANCE)
        return _is_wrong_with(fragment, whole, values)


def _is_wrong_with(fragment: Fragment, runs: FragmentRuns, values: Mapping[str, Any]) -> bool:
    """Whether the graph's results are wrong if some of its nodes are replaced by these values."""
    try:
        found = runs.run(lambda inputs: _Replacing(fragment.graph, values).run(*inputs))
    except Exception:  # noqa: BLE001 - wrong values may lead anywhere
        return True
    return weigh(found, runs).is_bad


@final
class _Replacing(fx.Interpreter):
    """Runs a graph with given values in place of the results of some nodes."""

    def __init__(self, graph: fx.GraphModule, values: Mapping[str, Any]) -> None:
        super().__init__(graph)
        self._values = values

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return self._values.get(n.name, result)


@final
class Judge:
    """Compares compilers on one fragment, whose eager runs are made once."""

    def __init__(self, fragment: Fragment, *, seed: int = 0) -> None:
        self._seed = seed
        self._runs = FragmentRuns(fragment, seed=seed)

    def judge(self, compiler: Compiler, *, announce: Announce = say_nothing) -> Outcome:
        """The outcome of one compiler. Raises CompileError if the fragment itself fails."""
        backend = resolve(compiler)
        with preserved_random_state():
            _ = self._runs.eager
            with patched_inductor(compiler.config):
                try:
                    trial = _Trial.make(self._runs, backend, announce)
                    first = trial.run()
                except TrialFailure as failure:
                    return failure.outcome
                return self._weigh(trial, first, compiler)

    def _weigh(self, trial: _Trial, first: Result, compiler: Compiler) -> Outcome:
        runs = _with_unchanged(self._runs, first)
        outcome = weigh(first, runs)
        if outcome.condition not in _BY_VALUES:
            return outcome if outcome.is_bad else self._weigh_second(trial, first, outcome)
        if self._runs.has_draws:
            rest = self._judge_draws(compiler, outcome)
            if rest is not None:
                return rest
        try:
            return weigh_again(outcome, first, trial.run, runs)
        except TrialFailure as failure:
            fact = f"it fails when it is run again; at first {outcome.fact}"
            return replace(failure.outcome, condition=Condition.NONDETERMINISTIC, fact=fact)

    def _weigh_second(self, trial: _Trial, first: Result, outcome: Outcome) -> Outcome:
        """Compare a second run: CUDA graphs, for example, may be wrong from the second run on."""
        try:
            again = trial.run()
        except TrialFailure as failure:
            fact = f"it fails when it is run again: {failure.outcome.fact}"
            return replace(failure.outcome, condition=Condition.NONDETERMINISTIC, fact=fact)
        return weigh_second(outcome, first, again, _with_unchanged(self._runs, again))

    def _judge_draws(self, compiler: Compiler, outcome: Outcome) -> Outcome | None:
        """The outcome if both draw the same random numbers; None if that cannot be arranged."""
        drawn = Outcome(Condition.RNG, f"only its random numbers differ: {outcome.fact}")
        if compiler.backend == "inductor" and not compiler.config.get("fallback_random"):
            config = {**compiler.config, **_SAME_DRAWS}
            found = self.judge(replace(compiler, config=config))
        else:
            rest = take_out_draws(self._runs.fragment, seed=self._seed)
            if rest is None:
                return None
            found = Judge(rest, seed=self._seed).judge(compiler)
        return replace(outcome, fact=found.fact) if found.is_bad else drawn


def resolve(compiler: Compiler) -> Callable[..., Any]:
    """The backend as a function, with the arguments that torch.compile would pass to it."""
    try:
        return find_backend(
            compiler.backend,
            options=compiler.options,
            mode=compiler.mode,
            dynamic=compiler.dynamic,
        )
    except Exception as error:
        known = torch.compiler.list_backends(exclude_tags=())
        near = get_close_matches(compiler.name, [] if compiler.name in known else known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Check its name, mode and options."
        raise CompileError(
            f"the backend {compiler.name} cannot be used ({say_error(error).rstrip('.')}). {hint}"
        ) from error


@final
class TrialFailure(Exception):  # noqa: N818 - it carries an outcome
    """Ends a trial with the outcome of an error that was raised."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.fact)
        self.outcome = outcome


@final
@dataclass
class _Trial:
    """A compiled fragment, and how to run it."""

    runs: FragmentRuns
    compiled: Callable[..., Any]
    announce: Announce
    phase: str = "running"

    @classmethod
    def make(cls, runs: FragmentRuns, backend: Callable[..., Any], announce: Announce) -> _Trial:
        """Compile, as torch.compile would; raises TrialFailure."""
        announce("compiling")
        fragment = runs.fragment
        try:
            with torch.set_grad_enabled(fragment.with_gradients):
                compiled = _compile(fragment, backend)
            if not callable(compiled):  # dynamo's message, which a script will show
                raise AssertionError("compiler_fn did not return callable")
        except BackendError:
            raise  # unknown options are the caller's mistake
        except (Exception, SystemExit) as error:
            raise TrialFailure(describe_error(error, "compiling")) from error
        return cls(runs, compiled, announce)

    def run(self) -> Result:
        """Run what was compiled; raises TrialFailure."""
        self._say("running")
        try:
            with watched_compiles(self._begin_compiling, self._end_compiling):
                return self.runs.run(self._call, announce=self._say)
        except (Exception, SystemExit) as error:
            raise TrialFailure(describe_error(error, self.phase)) from error

    def _call(self, inputs: Sequence[Any]) -> Any:
        # As torch.compile calls it, whether or not it has the boxed calling convention.
        return self.compiled(*inputs)

    def _say(self, phase: str) -> None:
        self.phase = phase
        self.announce(phase)

    def _begin_compiling(self, is_backward: bool) -> None:
        """Lazy compilation during a run has the time limit of a compilation."""
        self.announce(name_compiling(is_backward))

    def _end_compiling(self) -> None:
        self.announce(self.phase)


def name_compiling(is_backward: bool) -> str:
    """The phase in which a forward or backward is compiled."""
    return "compiling backward" if is_backward else "compiling"


def _compile(fragment: Fragment, backend: Callable[..., Any]) -> Any:
    """The compiled graph; one with symbolic sizes is compiled through dynamo."""
    if fragment.has_open_sizes and _is_traceable(fragment):
        return _compile_open(fragment, backend)
    return backend(copy.deepcopy(fragment.graph), copy_inputs(fragment.inputs))


def _is_traceable(fragment: Fragment) -> bool:
    """Whether dynamo can trace one of its own graphs, which may contain private ops."""
    try:
        _compile_open(fragment, run_as_it_is)(*copy_inputs(fragment.inputs))
    except Exception:  # noqa: BLE001 - then it is compiled with the fixed sizes of this call
        return False
    return True


def _compile_open(fragment: Fragment, backend: Callable[..., Any]) -> Any:
    """The graph compiled with symbolic sizes, which dynamo creates in the first call."""
    torch.compiler.reset()
    return torch.compile(
        copy.deepcopy(fragment.graph), backend=backend, dynamic=True, fullgraph=True
    )


def describe_error(error: BaseException, phase: str) -> Outcome:
    """The outcome of an error in a phase: compiling, running or backward."""
    is_compile_error = phase == "compiling" or is_compiling(error)
    cause = find_cause(error)
    return Outcome(
        Condition.COMPILE_ERROR if is_compile_error else Condition.RUNTIME_ERROR,
        f"{'compiling' if is_compile_error else 'running'} it fails: {say_error(cause)}",
        Phase.BACKWARD if phase == "backward" else Phase.FORWARD,
        error=describe_text(cause),
        signature=make_signature(error),
        hints=find_hints(cause),
        suspects=find_failing_line(error),
    )


def describe_text(error: BaseException) -> str:
    """The type and the message of an error."""
    return f"{type(error).__name__}: {message_of(error)}"[:_MESSAGE]


@final
@dataclass(frozen=True)
class _Completed:
    """Eager runs, completed by inputs that only a compiled run has changed."""

    runs: FragmentRuns
    result: Result

    @property
    def eager(self) -> Result:
        return self._add(self.runs.eager)

    @property
    def exact(self) -> Result | None:
        exact = self.runs.exact
        return None if exact is None else self._add(exact)

    def run_others(self, count: int) -> Sequence[Result]:
        return self.runs.run_others(count)

    def run_again(self, count: int) -> Sequence[Result]:
        return [self._add(one) for one in self.runs.run_again(count)]

    def _add(self, result: Result) -> Result:
        unchanged = self.runs.unchanged(self.result)
        return Result({**unchanged, **result.values}, result.gradients) if unchanged else result


def _with_unchanged(runs: FragmentRuns, result: Result) -> _Completed:
    return _Completed(runs, result)
