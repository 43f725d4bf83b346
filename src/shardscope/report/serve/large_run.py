"""Sums the collectives of a Parquet file with DuckDB; only those of a few ranks become records."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from msgspec.structs import replace

from shardscope.record import CollectiveKind, Recording, compress_ranks, expand_ranks
from shardscope.record.parquet import CAUSE_COLUMN, ParquetRecording
from shardscope.record.units import plural
from shardscope.report.model.traffic_totals import (
    PROFILE_FIELDS,
    SINGLE_RECEIVER,
    IdenticalRanks,
    Route,
    TrafficSummary,
)
from shardscope.report.query.database import connect

PURPOSE = "a server for large runs"
MAX_RECORDS = 100_000  # collectives that become records, to build a page in seconds

# Ranks issued the same collectives if the sums of the hashes of their collectives are equal.
_PROFILES = """
    SELECT rank, count(*), sum(hash({columns})::HUGEINT), sum(wire_bytes)
    FROM calls GROUP BY rank ORDER BY rank
"""
_ROUTES = """
    SELECT rank, "group", kind, CASE WHEN kind IN {kinds} THEN peer END,
        sum(wire_bytes), count(*)
    FROM calls WHERE wire_bytes > 0 GROUP BY ALL
"""
_SIZES = ("input_bytes", "output_bytes", "wire_bytes")


def summarize_file(
    file: ParquetRecording, rest: Recording, table: Any
) -> tuple[Recording, TrafficSummary]:
    """Sum the collectives of an open file, which were read as `table`.

    Returns the recording with the collectives of one rank of each set of identical ranks, and the
    sums of all. If there are too many such sets, ranks whose collectives differ only in size are
    one set, of which the rank that sends most is taken, and a note says so.
    """
    fields = [CAUSE_COLUMN if name == "cause" else name for name in PROFILE_FIELDS]
    connection = connect()
    connection.register("calls", table)
    ranks = expand_ranks(rest.run.ranks)
    classes = _find_classes(connection, fields, ranks)
    num_sets, note = len(classes), ""
    if _count_calls(classes) > MAX_RECORDS:
        coarse = [name for name in fields if name not in _SIZES]
        classes = _find_classes(connection, coarse, ranks)
        note = (
            f"The recorded ranks are {plural(num_sets, 'set')} of identical ranks. Here, ranks "
            "whose collectives differ only in size are one set, with the figures of the rank that "
            "sends most."
        )
    classes, num_missing = _limit_calls(classes)
    if num_missing:
        note += f" {plural(num_missing, 'rank')} that send least are left out."
    calls = defaultdict(list)
    for call in file.list_calls(table, {example for _, example, _ in classes}):
        calls[call.rank].append(call)
    rank_sets = tuple(
        IdenticalRanks(compress_ranks(members), tuple(calls[example]))
        for members, example, _ in classes
    )
    num_bytes, num_calls = _sum_routes(connection)
    shown = tuple(call for rank in sorted(calls) for call in calls[rank])
    return replace(rest, collectives=shown), TrafficSummary(
        rank_sets=rank_sets,
        num_calls=file.num_calls,
        num_senders=connection.execute("SELECT count(DISTINCT rank) FROM calls").fetchone()[0],
        route_bytes=num_bytes,
        route_calls=num_calls,
        note=note.strip(),
    )


_Class = tuple[list[int], int, int]  # ranks, the one whose collectives are shown, how many it has


def _find_classes(connection: Any, columns: list[str], ranks: tuple[int, ...]) -> list[_Class]:
    """Ranks with equal collectives, as far as these columns tell, by their first rank."""
    sql = _PROFILES.format(columns=", ".join(f'"{name}"' for name in columns))
    rows = {rank: row for rank, *row in connection.execute(sql).fetchall()}
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in sorted({*ranks, *rows}):
        num_calls, profile, _ = rows.get(rank, (0, 0, 0))
        members[num_calls, profile].append(rank)
    classes = []
    for (num_calls, _), class_ranks in members.items():
        sent = {rank: rows[rank][2] if rank in rows else 0 for rank in class_ranks}
        example = max(class_ranks, key=lambda rank: (sent[rank], -rank))
        classes.append((class_ranks, example, num_calls))
    return classes


def _count_calls(classes: list[_Class]) -> int:
    return sum(num_calls for _, _, num_calls in classes)


def _limit_calls(classes: list[_Class]) -> tuple[list[_Class], int]:
    """As many classes as may become records, and the number of ranks of the others."""
    included, num_missing, num_calls = [], 0, 0
    for rank_class in sorted(classes, key=lambda rank_class: -len(rank_class[0])):
        if num_calls and num_calls + rank_class[2] > MAX_RECORDS:
            num_missing += len(rank_class[0])
        else:
            num_calls += rank_class[2]
            included.append(rank_class)
    return sorted(included, key=lambda rank_class: rank_class[0][0]), num_missing


def _sum_routes(connection: Any) -> tuple[Counter[Route], Counter[Route]]:
    kinds = ", ".join(f"'{kind}'" for kind in SINGLE_RECEIVER)
    num_bytes: Counter[Route] = Counter()
    num_calls: Counter[Route] = Counter()
    for rank, group, kind, peer, total, count in connection.execute(
        _ROUTES.format(kinds=f"({kinds})")
    ).fetchall():
        route = (rank, group, CollectiveKind(kind), peer)
        num_bytes[route], num_calls[route] = total, count
    return num_bytes, num_calls
