"""Joins the process groups that files name into groups of the run, and the calls of their ranks.

Torch's names of groups are the same on all ranks; NCCL's communicators have hashes. Files that do
not list the members of a group show them only by the calls that ranks issued in it.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import final

from msgspec import Struct

from shardscope.hang.combine import RankFiles
from shardscope.hang.dumped_calls import DumpedCall, DumpedCollectives, RankColumns
from shardscope.hang.evidence import (
    CallColumns,
    CallState,
    FileFormat,
    GroupFact,
    RankEvidence,
    count_dropped,
)
from shardscope.hang.mismatch import Facets, facets_of
from shardscope.hang.rank_calls import GroupCalls, IssuedCall, RankCalls
from shardscope.record.base import CollectiveKind
from shardscope.record.ranks import compress_ranks, format_ranks

_OWN = (FileFormat.STREAM, FileFormat.RECORDING)
_NCCL = (FileFormat.NCCL_LOG, FileFormat.NCCL_RAS)
_MAX_NAME = 60
# Collectives that a rank may leave before the others have entered them.
_RETURNING_EARLY = (
    CollectiveKind.BROADCAST,
    CollectiveKind.SCATTER,
    CollectiveKind.REDUCE,
    CollectiveKind.GATHER,
    None,
)


class RunGroup(Struct):
    """A group of the run. `has_members` says whether a file lists its members."""

    key: tuple[str, str, tuple[int, ...] | None]
    name: str
    description: str
    members: tuple[int, ...]
    has_members: bool
    is_inferred: bool
    size: int | None
    backend: str
    format: FileFormat
    columns: dict[int, RankColumns]
    calls: GroupCalls
    stale: tuple[int, ...] = ()

    @property
    def axis(self) -> str:
        """What groups of the same role share: their description."""
        return self.description or self.name


class _Use(Struct, frozen=True):
    """A rank's evidence on a group."""

    rank: int
    evidence: RankEvidence
    fact: GroupFact
    columns: CallColumns | None


def join_groups(ranks: Mapping[int, RankFiles], world_size: int | None) -> dict[str, RunGroup]:
    """The groups of a run by readable names, with the calls of each rank in them."""
    uses = _sort_uses(ranks)
    clusters = [
        _Cluster(key, cluster_uses, world_size) for key, cluster_uses in _split_by_members(uses)
    ]
    _infer_members(clusters)
    names = _name_clusters(clusters)
    table: dict[Facets, int] = {}
    groups = {}
    for cluster in clusters:
        name = names[id(cluster)]
        groups[name] = cluster.build(name, ranks, table)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1].members), item[0])))


def _sort_uses(ranks: Mapping[int, RankFiles]) -> dict[tuple[str, str], list[_Use]]:
    """The uses of groups by family (torch's or NCCL's names) and name."""
    uses: defaultdict[tuple[str, str], list[_Use]] = defaultdict(list)
    for rank, files in ranks.items():
        for evidence in files.with_calls:
            family = "nccl" if evidence.format in _NCCL else "torch"
            columns = {column.group: column for column in evidence.columns}
            for index, fact in enumerate(evidence.groups):
                use = _Use(rank, evidence, fact, columns.get(index))
                uses[family, fact.name].append(use)
    return dict(uses)


def _split_by_members(
    uses: Mapping[tuple[str, str], list[_Use]],
) -> Iterator[tuple[tuple[str, str, tuple[int, ...] | None], list[_Use]]]:
    """Groups of one name that have different members are different groups."""
    for (family, name), named in uses.items():
        by_members: defaultdict[tuple[int, ...] | None, list[_Use]] = defaultdict(list)
        for use in named:
            by_members[use.fact.ranks].append(use)
        unlisted = by_members.pop(None, [])
        for use in unlisted:
            fitting = [members for members in by_members if members and use.rank in members]
            by_members[fitting[0] if len(fitting) == 1 else None].append(use)
        for members, found in by_members.items():
            yield (family, name, members), found


@final
class _Cluster:
    """The uses of a group by all ranks."""

    def __init__(
        self,
        key: tuple[str, str, tuple[int, ...] | None],
        uses: list[_Use],
        world_size: int | None,
    ) -> None:
        self.key, self.uses = key, uses
        facts = [use.fact for use in uses]
        self.label = next((fact.label for fact in facts if fact.label), "")
        self.description = _clean(next((f.description for f in facts if f.description), ""))
        self.backend = next((fact.backend for fact in facts if fact.backend), "")
        self.size = next((fact.size for fact in facts if fact.size), None)
        self.is_world = self.description == "world" or (
            world_size is not None and self.size == world_size
        )
        self.members = key[2]
        self.has_members = self.members is not None
        self.is_inferred = False
        self.format = self._choose_format()
        if self.members is None and self.is_world and world_size is not None:
            self.members, self.has_members = tuple(range(world_size)), True

    def _choose_format(self) -> FileFormat:
        """The format that most ranks have calls of this group in."""
        counts = Counter(use.evidence.format for use in self.uses if use.columns is not None)
        order = list(FileFormat)
        order.sort(key=lambda file_format: file_format in (FileFormat.LOG, FileFormat.NCCL_RAS))
        return max(order, key=lambda file_format: counts[file_format])

    @property
    def observed(self) -> tuple[int, ...]:
        """The ranks that issued something in the group, or whose files name it."""
        return tuple(sorted({use.rank for use in self.uses if use.evidence.format is self.format}))

    def build(
        self, name: str, ranks: Mapping[int, RankFiles], table: dict[Facets, int]
    ) -> RunGroup:
        """The group with the calls of its ranks."""
        members = self.members if self.members is not None else self.observed
        size = len(members) if self.has_members else self.size
        columns: dict[int, RankColumns] = {}
        by_rank: dict[int, _Use] = {}
        for use in self.uses:
            if use.evidence.format is self.format:
                by_rank.setdefault(use.rank, use)
        calls: GroupCalls = {}
        num_ranks = size or len(members)
        for rank in members:
            own = by_rank.get(rank)
            evidence = own.evidence if own is not None else _find_evidence(ranks, rank, self.format)
            if evidence is None:
                continue
            column = None if own is None else own.columns
            if column is None:
                calls[rank] = _make_silent(evidence)
                continue
            columns[rank] = RankColumns(
                rank, name, num_ranks, column, evidence.signatures, evidence.sites
            )
            calls[rank] = _make_calls(columns[rank], evidence, table)
        stale = _find_stale(calls, columns)
        for rank in stale:
            calls[rank] = _forget(calls[rank])
        return RunGroup(
            key=self.key,
            name=name,
            description=self.description,
            members=members,
            has_members=self.has_members,
            is_inferred=self.is_inferred,
            size=size,
            backend=self.backend,
            format=self.format,
            columns=columns,
            calls=calls,
            stale=stale,
        )


def _find_evidence(
    ranks: Mapping[int, RankFiles], rank: int, file_format: FileFormat
) -> RankEvidence | None:
    """A rank's evidence in a format, which does not name the group."""
    files = ranks.get(rank)
    if files is None:
        return None
    return next((piece for piece in files.with_calls if piece.format is file_format), None)


def _make_silent(evidence: RankEvidence) -> RankCalls:
    """The calls of a rank whose file has none in this group."""
    is_known = (
        evidence.is_complete
        and not _has_uncounted(evidence)
        and evidence.format not in (FileFormat.LOG, *_NCCL)
    )
    return RankCalls({}, [], is_known, is_known and evidence.is_finished)


def _make_calls(
    columns: RankColumns, evidence: RankEvidence, table: dict[Facets, int]
) -> RankCalls:
    numbers = [
        table.setdefault(facets_of(signature), len(table) + 1) for signature in columns.signatures
    ]
    collectives = DumpedCollectives(columns)
    first, dense = collectives.map_signatures(numbers)
    has_calls = len(columns.columns) > 0
    is_known = evidence.is_complete and (
        has_calls or columns.columns.num_issued > 0 or not _has_uncounted(evidence)
    )
    dropped_transfers, _ = count_dropped(columns.columns.dropped)
    return RankCalls(
        collectives=collectives,
        transfers=list(_list_transfers(columns, evidence)),
        is_known=is_known,
        is_finished=is_known and evidence.is_finished,
        num_issued=columns.columns.num_issued,
        num_done=columns.columns.num_done or 0,
        first=first,
        facet_ids=array("I", dense).tobytes(),
        dropped=dropped_transfers,
    )


def _has_uncounted(evidence: RankEvidence) -> bool:
    """Whether calls were overwritten of which not even the number is known: streams count them."""
    return evidence.is_wrapped and evidence.format not in _OWN


def _list_transfers(columns: RankColumns, evidence: RankEvidence) -> Iterator[IssuedCall]:
    """Sends and receives; only those that have not completed, where that is recorded."""
    if not columns.columns.num_transfers:
        return
    states = columns.columns.states
    for index, position in enumerate(columns.positions):
        if position >= 0:
            continue
        if not evidence.has_states or states[index] != CallState.DONE:
            yield columns.make_call(index)


def _find_stale(calls: GroupCalls, columns: Mapping[int, RankColumns]) -> tuple[int, ...]:
    """Ranks whose file was written before they issued what has completed on another rank.

    A collective completes nowhere before all ranks have issued it.
    """
    done = max((_count_joined(column) for column in columns.values()), default=0)
    return tuple(
        rank
        for rank, rank_calls in calls.items()
        if rank_calls.is_known and rank_calls.num_collectives < done
    )


def _count_joined(column: RankColumns) -> int:
    """The positions up to the last collective that completed here, and so was issued everywhere."""
    states, positions = column.columns.states, column.positions
    index = states.rfind(bytes([CallState.DONE]))
    while index >= 0:
        kind = column.signatures[column.signature_ids[index]].kind
        if positions[index] >= 0 and kind not in _RETURNING_EARLY:
            return positions[index] + 1
        index = states.rfind(bytes([CallState.DONE]), 0, index)
    return 0


def _forget(calls: RankCalls) -> RankCalls:
    """Calls of a rank that may have issued more."""
    return RankCalls(
        calls.collectives,
        calls.transfers,
        is_known=False,
        is_finished=False,
        num_issued=calls.num_issued,
        num_done=calls.num_done,
        first=calls.first,
        facet_ids=calls.facet_ids,
        dropped=calls.dropped,
    )


def _infer_members(clusters: Iterable[_Cluster]) -> None:
    """Find members of groups that no file lists, from the groups of the same role.

    Groups of an axis of a mesh have equally many ranks, at equal distances. Where all groups that
    are complete fit such a mesh, so do the others.
    """
    by_axis: defaultdict[str, list[_Cluster]] = defaultdict(list)
    for cluster in clusters:
        if cluster.members is None and cluster.description and not cluster.is_world:
            by_axis[cluster.description].append(cluster)
    for siblings in by_axis.values():
        observed = [cluster.observed for cluster in siblings]
        size = max(map(len, observed))
        complete = [ranks for ranks in observed if len(ranks) == size]
        step = complete[0][1] - complete[0][0] if size > 1 else 0
        if size < 2 or any(_place(ranks[0], size, step) != ranks for ranks in complete):
            continue
        for cluster, ranks in zip(siblings, observed, strict=True):
            members = _place(ranks[0], size, step) if ranks else ()
            if len(ranks) < size and set(ranks) <= set(members):
                cluster.members = members
                cluster.is_inferred = True


def _place(rank: int, size: int, step: int) -> tuple[int, ...]:
    """The group of a rank along an axis of a mesh, whose ranks are `step` apart."""
    block = size * step
    first = rank // block * block + rank % step
    return tuple(range(first, first + block, step))


def _clean(description: str) -> str:
    """The axis that a description of torch names."""
    if description == "default_pg":
        return "world"
    return description.removeprefix("mesh_")[:_MAX_NAME]


def _name_clusters(clusters: list[_Cluster]) -> dict[int, str]:
    """Readable names: `tp[0-7]`; torch's name is added where two would have the same."""
    names: dict[int, str] = {}
    for cluster in clusters:
        if cluster.label:
            names[id(cluster)] = cluster.label
            continue
        members = cluster.members if cluster.members is not None else cluster.observed
        spans = format_ranks(compress_ranks(members))
        shown = f"[{spans}]" if len(spans) <= _MAX_NAME else f"[{len(members)} ranks]"
        base = cluster.description or ("world" if cluster.is_world else f"group {cluster.key[1]}")
        names[id(cluster)] = f"{base}{shown}"
    counts = Counter(names.values())
    for cluster in clusters:
        if counts[names[id(cluster)]] > 1:
            names[id(cluster)] += f" {cluster.key[1][:_MAX_NAME]}"
    counts = Counter(names.values())
    for index, cluster in enumerate(clusters):
        if counts[names[id(cluster)]] > 1:
            names[id(cluster)] += f" #{index}"
    return names


def find_last_calls(
    groups: Mapping[str, RunGroup],
) -> tuple[dict[int, DumpedCall], dict[tuple[int, str], DumpedCall]]:
    """The last call of each rank, and of each of its threads."""
    last: dict[int, DumpedCall] = {}
    on_thread: dict[tuple[int, str], DumpedCall] = {}
    for group in groups.values():
        for rank, columns in group.columns.items():
            for call in _list_last(columns):
                if rank not in last or last[rank].order < call.order:
                    last[rank] = call
                key = (rank, call.thread)
                if key not in on_thread or on_thread[key].order < call.order:
                    on_thread[key] = call
    return last, on_thread


def _list_last(columns: RankColumns) -> Iterator[DumpedCall]:
    """The last call in a group of each thread."""
    if not len(columns.columns):
        return
    threads = {site.thread for site in columns.sites} if columns.sites else {""}
    if len(threads) <= 1:
        yield columns.make_call(len(columns.columns) - 1)
        return
    seen: set[str] = set()
    for index in range(len(columns.columns) - 1, -1, -1):
        thread = columns.sites[columns.site_ids[index]].thread
        if thread not in seen:
            seen.add(thread)
            yield columns.make_call(index)
        if len(seen) == len(threads):
            return
