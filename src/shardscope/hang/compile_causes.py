"""Compares what ranks compiled: graphs with other collectives, and ranks that still compile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from shardscope.hang.cause_text import make_cause
from shardscope.hang.evidence import CompileEvent
from shardscope.hang.rank_calls import name_ranks
from shardscope.hang.run import HangRun
from shardscope.record.hang_records import CauseKind, Certainty, HangCause

_MAX_NAMED = 6  # collectives of a graph that a sentence lists


def explain_compilations(run: HangRun) -> Iterator[HangCause]:
    """The first graph whose collectives differ between ranks, and ranks that still compile."""
    compilations = list_compilations(run)
    if len(compilations) < 2:
        return
    yield from _explain_schedules(compilations)
    yield from _explain_open(compilations)


def list_compilations(run: HangRun) -> dict[int, dict[str, CompileEvent]]:
    """What each rank with a structured log compiled, by compile id."""
    return {
        rank: found
        for rank, files in run.ranks.items()
        if (
            found := {
                event.compile_id: event for piece in files.evidence for event in piece.compilations
            }
        )
    }


def _explain_schedules(
    compilations: Mapping[int, Mapping[str, CompileEvent]],
) -> Iterator[HangCause]:
    identities = dict.fromkeys(identity for events in compilations.values() for identity in events)
    for identity in identities:
        sides: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for rank, events in compilations.items():
            event = events.get(identity)
            if event is not None and event.collectives is not None:
                sides[event.collectives].append(rank)
        if len(sides) < 2:
            continue
        minority = min(sides, key=lambda schedule: (len(sides[schedule]), sides[schedule]))
        is_tie = list(map(len, sides.values())).count(len(sides[minority])) > 1
        ranks = (
            sides[minority] if not is_tie else [rank for side in sides.values() for rank in side]
        )
        function = next(
            (
                event.function
                for events in compilations.values()
                if (event := events.get(identity)) is not None and event.function
            ),
            "",
        )
        subject = f"compilation [{identity}]" + (f" of {function}" if function else "")
        facts = [f"ranks compiled different graphs in {subject}"] + [
            f"{name_ranks(side)}: {_describe_schedule(schedule)}"
            for schedule, side in sorted(sides.items(), key=lambda item: -len(item[1]))[:4]
        ]
        yield make_cause(
            CauseKind.DIFFERENT_COMPILE,
            Certainty.POSSIBLE if is_tie else Certainty.LIKELY,
            ranks,
            facts,
        )
        return


def _describe_schedule(schedule: tuple[str, ...]) -> str:
    if not schedule:
        return "no collectives"
    names = [name.rpartition("_c10d_functional.")[2].removesuffix(".default") for name in schedule]
    shown = ", ".join(names[:_MAX_NAMED])
    more = f", … ({len(names)} in all)" if len(names) > _MAX_NAMED else ""
    return f"{shown}{more}"


def _explain_open(
    compilations: Mapping[int, Mapping[str, CompileEvent]],
) -> Iterator[HangCause]:
    """Ranks in a compilation that others have ended or never begun."""
    compiling = {
        rank: event
        for rank, events in compilations.items()
        for event in events.values()
        if event.is_open
    }
    if not compiling or len(compiling) == len(compilations):
        return
    ranks = sorted(compiling)
    event = compiling[ranks[0]]
    function = f" of {event.function}" if event.function else ""
    others = sorted(set(compilations) - set(ranks))
    yield make_cause(
        CauseKind.COMPILING,
        Certainty.LIKELY,
        ranks,
        [
            f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} still in compilation "
            f"[{event.compile_id}]{function}, and {name_ranks(others)} "
            f"{'is' if len(others) == 1 else 'are'} in none"
        ],
    )
