"""Which stage of the compiler is to blame, and which part of it.

The backend itself is run, with the later stages replaced by ones that do nothing of their own: what
AOT autograd hands on is then computed eagerly. The first stage whose graphs fail is to blame.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardscope._torch.aot_stages import AotRun
from shardscope.compile.diagnose.aten_ops import find_changed_op, find_op
from shardscope.compile.diagnose.blame import Blame
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.inductor import locate_in_inductor, name_application
from shardscope.compile.diagnose.outcome import Outcome
from shardscope.compile.diagnose.switching import (
    DECOMPOSITIONS,
    PASSES,
    Judge,
    Switches,
    Trial,
    Trials,
    find_first,
)
from shardscope.record import Stage

__all__ = ["locate_stage"]


def locate_stage(
    fragment: Fragment, compiler: Compiler, *, outcome: Outcome, judge: Judge
) -> Blame:
    """Find the stage in which a fragment fails as `outcome` says; in the process that judges.

    `judge` compiles and runs a fragment in this process. Not for crashes and hangs, of which the
    last announcement tells: see `announcements`.
    """
    trials = Trials(fragment, compiler, failure=outcome, judge=judge)
    eager = trials.run(AotRun(has_own_compilers=False, keeps_graphs=True))
    if not eager.aot.num_traces:
        blame = Blame(Stage.BACKEND, notes=("The backend does not get as far as AOT autograd.",))
    elif trials.fails(eager):
        blame = _locate_before_compilers(trials, eager)
    else:
        blame = _locate_in_backend(trials, eager)
    return replace(blame, phase=outcome.phase)


def _locate_before_compilers(trials: Trials, eager: Trial) -> Blame:
    """What fails though nothing that the backend compiles is run."""
    if trials.fails(_run_traced(trials, off=PASSES)):
        return _locate_in_tracing(trials)
    split = trials.run(AotRun(has_own_compilers=False, keeps_graphs=True), Switches(off=PASSES))
    if not trials.fails(split):
        return _locate_pass(trials, eager)
    op = find_changed_op(split.aot)
    where = f"{op}, in {split.aot.partition}" if op else split.aot.partition
    return Blame(Stage.PARTITION, part=where)


def _run_traced(trials: Trials, **switches: Any) -> Trial:
    """A trial of what is traced, alone."""
    aot = AotRun(has_own_partition=False, has_own_compilers=False)
    return trials.run(aot, Switches(**switches))


def _locate_in_tracing(trials: Trials) -> Blame:
    bare = _run_traced(trials, off=PASSES | DECOMPOSITIONS)
    if not trials.fails(bare):
        return _locate_decomposition(trials)
    if trials.fails_elsewhere(Compiler("aot_eager")):
        return Blame(Stage.AOT)
    note = "AOT autograd alone is right: the backend changes the graph before, or the result after."
    return Blame(Stage.BACKEND, part="outside of AOT autograd", notes=(note,))


def _locate_decomposition(trials: Trials) -> Blame:
    whole = _run_traced(trials, off=PASSES)

    def fails(limit: int) -> bool:
        return trials.fails(_run_traced(trials, off=PASSES, limited=DECOMPOSITIONS, limit=limit))

    applied = whole.applied(DECOMPOSITIONS)
    found = applied[find_first(fails, len(applied)) - 1]
    return Blame(Stage.DECOMPOSITION, part=name_application(found))


def _locate_pass(trials: Trials, eager: Trial) -> Blame:
    """The pass of the backend's own, before or on the joint graph."""

    def fails(limit: int) -> bool:
        aot = AotRun(has_own_compilers=False)
        return trials.fails(trials.run(aot, Switches(limited=PASSES, limit=limit)))

    applied = eager.applied(PASSES)
    found = applied[find_first(fails, len(applied)) - 1]
    return Blame(Stage.BACKEND, part=name_application(found))


def _locate_in_backend(trials: Trials, eager: Trial) -> Blame:
    part, notes = locate_in_inductor(trials) if eager.is_inductor else ("", ())
    if not part:
        part = find_op(trials, eager.aot)
    return Blame(Stage.BACKEND, part=part, notes=notes)
