"""Sums the collectives of a Parquet file with DuckDB; only those of a few ranks become records."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

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
    rank_sets = _find_rank_sets(connection, fields, ranks)
    num_sets, note = len(rank_sets), ""
    if _count_calls(rank_sets) > MAX_RECORDS:
        coarse = [name for name in fields if name not in _SIZES]
        rank_sets = _find_rank_sets(connection, coarse, ranks)
        note = (
            f"The recorded ranks are {plural(num_sets, 'set')} of identical ranks. Here, ranks "
            "whose collectives differ only in size are one set, with the figures of the rank that "
            "sends most."
        )
    rank_sets, num_missing = _limit_calls(rank_sets)
    if num_missing:
        note += f" {plural(num_missing, 'rank')} whose collectives few others share are left out."
    calls = defaultdict(list)
    for call in file.list_calls(table, {rank_set.example for rank_set in rank_sets}):
        calls[call.rank].append(call)
    identical = tuple(
        IdenticalRanks(compress_ranks(rank_set.ranks), tuple(calls[rank_set.example]))
        for rank_set in rank_sets
    )
    num_bytes, num_calls = _sum_routes(connection)
    shown = tuple(call for rank in sorted(calls) for call in calls[rank])
    return replace(rest, collectives=shown), TrafficSummary(
        rank_sets=identical,
        num_calls=file.num_calls,
        num_senders=connection.execute("SELECT count(DISTINCT rank) FROM calls").fetchone()[0],
        route_bytes=num_bytes,
        route_calls=num_calls,
        note=note.strip(),
    )


class _RankSet(NamedTuple):
    """Ranks with equal collectives, of which those of `example` are shown."""

    ranks: list[int]
    example: int
    num_calls: int  # of each rank


def _find_rank_sets(connection: Any, columns: list[str], ranks: tuple[int, ...]) -> list[_RankSet]:
    """Ranks with equal collectives, as far as these columns tell, by their first rank."""
    sql = _PROFILES.format(columns=", ".join(f'"{name}"' for name in columns))
    rows = {rank: row for rank, *row in connection.execute(sql).fetchall()}
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in sorted({*ranks, *rows}):
        num_calls, profile, _ = rows.get(rank, (0, 0, 0))
        members[num_calls, profile].append(rank)
    rank_sets = []
    for (num_calls, _), equal_ranks in members.items():
        sent = {rank: rows[rank][2] if rank in rows else 0 for rank in equal_ranks}
        example = max(equal_ranks, key=lambda rank: (sent[rank], -rank))
        rank_sets.append(_RankSet(equal_ranks, example, num_calls))
    return rank_sets


def _count_calls(rank_sets: list[_RankSet]) -> int:
    return sum(rank_set.num_calls for rank_set in rank_sets)


def _limit_calls(rank_sets: list[_RankSet]) -> tuple[list[_RankSet], int]:
    """As many sets as may become records, and the number of ranks of those left out."""
    included, num_missing, num_calls = [], 0, 0
    for rank_set in sorted(rank_sets, key=lambda rank_set: -len(rank_set.ranks)):
        if num_calls and num_calls + rank_set.num_calls > MAX_RECORDS:
            num_missing += len(rank_set.ranks)
        else:
            num_calls += rank_set.num_calls
            included.append(rank_set)
    return sorted(included, key=lambda rank_set: rank_set.ranks[0]), num_missing


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
