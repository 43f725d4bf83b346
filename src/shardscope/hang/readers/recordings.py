"""Reads our own recordings and streams as evidence: calls with module, phase and line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import final

from shardscope.hang.evidence import (
    TRANSFERS,
    CallColumns,
    CallSignature,
    CallSite,
    ColumnBuilder,
    FileFormat,
    FileReport,
    GroupFact,
    RankEvidence,
    count_dropped,
    find_last_activity,
)
from shardscope.record.base import CollectiveKind
from shardscope.record.codec import load
from shardscope.record.ranks import count_ranks, expand_ranks
from shardscope.record.recording import (
    Call,
    Collective,
    DroppedCollectives,
    Gap,
    Group,
    RankProcess,
    Recording,
)


def read_recording(path: str, *, is_stream: bool) -> FileReport:
    """The evidence of each rank of a recording or stream."""
    recording = load(path)
    file_format = FileFormat.STREAM if is_stream else FileFormat.RECORDING
    calls: defaultdict[int, list[Collective]] = defaultdict(list)
    for call in recording.collectives:
        calls[call.rank].append(call)
    processes = {process.rank: process for process in recording.processes}
    seen_ns = find_last_activity(recording, {stop.rank: stop for stop in recording.stops})
    ranks = tuple(
        _RankReader(path, file_format, recording, rank, processes.get(rank), seen_ns).read(
            calls[rank]
        )
        for rank in expand_ranks(recording.run.ranks)
    )
    gaps = tuple(gap for gap in recording.gaps if not _is_about_end(gap))
    detail = "simulated" if recording.run.is_simulated else ""
    return FileReport(path=path, format=file_format, ranks=ranks, gaps=gaps, detail=detail)


def _is_about_end(gap: Gap) -> bool:
    """Whether a gap only says how a trace ended: those of a hang have no end, or an error."""
    return gap.fact.startswith(
        ("the stream has no end", "it ended early with ", "still open where the stream stops")
    )


@final
class _RankReader:
    """Puts the calls of a rank into columns."""

    def __init__(
        self,
        path: str,
        file_format: FileFormat,
        recording: Recording,
        rank: int,
        process: RankProcess | None,
        seen_ns: Mapping[tuple[int, str], int],
    ) -> None:
        self._path, self._format, self._recording, self._rank = path, file_format, recording, rank
        self._process = process
        self._seen_ns = seen_ns
        self._signatures: dict[CallSignature, int] = {}
        self._sites: dict[CallSite, int] = {CallSite(): 0}
        own = [group for group in recording.groups if _has_rank(group, rank)]
        self._groups = {group.name: index for index, group in enumerate(own)}
        self._facts = [_describe_group(group) for group in own]
        self._dropped: defaultdict[str, list[DroppedCollectives]] = defaultdict(list)
        for record in recording.dropped:
            if record.rank == rank:
                self._dropped[record.group].append(record)

    def read(self, calls: list[Collective]) -> RankEvidence:
        """The evidence of the rank."""
        recording, rank = self._recording, self._rank
        calls = sorted(calls, key=lambda call: call.order)
        by_group: defaultdict[str, list[Collective]] = defaultdict(list)
        for call in calls:
            by_group[call.group].append(call)
        start_ns = 0 if self._process is None else self._process.started_unix_ns or 0
        is_complete = True
        columns = []
        for name, own in by_group.items():
            group = self._find_group(name, own[0])
            group_columns, has_all = self._read_group(group, own, start_ns)
            columns.append(group_columns)
            is_complete = is_complete and has_all
        silent = set(self._groups.values()) - {group.group for group in columns}
        columns.extend(self._read_group(group, [], start_ns)[0] for group in sorted(silent))
        stop = next((stop for stop in recording.stops if stop.rank == rank), None)
        losses = [gap for gap in recording.gaps if gap.is_loss and gap.rank in (rank, None)]
        is_lossy = bool(losses) and not (stop is not None and stop.is_gapless)
        times = [call.start_ns + start_ns for call in calls if call.start_ns is not None]
        return RankEvidence(
            path=self._path,
            format=self._format,
            rank=rank,
            host="" if self._process is None else self._process.host,
            pid=None if self._process is None else self._process.pid,
            world_size=recording.run.world_size,
            groups=tuple(self._facts),
            signatures=tuple(self._signatures),
            sites=tuple(self._sites),
            columns=tuple(columns),
            is_wrapped=bool(self._dropped),
            is_complete=is_complete and not is_lossy,
            is_finished=stop is None and not is_lossy,
            has_sites=True,
            first_ns=min(times, default=0) if start_ns else 0,
            last_ns=max(times, default=0) if start_ns else 0,
            version=recording.run.torch_version,
            stop=stop,
            seen_ns=tuple(
                (thread, time_ns + start_ns)
                for (seen_rank, thread), time_ns in self._seen_ns.items()
                if seen_rank == rank
            ),
        )

    def _find_group(self, name: str, call: Collective) -> int:
        """The number of a group; one that the recording does not describe gets a number here."""
        if name not in self._groups:
            self._groups[name] = len(self._facts)
            self._facts.append(GroupFact(name, label=name, size=call.num_ranks))
        return self._groups[name]

    def _read_group(
        self, group: int, calls: list[Collective], start_ns: int
    ) -> tuple[CallColumns, bool]:
        """The columns of a group, and whether no call before the last is missing."""
        builder = ColumnBuilder(group)
        builder.dropped = tuple(self._dropped.get(self._facts[group].label, ()))
        is_complete = True
        transfers, builder.num_issued = count_dropped(builder.dropped)
        num_transfers = sum(transfers.values())
        position = builder.num_issued + num_transfers - 1
        has_transfers = any(call.kind in TRANSFERS for call in calls)
        in_order = sorted(calls, key=lambda call: call.group_order)
        for expected, call in enumerate(in_order, position + 1):
            position = max(position + 1, call.group_order)
            if position > expected:
                is_complete = False
                if has_transfers:
                    break  # missing calls may be of either kind, so later positions are unknown
            signature = self._signatures.setdefault(_make_signature(call), len(self._signatures))
            site = self._sites.setdefault(_make_site(call), len(self._sites))
            # When a call has returned does not say whether it was asynchronous, so not that it is
            # done.
            times = (0 if call.start_ns is None else call.start_ns + start_ns, 0, 0, 0)
            if call.kind in TRANSFERS:
                num_transfers += 1
                builder.add_transfer(call.order, signature, site, 0, times)
            else:
                builder.add(position - num_transfers, call.order, signature, site, 0, times)
        return builder.build(), is_complete


def _has_rank(group: Group, rank: int) -> bool:
    return any(rank in span.as_range() for span in group.ranks)


def _describe_group(group: Group) -> GroupFact:
    is_listed = count_ranks(group.ranks) == group.num_ranks
    ranks = expand_ranks(group.ranks) if is_listed else None
    return GroupFact(
        group.torch_name or group.name,
        group.axis or "",
        ranks,
        label=group.name,
        backend=group.backend,
        size=group.num_ranks,
    )


def _make_signature(call: Collective) -> CallSignature:
    return CallSignature(
        kind=call.kind,
        op=call.op,
        dtype=call.dtype,
        input_bytes=call.input_bytes,
        output_bytes=call.output_bytes,
        reduce_op=call.reduce_op,
        peer=call.peer,
        is_rooted=True,
        is_from_any=call.kind is CollectiveKind.RECV and call.peer is None,
    )


def _make_site(call: Collective) -> CallSite:
    api = call.cause.api if isinstance(call.cause, Call) else ""
    return CallSite(call.source, True, call.owner, call.phase, api, call.thread)
