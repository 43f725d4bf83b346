"""Which stage of the compiler is to blame, and which part of it.

The backend itself is run, with the later stages replaced by ones that do nothing of their own: what
AOT autograd hands on is then computed eagerly. The first stage whose graphs fail is to blame.
"""

from __future__ import annotations

from dataclasses import replace

from shardscope.compile.diagnose.blaming.blame import Blame
from shardscope.compile.diagnose.blaming.inductor import locate_in_inductor, name_application
from shardscope.compile.diagnose.blaming.switching import (
    DECOMPOSITIONS,
    PASSES,
    Ask,
    Report,
    Suspicion,
    Trial,
)
from shardscope.compile.diagnose.blaming.try_out import Judge, try_out
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.outcome import Outcome
from shardscope.record import Stage

__all__ = ["locate_stage", "locate_stage_by"]

_EAGER = Trial(has_own_compilers=False, wants_ops=True)
_SPLIT = Trial(has_own_compilers=False, wants_changed_op=True, off=PASSES)
_TRACED = Trial(has_own_compilers=False, has_own_partition=False, off=PASSES)
_BARE = replace(_TRACED, off=PASSES | DECOMPOSITIONS)


def locate_stage(
    fragment: Fragment, compiler: Compiler, *, outcome: Outcome, judge: Judge
) -> Blame:
    """Find the stage in which a fragment fails as `outcome` says, in this process.

    `judge` compiles and runs a fragment in this process. If that may kill it, see
    `locate_stage_by`.
    """

    def ask(trial: Trial) -> Report:
        return try_out(fragment, compiler, trial, judge=judge, phase=outcome.phase)

    return locate_stage_by(ask, outcome=outcome)


def locate_stage_by(ask: Ask, *, outcome: Outcome) -> Blame:
    """Find the stage by trials that somebody else carries out, with `try_out`.

    Of a process that died of a trial, answer with its outcome and `has_died`.
    """
    suspicion = Suspicion(outcome, ask)
    eager = suspicion.ask(_EAGER)
    if not eager.has_died and not eager.num_graphs:
        blame = Blame(Stage.BACKEND, notes=("The backend does not get as far as AOT autograd.",))
    elif suspicion.holds(eager):
        blame = _locate_before_compilers(suspicion, eager)
    else:
        blame = _locate_in_backend(suspicion, eager)
    return replace(blame, phase=outcome.phase)


def _locate_before_compilers(suspicion: Suspicion, eager: Report) -> Blame:
    """What fails though nothing that the backend compiles is run."""
    traced = suspicion.ask(_TRACED)
    if suspicion.holds(traced):
        return _locate_in_tracing(suspicion, traced)
    split = suspicion.ask(_SPLIT)
    if suspicion.holds(split):
        place = f"{split.changed_op}, in {split.partition}" if split.changed_op else split.partition
        return Blame(Stage.PARTITION, part=place)
    # Without its passes before and on the joint graph it is right.
    found = suspicion.find_first(replace(_EAGER, wants_ops=False), PASSES, whole=eager)
    return Blame(Stage.BACKEND, part=name_application(found) if found else "")


def _locate_in_tracing(suspicion: Suspicion, traced: Report) -> Blame:
    if not suspicion.fails(_BARE):
        found = suspicion.find_first(_TRACED, DECOMPOSITIONS, whole=traced)
        return Blame(Stage.DECOMPOSITION, part=name_application(found) if found else "")
    if suspicion.fails(Trial(backend="aot_eager")):
        return Blame(Stage.AOT)
    note = (
        "AOT autograd alone is correct: the backend changes the graph before it, or the result "
        "after it."
    )
    return Blame(Stage.BACKEND, part="outside of AOT autograd", notes=(note,))


def _locate_in_backend(suspicion: Suspicion, eager: Report) -> Blame:
    part, notes = locate_in_inductor(suspicion) if eager.is_inductor else ("", ())
    return Blame(Stage.BACKEND, part=part or _find_op(suspicion, eager), notes=notes)


def _find_op(suspicion: Suspicion, eager: Report) -> str:
    """The op that the backend fails on when it is given each alone; "" if it does not fail then."""
    ops = eager.ops
    if len(ops) <= 1:
        return ops[0][1] if ops else ""
    names = tuple(name for name, _ in ops)
    if not suspicion.fails(Trial(apart=names)):
        return ""
    low, high = 0, len(ops)
    while high - low > 1:
        middle = (low + high) // 2
        is_within = suspicion.fails(Trial(apart=names[low:middle]))
        low, high = (low, middle) if is_within else (middle, high)
    return ops[low][1]
