"""Judges a compiled fragment: compiles it, runs it, and compares it with eager execution.

Crashes and hangs are for whoever runs this in another process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
_NUM_AT_A_GLANCE = 3  # runs with other roundings
_MAX_REPLACED = 50  # values that are tried one after the other
_SAME_DRAWS = {"fallback_random": True}  # inductor's: draw as eager execution does


def judge(
    fragment: Fragment, compiler: Compiler, *, announce: Announce = say_nothing, seed: int = 0
) -> Outcome:
    """Compile a fragment, run it, and say how it compares with eager execution."""
    return Judge(fragment, seed=seed).judge(compiler, announce=announce)


def glance(
    fragment: Fragment, compiler: Compiler, *, announce: Announce = say_nothing
) -> tuple[Outcome, dict[str, Any]]:
    """Run forward once what is known to be wrong, and list the outputs that are, in order."""
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
    """The first node whose wrong value makes the graph's results wrong, when all else is right."""
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
    """Whether a graph's results are wrong where some of its nodes give these values."""
    try:
        found = runs.run(lambda inputs: _Replacing(fragment.graph, values).run(*inputs))
    except Exception:  # noqa: BLE001 - wrong values may lead anywhere
        return True
    return weigh(found, runs).is_bad


@final
class _Replacing(fx.Interpreter):
    """Runs a graph with values of others in place of what some nodes compute."""

    def __init__(self, graph: fx.GraphModule, values: Mapping[str, Any]) -> None:
        super().__init__(graph)
        self._values = values

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return self._values.get(n.name, result)


@final
class Judge:
    """Holds the eager runs of a fragment, so that a further compiler costs little."""

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
        """What is right at first may be wrong from the second run on, as CUDA graphs may be."""
        try:
            again = trial.run()
        except TrialFailure as failure:
            fact = f"it fails when it is run again: {failure.outcome.fact}"
            return replace(failure.outcome, condition=Condition.NONDETERMINISTIC, fact=fact)
        return weigh_second(outcome, first, again, _with_unchanged(self._runs, again))

    def _judge_draws(self, compiler: Compiler, outcome: Outcome) -> Outcome | None:
        """What is left of a difference when both draw the same numbers; None if it says nothing."""
        drawn = Outcome(Condition.RNG, f"only what it draws at random differs: {outcome.fact}")
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
    """The backend, with the arguments that torch.compile would hand it."""
    try:
        return find_backend(
            compiler.backend,
            options=compiler.options,
            mode=compiler.mode,
            dynamic=compiler.dynamic,
        )
    except Exception as error:
        raise CompileError(
            f"the backend {compiler.name} cannot be used ({say_error(error)}). "
            "Check its name, mode and options."
        ) from error


@final
class TrialFailure(Exception):  # noqa: N818 - it carries an outcome
    """What ends a trial: something was raised, and that is its outcome."""

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
            if not callable(compiled):  # in dynamo's words, which a script will meet
                raise AssertionError("compiler_fn did not return callable")
        except BackendError:
            raise  # of who asked for options that it does not have
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
        # As torch.compile calls it: whether or not it says that it is boxed.
        return self.compiled(*inputs)

    def _say(self, phase: str) -> None:
        self.phase = phase
        self.announce(phase)

    def _begin_compiling(self, is_backward: bool) -> None:
        """What is compiled when it is first run has as long as what is compiled before."""
        self.announce(name_compiling(is_backward))

    def _end_compiling(self) -> None:
        self.announce(self.phase)


def name_compiling(is_backward: bool) -> str:
    """The phase in which a forward or backward is compiled."""
    return "compiling backward" if is_backward else "compiling"


def _compile(fragment: Fragment, backend: Callable[..., Any]) -> Any:
    """What a backend makes of a graph; of one with open sizes what dynamo has it make."""
    if fragment.has_open_sizes and _is_traceable(fragment):
        return _compile_open(fragment, backend)
    return backend(copy.deepcopy(fragment.graph), copy_inputs(fragment.inputs))


def _is_traceable(fragment: Fragment) -> bool:
    """Whether dynamo gets through one of its own graphs, which may have what nobody writes."""
    try:
        _compile_open(fragment, run_as_it_is)(*copy_inputs(fragment.inputs))
    except Exception:  # noqa: BLE001 - sizes are numbers then, as they are in this call
        return False
    return True


def _compile_open(fragment: Fragment, backend: Callable[..., Any]) -> Any:
    """The graph with symbols for its sizes, which dynamo makes when it is called."""
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
    """Eager runs, to which belong inputs that they left alone and a compiled run did not."""

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
