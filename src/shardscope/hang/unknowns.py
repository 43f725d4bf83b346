"""Sentences on what the files of a run cannot say, so that nothing is taken for known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardscope.hang.evidence import FileFormat, RankEvidence
from shardscope.hang.rank_calls import name_ranks
from shardscope.hang.run import HangRun

_OWN = (FileFormat.STREAM, FileFormat.RECORDING)
_WITHOUT_ROOTS = (FileFormat.FLIGHT_RECORDER, FileFormat.DEBUG_SERVER)


def list_unknowns(run: HangRun) -> tuple[str, ...]:
    """What is not known, each a sentence without its period."""
    return tuple(dict.fromkeys(_list_all(run)))


def _list_all(run: HangRun) -> Iterator[str]:
    dumps = [
        piece
        for files in run.ranks.values()
        for piece in files.with_calls[:1]
        if piece.format is not FileFormat.NCCL_RAS
    ]
    missing = run.missing_ranks
    if missing:
        yield (f"{name_ranks(missing)} left no file, so what {_pronoun(missing)} did is not known")
    if not run.is_world_size_known and run.ranks:
        yield (
            f"no file says how many ranks the run had: ranks above {max(run.ranks)} would not be "
            "missed"
        )
    limited = _ranks_with(dumps, lambda piece: piece.is_wrapped and piece.format in _OWN)
    if limited:
        yield (
            f"the streams of {name_ranks(limited)} have kept only the newest calls: a divergence "
            "before their first is not seen (stream_bytes limits them)"
        )
    wrapped = _ranks_with(dumps, lambda piece: piece.is_wrapped and piece.format not in _OWN)
    if wrapped:
        yield (
            f"the buffers of {name_ranks(wrapped)} wrapped round: a divergence before their first "
            "entry is not seen (TORCH_FR_BUFFER_SIZE sets their size)"
        )
    flight = [piece for piece in dumps if piece.format is FileFormat.FLIGHT_RECORDER]
    if flight:
        yield "Flight Recorder does not record reductions, roots, modules and phases"
        without = _ranks_with(flight, lambda piece: not piece.has_sites)
        if without:
            yield f"the dumps of {name_ranks(without)} have no stacks, so their lines are not known"
        if any(fact.backend.startswith("gloo") for piece in flight for fact in piece.groups):
            yield (
                "for gloo, Flight Recorder records no sends and receives, and whether a call is "
                "done only by retiring it"
            )
        elif not any(piece.has_start_times for piece in flight):
            yield (
                "the dumps do not say whether a collective had begun on the GPU "
                "(TORCH_NCCL_ENABLE_TIMING=1 records it)"
            )
    unlisted = [
        group.name for group in run.groups.values() if not group.has_members and group.columns
    ]
    if unlisted:
        yield (
            f"the members of {_count(unlisted, 'group')} are not recorded (such as {unlisted[0]}): "
            "a member that issued nothing there is not missed"
        )
    inferred = [group.name for group in run.groups.values() if group.is_inferred]
    if inferred:
        yield f"a member of {inferred[0]} is inferred from the groups of the same role"
    stale = sorted({rank for group in run.groups.values() for rank in group.stale})
    if stale:
        yield (
            f"the files of {name_ranks(stale)} were written before {_pronoun(stale)} issued what "
            "has completed on other ranks, so where they stopped is not known"
        )
    streams = [piece for piece in dumps if piece.format is FileFormat.STREAM]
    if streams and not any(run.ranks[rank].stacks for rank in run.ranks):
        yield (
            "streams do not say whether a process still ran: one that is slow, stopped or killed "
            "leaves the same"
        )


def _ranks_with(pieces: Iterable[RankEvidence], has: object) -> list[int]:
    assert callable(has)
    return sorted({piece.rank for piece in pieces if has(piece) and piece.rank is not None})


def _pronoun(ranks: list[int]) -> str:
    return "it" if len(ranks) == 1 else "they"


def _count(names: list[str], noun: str) -> str:
    return f"{len(names):,} {noun}{'s' if len(names) > 1 else ''}"
