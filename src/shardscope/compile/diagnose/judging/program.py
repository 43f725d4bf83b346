"""Judges a whole function through torch.compile, as the user calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from shardscope._torch.compiling import flatten, patched_inductor, watched_backend
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.judging.holdings import find_modules, find_tensors
from shardscope.compile.diagnose.judging.judge import describe_error, resolve
from shardscope.compile.diagnose.judging.reference import say_error
from shardscope.compile.diagnose.judging.runs import (
    Announce,
    Result,
    pull_back,
    say_nothing,
    settle_device,
)
from shardscope.compile.diagnose.judging.weigh import weigh, weigh_again
from shardscope.compile.diagnose.outcome import Outcome
from shardscope.errors import CompileError, ShardscopeError
from shardscope.numerics.draws import Watching
from shardscope.numerics.rounding import RandomRounding
from shardscope.numerics.widen import main_dtype, widen_inputs, widen_model, widened
from shardscope.record import Condition
from shardscope.shard.reference import kept_random_state

__all__ = ["Make", "ProgramRuns", "judge_program"]

Program = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Make = Callable[[], Program]
"""Makes a function and its arguments anew, the same each time and sharing nothing."""


def judge_program(
    make: Make, compiler: Compiler, *, announce: Announce = say_nothing, seed: int = 0
) -> Outcome:
    """Compile a function, run it, and say how it compares with eager execution.

    Resets dynamo before and after: for a process that compiles nothing else.
    """
    runs = ProgramRuns(make, seed=seed)
    with kept_random_state():
        _ = runs.eager
        return _judge(runs, compiler, announce)


def _judge(runs: ProgramRuns, compiler: Compiler, announce: Announce) -> Outcome:
    trial = _Trial(runs, compiler, announce)
    try:
        with patched_inductor(compiler.config):
            return _weigh(trial, trial.run(), compiler)
    except ShardscopeError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is the outcome
        return describe_error(error, trial.phase)
    finally:
        torch.compiler.reset()


def _weigh(trial: _Trial, first: Result, compiler: Compiler) -> Outcome:
    outcome = weigh(first, trial.runs)
    if outcome.condition not in (Condition.WRONG_RESULT, Condition.NAN):
        return outcome
    if trial.runs.has_draws and _is_right_but_for_draws(trial.runs, compiler):
        return Outcome(Condition.RNG, f"only what it draws at random differs: {outcome.fact}")
    return weigh_again(outcome, first, trial.run, trial.runs)


def _is_right_but_for_draws(runs: ProgramRuns, compiler: Compiler) -> bool:
    """Whether inductor is right when it draws as eager execution does; of others nobody knows."""
    if compiler.backend != "inductor" or compiler.config.get("fallback_random"):
        return False
    config = {**compiler.config, "fallback_random": True}
    return not _judge(runs, replace(compiler, config=config), say_nothing).is_bad


@final
class _Trial:
    """A function compiled, each time anew, and where it is at."""

    def __init__(self, runs: ProgramRuns, compiler: Compiler, announce: Announce) -> None:
        self.runs = runs
        self._compiler = compiler
        self._announce = announce
        self._backend = resolve(compiler)
        self.phase = "compiling"

    def run(self) -> Result:
        """Compile and run a fresh copy."""
        torch.compiler.reset()
        self._say("compiling")
        backend = watched_backend(self._backend, self._say)

        def compile(function: Callable[..., Any]) -> Callable[..., Any]:
            made: Callable[..., Any] = torch.compile(
                function, backend=backend, dynamic=self._compiler.dynamic
            )
            return made

        return self.runs.run(compile, announce=self._say)

    def _say(self, phase: str) -> None:
        self.phase = phase
        self._announce(phase)


@final
class ProgramRuns:
    """A function's eager runs, each on a copy of its own."""

    def __init__(self, make: Make, *, seed: int = 0) -> None:
        self._make = make
        self._seed = seed
        self._others: list[Result] = []
        self._again: list[Result] = []
        self._is_roundable = True

    @cached_property
    def eager(self) -> Result:
        """As it is."""
        try:
            return self.run()
        except Exception as error:
            raise CompileError(
                f"the function itself fails in eager mode ({say_error(error)}). Fix that first."
            ) from error

    @cached_property
    def exact(self) -> Result | None:
        """In double precision; None where a kernel does not know it."""
        try:
            return self.run(is_exact=True)
        except Exception:  # noqa: BLE001 - whatever it is, eager execution alone goes on
            return None

    @cached_property
    def has_draws(self) -> bool:
        """Whether anything is drawn at random."""
        watching = Watching()
        self.run(context=watching)
        return watching.has_drawn

    def run_others(self, count: int) -> Sequence[Result]:
        """So many with other roundings, or as many as there can be."""
        while len(self._others) < count and self._is_roundable:
            try:
                self._others.append(self.run(context=RandomRounding(len(self._others) + 1)))
            except Exception:  # noqa: BLE001 - other numbers may lead where the program fails
                self._is_roundable = False
        return self._others[:count]

    def run_again(self, count: int) -> Sequence[Result]:
        """So many as it is."""
        while len(self._again) < count:
            self._again.append(self.run())
        return self._again[:count]

    def run(
        self,
        compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        *,
        context: AbstractContextManager[Any] | None = None,
        is_exact: bool = False,
        announce: Announce = say_nothing,
    ) -> Result:
        """Make the function, and run it, compiled if so."""
        function, args, kwargs = self._make()
        if is_exact:
            context = widened(_find_dtype(function, args, kwargs))
            for module in find_modules((function, args, kwargs)):
                widen_model(module)
            args, kwargs = widen_inputs((args, kwargs))
        torch.manual_seed(self._seed)
        with context or nullcontext():
            call = function if compile is None else compile(function)
            outputs = call(*args, **kwargs)
            settle_device()
            return _collect(outputs, (function, args, kwargs), announce)


def _collect(outputs: Any, program: Program, announce: Announce) -> Result:
    """What a run gave and changed, with gradients, be they the function's own or ours."""
    held = _name_held(program)
    named = dict(_name_outputs(outputs))
    values = {name: _keep(one) for name, one in named.items()}
    values |= {f"{name}, after the call": _keep(one) for name, one in held.items()}
    gradients = {
        f"gradient of {name}": one.grad.detach()
        for name, one in held.items()
        if one.is_leaf and one.grad is not None
    }
    announce("backward")
    leaves = {name: one for name, one in held.items() if one.is_leaf and one.requires_grad}
    pulled = {} if gradients else pull_back(named, leaves)
    settle_device()
    return Result(values, gradients | pulled)


def _name_outputs(outputs: Any) -> Iterator[tuple[str, Any]]:
    """Whatever it returns, and the tensors in objects of the user's."""
    for path, one in flatten(outputs):
        name = f"output {path}".strip()
        yield name, one
        if not isinstance(one, Tensor) and not callable(one):
            yield from ((f"{name}.{inner}", held) for inner, held in find_tensors(one).items())


def _name_held(program: Program) -> dict[str, Tensor]:
    function, args, kwargs = program
    found = find_tensors(function)
    seen = set(map(id, found.values()))
    given = {f"argument {name}": one for name, one in find_tensors(args).items()}
    given |= {f"argument {name}": one for name, one in find_tensors(kwargs).items()}
    return found | {name: one for name, one in given.items() if id(one) not in seen}


def _keep(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _find_dtype(*parts: Any) -> torch.dtype:
    modules = find_modules(parts)
    if modules:
        return main_dtype(modules[0])
    floats = [one.dtype for one in find_tensors(parts).values() if one.is_floating_point()]
    return max(set(floats), key=floats.count, default=torch.get_default_dtype())
