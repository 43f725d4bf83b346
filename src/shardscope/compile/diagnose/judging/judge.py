"""Judges a compiled fragment: compiles it, runs it, and compares it with eager execution.

Crashes and hangs are for whoever runs this in another process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from shardscope._torch.compiling import (
    find_backend,
    is_compiling,
    patched_inductor,
)
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.judging.chance import take_out_draws
from shardscope.compile.diagnose.judging.copies import copy_inputs
from shardscope.compile.diagnose.judging.reference import FragmentRuns, say_error
from shardscope.compile.diagnose.judging.runs import Announce, Result, say_nothing
from shardscope.compile.diagnose.judging.weigh import weigh, weigh_again, weigh_second
from shardscope.compile.diagnose.outcome import Outcome, make_signature, message_of
from shardscope.compile.diagnose.searching.hints import find_hints
from shardscope.errors import BackendError, CompileError
from shardscope.record import Condition, Phase
from shardscope.shard.reference import kept_random_state

__all__ = ["Judge", "describe_error", "glance", "judge", "resolve"]

_BY_VALUES = (Condition.WRONG_RESULT, Condition.NAN)
_MESSAGE = 4000  # characters of an error that are kept
_NUM_AT_A_GLANCE = 3  # runs with other roundings
_SAME_DRAWS = {"fallback_random": True}  # inductor's: draw as eager execution does


def judge(
    fragment: Fragment, compiler: Compiler, *, announce: Announce = say_nothing, seed: int = 0
) -> Outcome:
    """Compile a fragment, run it, and say how it compares with eager execution."""
    return Judge(fragment, seed=seed).judge(compiler, announce=announce)


def glance(fragment: Fragment, compiler: Compiler, *, announce: Announce = say_nothing) -> Outcome:
    """The first output that is off, forward, run once: what is known to be wrong gives a hint."""
    backend = resolve(compiler)
    runs = FragmentRuns(fragment, pulls_back=False, max_others=_NUM_AT_A_GLANCE)
    with kept_random_state(), patched_inductor(compiler.config):
        _ = runs.eager
        try:
            return weigh(_Trial.make(runs, backend, announce).run(), runs)
        except _Failure as failure:
            return failure.outcome


@final
class Judge:
    """Holds the eager runs of a fragment, so that a further compiler costs little."""

    def __init__(self, fragment: Fragment, *, seed: int = 0) -> None:
        self._seed = seed
        self._runs = FragmentRuns(fragment, seed=seed)

    def judge(self, compiler: Compiler, *, announce: Announce = say_nothing) -> Outcome:
        """The outcome of one compiler. Raises CompileError if the fragment itself fails."""
        backend = resolve(compiler)
        with kept_random_state():
            _ = self._runs.eager
            with patched_inductor(compiler.config):
                try:
                    trial = _Trial.make(self._runs, backend, announce)
                    first = trial.run()
                except _Failure as failure:
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
        except _Failure as failure:
            fact = f"it fails when it is run again; at first {outcome.fact}"
            return replace(failure.outcome, condition=Condition.NONDETERMINISTIC, fact=fact)

    def _weigh_second(self, trial: _Trial, first: Result, outcome: Outcome) -> Outcome:
        """What is right at first may be wrong from the second run on, as CUDA graphs may be."""
        try:
            again = trial.run()
        except _Failure as failure:
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
class _Failure(Exception):  # noqa: N818 - it carries an outcome
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
        """Compile, as torch.compile would; raises _Failure."""
        announce("compiling")
        fragment = runs.fragment
        try:
            with torch.set_grad_enabled(fragment.with_gradients):
                compiled = backend(copy.deepcopy(fragment.graph), copy_inputs(fragment.inputs))
            if not callable(compiled):  # in dynamo's words, which a script will meet
                raise AssertionError("compiler_fn did not return callable")
        except BackendError:
            raise  # of who asked for options that it does not have
        except (Exception, SystemExit) as error:
            raise _Failure(describe_error(error, "compiling")) from error
        return cls(runs, compiled, announce)

    def run(self) -> Result:
        """Run what was compiled; raises _Failure."""
        self._say("running")
        try:
            return self.runs.run(self._call, announce=self._say)
        except (Exception, SystemExit) as error:
            raise _Failure(describe_error(error, self.phase)) from error

    def _call(self, inputs: Sequence[Any]) -> Any:
        # As torch.compile calls it: whether or not it says that it is boxed.
        return self.compiled(*inputs)

    def _say(self, phase: str) -> None:
        self.phase = phase
        self.announce(phase)


def describe_error(error: BaseException, phase: str) -> Outcome:
    """The outcome of an error in a phase: compiling, running or backward."""
    is_compile_error = phase == "compiling" or is_compiling(error)
    return Outcome(
        Condition.COMPILE_ERROR if is_compile_error else Condition.RUNTIME_ERROR,
        f"{'compiling' if is_compile_error else 'running'} it fails: {say_error(error)}",
        Phase.BACKWARD if phase == "backward" else Phase.FORWARD,
        error=f"{type(error).__name__}: {message_of(error)}"[:_MESSAGE],
        signature=make_signature(error),
        hints=find_hints(error),
    )


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
