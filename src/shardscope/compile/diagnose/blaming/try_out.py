"""Carries out a trial in this process: patches, a judgement, and what was seen of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import final

from shardscope._torch.aot_stages import AotRun, AotStep, watched_aot
from shardscope._torch.compiler_parts import (
    asked_for_parts,
    generated_code,
    inductor_settings,
    without_caches,
)
from shardscope.compile.diagnose.blaming.aten_ops import compile_apart, find_changed_op, list_ops
from shardscope.compile.diagnose.blaming.switching import (
    DECOMPOSITIONS,
    Application,
    Report,
    Trial,
    is_by_numbers,
)
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.outcome import Outcome
from shardscope.record import Phase

__all__ = ["Judge", "is_of_the_graph", "try_out"]

Judge = Callable[[Fragment, Compiler], Outcome]

_SIGN_OF_INDUCTOR = "pre_grad_graph"  # asked once per graph; without it there is no Inductor
_KERNEL = re.compile(r"^(\w+) = async_compile\.", re.MULTILINE)


def try_out(
    fragment: Fragment, compiler: Compiler, trial: Trial, *, judge: Judge, phase: Phase
) -> Report:
    """Compile and run a fragment as a trial says, nothing of it from a cache.

    `phase` is the one in which the fragment is known to fail.
    """
    is_backward = phase is Phase.BACKWARD
    observer = _Observer(trial)
    aot = observer.aot
    if trial.apart is not None:
        aot.compile_with = compile_apart(trial.apart, is_backward=is_backward)
    if trial.backend is not None:
        compiler = Compiler(trial.backend)
    with ExitStack() as stack:
        stack.enter_context(watched_aot(aot))
        stack.enter_context(asked_for_parts(observer.may_apply))
        stack.enter_context(without_caches())
        # One that has no settings of Inductor's need not load it, which takes seconds.
        if trial.settings:
            stack.enter_context(inductor_settings(**trial.settings))
            stack.enter_context(generated_code(observer.keep_source))
        outcome = judge(fragment, compiler)
    ops = tuple(list_ops(aot, is_backward=is_backward))
    changed = find_changed_op(aot) if trial.wants_changed_op and is_by_numbers(outcome) else ""
    return replace(observer.report(outcome), ops=ops, changed_op=changed)


def is_of_the_graph(subsystem: str, step: AotStep) -> bool:
    """Whether a part is applied to the graph, and not to what a pass traces for itself."""
    return subsystem != _SIGN_OF_INDUCTOR and (
        subsystem not in DECOMPOSITIONS or step is AotStep.TRACING
    )


@final
class _Observer:
    """Grants and refuses parts as a trial says, and keeps what is asked for."""

    def __init__(self, trial: Trial) -> None:
        self.aot = AotRun(
            has_own_partition=trial.has_own_partition,
            has_own_compilers=trial.has_own_compilers,
            keeps_graphs=trial.wants_ops or trial.wants_changed_op,
            on_begin=self._begin,
        )
        self._trial = trial
        self._applications: list[Application] = []
        self._kernels: list[tuple[AotStep, str]] = []
        self._is_inductor = False
        self._num_limited = 0

    def may_apply(self, subsystem: str, what: str) -> bool:
        """Answer for a part that is about to be applied."""
        if subsystem == _SIGN_OF_INDUCTOR:
            self._is_inductor = True
            self._start_over()
        if not is_of_the_graph(subsystem, self.aot.step):
            return True
        self._applications.append(Application(subsystem, what, self.aot.step))
        if subsystem not in self._trial.limited:
            return subsystem not in self._trial.off
        self._num_limited += 1
        return self._num_limited <= self._trial.limit

    def _begin(self) -> None:
        # Inductor has said so itself, before passes of its own.
        if not self._is_inductor:
            self._start_over()

    def _start_over(self) -> None:
        """The judge compiles once more: each time counts for itself."""
        self._applications.clear()
        self._num_limited = 0

    def keep_source(self, source: str) -> None:
        """Keep the names of kernels that Inductor wrote."""
        self._kernels += [(self.aot.step, name) for name in _KERNEL.findall(source)]

    def report(self, outcome: Outcome) -> Report:
        """What was seen."""
        return Report(
            outcome,
            num_graphs=self.aot.num_graphs,
            is_inductor=self._is_inductor,
            applications=tuple(self._applications),
            kernels=tuple(self._kernels),
            partition=self.aot.partition,
        )
