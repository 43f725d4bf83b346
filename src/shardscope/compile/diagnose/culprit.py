"""From a graph that fails to the ops and the stage that are to blame."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from msgspec.structs import replace

from shardscope.comm.stack import shown_path
from shardscope.compile.diagnose.at_bench import (
    Loaded,
    Piece,
    attempt,
    check_reaches,
    describe,
    point_at,
)
from shardscope.compile.diagnose.blaming.announcements import blame_last
from shardscope.compile.diagnose.blaming.blame import Blame
from shardscope.compile.diagnose.blaming.stages import locate_stage_by
from shardscope.compile.diagnose.blaming.switching import Report, Trial
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.outcome import NUMBERS, Outcome, is_alike
from shardscope.compile.diagnose.progress import Teller
from shardscope.compile.diagnose.queries import Queries
from shardscope.compile.diagnose.searching.search import Answer, Progress, Shrunk, shrink
from shardscope.errors import CompileError
from shardscope.record import Diagnosis, Phase, SuspectOp

__all__ = ["INTERRUPTED", "Culprit", "Found", "add_note", "as_seen_from_here"]

INTERRUPTED = (
    "The diagnosis was interrupted: this is the best result so far, and what is missing in it was "
    "not determined."
)
"""The note of a diagnosis that Ctrl-C ended early, wherever that happened."""
_RESERVE = 6  # calls that finding the stage and a variant that passes may take


@final
@dataclass(frozen=True)
class Found:
    """The smallest piece that fails: what it shows, and the nearest piece that does not fail."""

    diagnosis: Diagnosis
    piece: Piece
    outcome: Outcome
    passing: Piece | None
    is_interrupted: bool = False


@final
class Culprit:
    """Finds out what is to blame for a graph that fails."""

    def __init__(
        self, queries: Queries, compiler: Compiler, teller: Teller, *, budget: int
    ) -> None:
        self._queries = queries
        self._compiler = compiler
        self._teller = teller
        self._budget = budget

    def find(self, begun: Diagnosis, key: int, loaded: Loaded, whole: Outcome) -> Found:
        """What fails in a graph that is known to fail as a whole."""
        shrunk = self._shrink_to_reaching(key, loaded, whole)
        piece = Piece(key, frozenset(shrunk.keep))
        # A part that fails is the whole where nothing could be left out.
        outcome = whole if len(shrunk.keep) == len(loaded.ops) else self._queries.ask(piece)
        found = Found(
            self._describe(begun, piece, outcome, shrunk),
            piece,
            outcome,
            _passing_piece(key, shrunk),
            shrunk.is_interrupted,
        )
        return found if shrunk.is_interrupted else self._with_stage(found)

    def _describe(
        self, begun: Diagnosis, piece: Piece, outcome: Outcome, shrunk: Shrunk
    ) -> Diagnosis:
        return replace(
            begun,
            graph=piece.key,
            condition=outcome.condition,
            fact=outcome.fact,
            phase=outcome.phase,
            deviation=outcome.deviation,
            error=outcome.error,
            suspects=tuple(map(as_seen_from_here, self._queries.look(describe, piece))),
            is_minimal=shrunk.is_minimal,
        )

    def _shrink_to_reaching(self, key: int, loaded: Loaded, whole: Outcome) -> Shrunk:
        """The fewest ops to blame; of several faults, one that makes the graph's results wrong."""
        self._teller.doing("searching for the ops to blame")
        try:
            hints = self._find_hints(key, whole)
        except KeyboardInterrupt:
            return Shrunk(
                loaded.ops, is_minimal=False, num_queries=0, passing=(), is_interrupted=True
            )
        shrunk = self._shrink(key, loaded.ops, loaded, whole, hints)
        is_inner = not self._queries.ask(Piece(key)).is_bad  # which does no harm, and is told so
        if is_inner or not self._may_be_harmless(shrunk, loaded, whole, hints):
            return shrunk
        rest = [name for name in loaded.ops if name not in shrunk.keep]
        try:
            is_harmless = not self._queries.run(
                check_reaches, Piece(key, frozenset(shrunk.keep)), self._compiler
            )
            if is_harmless and is_alike(self._queries.ask(Piece(key, frozenset(rest))), whole):
                return self._shrink(key, rest, loaded, whole, ())
        except CompileError:  # then there is nothing to say against the first
            pass
        return shrunk

    def _may_be_harmless(
        self, shrunk: Shrunk, loaded: Loaded, whole: Outcome, hints: Sequence[str]
    ) -> bool:
        """Whether nothing has shown yet that what was found makes the graph's results wrong."""
        is_forward = whole.condition in NUMBERS and whole.phase is Phase.FORWARD
        is_part = shrunk.is_minimal and len(shrunk.keep) < len(loaded.ops)
        is_known = bool(hints) and hints[0] in shrunk.keep  # by who gave the hint
        return is_forward and is_part and not is_known

    def _shrink(
        self,
        key: int,
        ops: Sequence[str],
        loaded: Loaded,
        whole: Outcome,
        hints: Sequence[str],
    ) -> Shrunk:

        def ask(keep: frozenset[str]) -> Answer:
            try:
                outcome = self._queries.ask(Piece(key, keep))
            except CompileError:  # without a compiler it fails as well
                return Answer.UNRESOLVED
            if is_alike(outcome, whole):
                return Answer.FAILS
            return Answer.UNRESOLVED if outcome.is_bad else Answer.PASSES

        def tell(progress: Progress) -> None:
            self._teller.expect(progress.num_left + _RESERVE)

        left = max(0, self._budget - self._queries.num_calls - _RESERVE)
        return shrink(
            ops,
            ask,
            budget=left,
            suspects=[name for name in hints if name in ops],
            reads=loaded.reads,
            on_progress=tell,
        )

    def _find_hints(self, key: int, whole: Outcome) -> tuple[str, ...]:
        """Ops that are probably to blame; of wrong numbers the first op whose result is one."""
        if whole.hints or whole.condition not in NUMBERS:
            return whole.hints
        try:
            outcome: Outcome = self._queries.run(point_at, key, self._compiler)
        except CompileError:  # it is only slower without
            return ()
        return outcome.hints if is_alike(outcome, whole) else ()

    def _with_stage(self, found: Found) -> Found:
        self._teller.doing("finding the stage")
        try:
            told = self._find_stage(found)
        except CompileError as error:
            note = f"Finding the stage failed ({error})."
            return _with(found, add_note(found.diagnosis, note))
        except KeyboardInterrupt:
            return _with(found, add_note(found.diagnosis, INTERRUPTED))
        return _with(found, _blamed(found.diagnosis, told))

    def _find_stage(self, found: Found) -> Blame:
        last = ""

        def ask(trial: Trial) -> Report:
            nonlocal last
            told = self._queries.run(
                attempt,
                found.piece,
                self._compiler,
                trial,
                found.outcome.phase,
                num_calls=int(trial.backend is None),
            )
            if isinstance(told, Report):
                return told
            last = self._queries.last_phase
            return Report(told, has_died=True)

        blame = locate_stage_by(ask, outcome=found.outcome)
        return (
            blame if blame.part or not last else dataclasses.replace(blame, part=_last_part(last))
        )


def as_seen_from_here(suspect: SuspectOp) -> SuspectOp:
    """With its line's file as the user would name it: the worker is in another folder."""
    source = suspect.source
    if source is None:
        return suspect
    return replace(suspect, source=replace(source, file=shown_path(source.file)))


def _last_part(announcement: str) -> str:
    """The part of the compiler that was begun last before a process died."""
    return blame_last(announcement).part


def _with(found: Found, diagnosis: Diagnosis) -> Found:
    return Found(diagnosis, found.piece, found.outcome, found.passing, found.is_interrupted)


def _passing_piece(key: int, shrunk: Shrunk) -> Piece | None:
    """What is left of the culprits without one of them: other parts are not near."""
    is_part = len(shrunk.passing) > 0 and set(shrunk.passing) < set(shrunk.keep)
    return Piece(key, frozenset(shrunk.passing)) if is_part else None


def _blamed(found: Diagnosis, told: Blame) -> Diagnosis:
    return replace(
        found,
        stage=told.stage,
        part=told.part,
        phase=told.phase or found.phase,
        notes=(*found.notes, *told.notes),
    )


def add_note(found: Diagnosis, note: str) -> Diagnosis:
    """The diagnosis with a note on something that could not be determined; each note once."""
    return found if note in found.notes else replace(found, notes=(*found.notes, note))
