"""Chooses among several files of a rank, and among files of several runs: the newest count."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from msgspec import Struct

from shardscope.hang.evidence import EventKind, FileFormat, RankEvent, RankEvidence, ThreadStack
from shardscope.hang.evidence.failures import classify_error
from shardscope.record.ranks import list_ranks
from shardscope.record.recording import Gap, Stop
from shardscope.record.units import format_duration

# Formats with calls, those that say most of a call first.
_WITH_CALLS = (
    FileFormat.FLIGHT_RECORDER,
    FileFormat.STREAM,
    FileFormat.RECORDING,
    FileFormat.DEBUG_SERVER,
    FileFormat.NCCL_LOG,
    FileFormat.LOG,
    FileFormat.NCCL_RAS,
)
_MIN_APART_NS = 60 * 10**9  # between two runs


class RankFiles(Struct, frozen=True):
    """All that is known of one rank: evidence with calls, the best first, and everything else.

    `num_same_stack` of the `num_stacks` dumps of its main thread show the same stack as the last.
    """

    rank: int
    with_calls: tuple[RankEvidence, ...] = ()
    stacks: tuple[ThreadStack, ...] = ()
    events: tuple[RankEvent, ...] = ()
    evidence: tuple[RankEvidence, ...] = ()
    stop: Stop | None = None
    host: str = ""
    pid: int | None = None
    num_stacks: int = 0
    num_same_stack: int = 0

    @property
    def main_stack(self) -> ThreadStack | None:
        """The stack of the main thread in the newest dump."""
        return next((stack for stack in self.stacks if stack.is_main), None)

    @property
    def has_process(self) -> bool:
        """Whether a file shows that the process ran when the files were written."""
        formats = {evidence.format for evidence in self.evidence if not evidence.events}
        return not formats.isdisjoint(
            {FileFormat.FLIGHT_RECORDER, FileFormat.DEBUG_SERVER, FileFormat.PY_SPY}
        ) or bool(self.stacks)


def combine_ranks(
    ranks: Mapping[int, list[RankEvidence]], modified_ns: Mapping[str, int]
) -> tuple[dict[int, RankFiles], list[Gap], list[str]]:
    """The files of each rank of the newest run, gaps on files left out, and what is not known."""
    kept, gaps, notes = _separate_runs(ranks)
    combined = {
        rank: _combine(rank, pieces, modified_ns, gaps) for rank, pieces in sorted(kept.items())
    }
    return combined, gaps, notes


def _separate_runs(
    ranks: Mapping[int, list[RankEvidence]],
) -> tuple[dict[int, list[RankEvidence]], list[Gap], list[str]]:
    """Leave out evidence of an earlier run, whose calls all precede those of a later one."""
    timed = sorted(
        (
            (evidence.first_ns, evidence.last_ns, rank)
            for rank, pieces in ranks.items()
            for evidence in pieces
            if evidence.first_ns
        ),
    )
    start_ns = 0
    end_ns = timed[0][1] if timed else 0
    for first_ns, last_ns, _ in timed:
        if first_ns > end_ns + _MIN_APART_NS:
            start_ns = first_ns
        end_ns = max(end_ns, last_ns)
    kept = {
        rank: [piece for piece in pieces if not piece.first_ns or piece.first_ns >= start_ns]
        for rank, pieces in ranks.items()
    }
    gaps: list[Gap] = []
    notes: list[str] = []
    if start_ns:
        older = [item for item in timed if item[0] < start_ns]
        newest = {rank for first_ns, _, rank in timed if first_ns >= start_ns}
        apart_ns = start_ns - max(last_ns for _, last_ns, _ in older)
        old_ranks = {rank for *_, rank in older}
        gaps.append(
            Gap(
                place="files",
                fact=f"they are of two runs: the calls of ranks {list_ranks(old_ranks)} in "
                f"{len(older)} files end {format_duration(apart_ns)} before those of ranks "
                f"{list_ranks(newest)} begin. Only the newer run is explained",
            )
        )
    return {rank: pieces for rank, pieces in kept.items() if pieces}, gaps, notes


def _combine(
    rank: int, pieces: list[RankEvidence], modified_ns: Mapping[str, int], gaps: list[Gap]
) -> RankFiles:
    with_calls = _choose_calls(rank, pieces, modified_ns, gaps)
    dumps = [piece for piece in pieces if piece.stacks]
    dumps.sort(key=lambda piece: (modified_ns.get(piece.path, 0), piece.path))
    stacks = dumps[-1].stacks if dumps else ()
    mains = [
        next((stack.frames for stack in piece.stacks if stack.is_main), None) for piece in dumps
    ]
    stop = next((piece.stop for piece in with_calls if piece.stop is not None), None)
    return RankFiles(
        rank=rank,
        with_calls=tuple(with_calls),
        stacks=stacks,
        events=tuple(_list_events(pieces, stop)),
        evidence=tuple(pieces),
        stop=stop,
        host=next((piece.host for piece in pieces if piece.host), ""),
        pid=next((piece.pid for piece in pieces if piece.pid is not None), None),
        num_stacks=len(mains),
        num_same_stack=sum(main == mains[-1] for main in mains) if mains else 0,
    )


def _list_events(pieces: Iterable[RankEvidence], stop: Stop | None) -> Iterable[RankEvent]:
    seen: set[tuple[EventKind, str]] = set()
    for piece in pieces:
        for event in piece.events:
            if (event.kind, event.text) not in seen:
                seen.add((event.kind, event.text))
                yield event
    if stop is not None and stop.error is not None:
        yield RankEvent(classify_error(stop.error), stop.error)


def _choose_calls(
    rank: int, pieces: list[RankEvidence], modified_ns: Mapping[str, int], gaps: list[Gap]
) -> list[RankEvidence]:
    """Of each format the newest file with calls; the best format first."""
    by_format: defaultdict[FileFormat, list[RankEvidence]] = defaultdict(list)
    for piece in pieces:
        if piece.columns or piece.groups or piece.format in _WITH_CALLS[:3]:
            by_format[piece.format].append(piece)
    chosen: list[RankEvidence] = []
    for file_format in _WITH_CALLS:
        files = by_format.get(file_format, [])
        paths = Counter(piece.path for piece in files)
        if file_format is FileFormat.NCCL_RAS and files:
            newest = max(paths, key=lambda path: (modified_ns.get(path, 0), path))
            chosen.extend(piece for piece in files if piece.path == newest)
            continue
        if not files:
            continue
        files.sort(
            key=lambda piece: (piece.last_ns, modified_ns.get(piece.path, 0), len(piece.columns))
        )
        chosen.append(files[-1])
        if len(paths) > 1 and (gap := _describe_doubles(rank, files)) is not None:
            gaps.append(gap)
    return chosen


def _describe_doubles(rank: int, files: list[RankEvidence]) -> Gap | None:
    """A gap if two files claim to be of a rank and were written by two processes."""
    newest, older = files[-1], files[-2]
    is_other = older.pid is not None and newest.pid is not None and older.pid != newest.pid
    has_calls = bool(newest.last_ns and older.last_ns)
    overlaps = has_calls and older.first_ns <= newest.last_ns and newest.first_ns <= older.last_ns
    are_equal = older.first_ns == newest.first_ns or older.last_ns == newest.last_ns
    if is_other or (overlaps and not are_equal and not (newest.is_wrapped or older.is_wrapped)):
        return Gap(
            place=newest.path,
            fact=f"'{older.path}' is of rank {rank} too, by its name, and of another process: are "
            "their numbers local ranks of two hosts? Only the newer file is used",
            rank=rank,
            is_loss=True,
        )
    return None
