"""What the worker does: functions that run in its process, at a bench that keeps fragments."""

from __future__ import annotations

import io
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

from shardscope._torch.compiler_settings import apply_settings
from shardscope._torch.inductor_vectors import try_vector_instructions
from shardscope.compile.diagnose.blaming.announcements import announced
from shardscope.compile.diagnose.blaming.switching import Report, Trial
from shardscope.compile.diagnose.blaming.try_out import try_out
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.cutting.cut import Recorded
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.isolation.bench import Bench
from shardscope.compile.diagnose.isolation.fragment_form import FragmentForm, build_fragment
from shardscope.compile.diagnose.isolation.payload import unpack
from shardscope.compile.diagnose.judging.judge import find_reaching, glance, judge, reaches
from shardscope.compile.diagnose.judging.program import judge_program
from shardscope.compile.diagnose.outcome import Outcome, is_alike
from shardscope.compile.diagnose.repro.script import PASSING
from shardscope.compile.diagnose.repro.variant import Variant, find_passing
from shardscope.compile.diagnose.repro.write import write_repro
from shardscope.compile.diagnose.searching.hints import in_order, name_output
from shardscope.compile.diagnose.suspects import describe_ops
from shardscope.record import Phase, Stage, SuspectOp

__all__ = [
    "Loaded",
    "Piece",
    "Request",
    "Written",
    "attempt",
    "check",
    "check_exposed",
    "check_program",
    "check_reaches",
    "describe",
    "load",
    "point_at",
    "recall",
    "run_passing",
    "set_up",
    "warm_up",
    "write",
]


@final
@dataclass(frozen=True)
class Loaded:
    """What is known of a fragment that the worker keeps."""

    ops: tuple[str, ...]
    reads: Mapping[str, tuple[str, ...]]
    eager_s: float


@final
@dataclass(frozen=True)
class Piece:
    """Some ops of a fragment that the worker keeps, or, if none are named, all."""

    key: int
    keep: frozenset[str] | None = None


@final
@dataclass(frozen=True)
class Request:
    """What a script is to show."""

    piece: Piece
    passing: Piece | None
    compiler: Compiler
    outcome: Outcome
    folder: Path
    title: str
    stage: Stage | None
    limit_s: float
    settings: tuple[str, ...]
    may_try: bool  # call the backend for a better script


@final
@dataclass(frozen=True)
class Written:
    """A script, how its passing variant differs, and how often the backend was called for it."""

    path: Path
    passing: str
    passing_calls_backend: bool
    num_calls: int


def set_up(_: Bench, settings: tuple[str, ...]) -> None:
    """Tell torch what the user told it."""
    apply_settings(settings)


def warm_up(_: Bench) -> None:
    """Let inductor know this machine before it is asked for anything."""
    try_vector_instructions()


def load(bench: Bench, key: int, form: FragmentForm) -> None:
    """Keep a fragment."""
    began = time.monotonic()
    recorded = Recorded(build_fragment(form))
    loaded = Loaded(recorded.ops, recorded.reads, time.monotonic() - began)
    bench.held[f"fragment {key}"], bench.held[f"loaded {key}"] = recorded, loaded


def recall(bench: Bench, key: int) -> Loaded:
    """What is known of a fragment that was loaded."""
    loaded: Loaded = bench.held[f"loaded {key}"]
    return loaded


def check(bench: Bench, piece: Piece, compiler: Compiler) -> Outcome:
    """Judge a piece of a fragment."""
    return judge(_cut(bench, piece), compiler, announce=bench.announce)


def check_exposed(bench: Bench, key: int, compiler: Compiler) -> Outcome:
    """Judge a fragment by all values in it, in order: the first that is off may be to blame."""
    return _hinting(_expose(bench, key), partial(judge, announce=bench.announce), compiler)


def point_at(bench: Bench, key: int, compiler: Compiler) -> Outcome:
    """The same at a glance, for a fragment whose results are known to be wrong.

    To blame is the first value that makes them so: others may be off and do no harm.
    """
    exposed = _expose(bench, key)
    outcome, wrong = glance(exposed, compiler, announce=bench.announce)
    values = {name_output(exposed, output): value for output, value in wrong.items()}
    values.pop("", None)
    name = find_reaching(_cut(bench, Piece(key)), values)
    return replace(outcome, hints=(name,)) if name else outcome


def check_reaches(bench: Bench, piece: Piece, compiler: Compiler) -> bool:
    """Whether what a piece gets wrong makes the results of its fragment wrong."""
    fragment, part = _cut(bench, Piece(piece.key)), _cut(bench, piece)
    return reaches(fragment, part, compiler, announce=bench.announce)


def check_program(bench: Bench, packed: Sequence[bytes], compiler: Compiler) -> Outcome:
    """Judge a whole function, as torch.compile takes it."""
    return judge_program(lambda: unpack(packed), compiler, announce=bench.announce)


def describe(bench: Bench, piece: Piece) -> tuple[SuspectOp, ...]:
    """The ops of a piece, with their modules and lines."""
    return describe_ops(_cut(bench, piece))


def attempt(bench: Bench, piece: Piece, compiler: Compiler, trial: Trial, phase: Phase) -> Report:
    """Judge a piece with parts of the compiler switched off."""
    # What runs has less time than what compiles, so both are told apart.
    aloud = partial(judge, announce=bench.announce)
    with announced(bench.announce):
        return try_out(_cut(bench, piece), compiler, trial, judge=aloud, phase=phase)


def write(bench: Bench, request: Request) -> Written:
    """Write a script; raises NotPrintable if that cannot be done."""
    counted = _Counted()
    fragment = _cut(bench, request.piece)

    def still_fails(inputs: tuple[Any, ...]) -> bool:
        outcome = counted(replace(fragment, inputs=inputs), request.compiler)
        return is_alike(outcome, request.outcome)

    passing = _find_variant(bench, request, fragment, counted)
    path = write_repro(
        fragment,
        request.compiler,
        request.outcome,
        folder=request.folder,
        passing=passing,
        title=request.title,
        stage=request.stage,
        still_fails=still_fails if request.may_try else None,
        limit_s=request.limit_s,
        settings=request.settings,
    )
    is_same = passing.compiler == request.compiler
    return Written(path, passing.difference, is_same, counted.num_calls)


def run_passing(bench: Bench, path: Path) -> tuple[int, str]:
    """Run the variant of a script that does not fail: its exit code, and what it printed.

    That it passes needs no fresh process, as a failure does.
    """
    bench.announce("running the passing variant")
    printed = io.StringIO()
    arguments = sys.argv
    sys.argv = [str(path), PASSING]
    try:
        with redirect_stdout(printed):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0), printed.getvalue()
    finally:
        sys.argv = arguments
    return 0, printed.getvalue()


def _find_variant(
    bench: Bench, request: Request, fragment: Fragment, judge: Callable[..., Outcome]
) -> Variant:
    smaller = None if request.passing is None else _cut(bench, request.passing)
    most_calls = 1 if request.may_try else 0
    return find_passing(
        fragment,
        compiler=request.compiler,
        judge=judge,
        smaller=smaller,
        missing=_name_missing(bench, request),
        most_calls=most_calls,
    )


def _name_missing(bench: Bench, request: Request) -> str:
    piece, passing = request.piece, request.passing
    if passing is None or piece.keep is None or passing.keep is None:
        return ""
    missing = Piece(piece.key, piece.keep - passing.keep)
    return ", ".join(dict.fromkeys(one.op for one in describe(bench, missing)))


@final
class _Counted:
    """Judges, and counts how often."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, fragment: Fragment, compiler: Compiler) -> Outcome:
        self.num_calls += 1
        return judge(fragment, compiler)


def _expose(bench: Bench, key: int) -> Fragment:
    return in_order(_recorded(bench, key).expose())


def _hinting(exposed: Fragment, judge: Callable[..., Outcome], compiler: Compiler) -> Outcome:
    """With the node as a hint whose value is off."""
    outcome = judge(exposed, compiler)
    name = name_output(exposed, outcome.deviation.tensor) if outcome.deviation else ""
    return replace(outcome, hints=(name,)) if name else outcome


def _cut(bench: Bench, piece: Piece) -> Fragment:
    recorded = _recorded(bench, piece.key)
    return recorded.cut(recorded.ops if piece.keep is None else piece.keep)


def _recorded(bench: Bench, key: int) -> Recorded:
    recorded: Recorded = bench.held[f"fragment {key}"]
    return recorded
