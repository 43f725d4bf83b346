"""Reads dumps of torch's Flight Recorder: pickles and JSON, of NCCL, gloo and other backends.

An entry's sequence number is the position of the collective in its group, counted from 1. The dump
does not say which rank wrote it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter, lt
from typing import Annotated, Any, final

import msgspec
from msgspec import Meta, Struct

from shardscope.errors import RecordingError
from shardscope.hang.evidence import (
    CallColumns,
    CallSignature,
    CallSite,
    CallState,
    ColumnBuilder,
    FileFormat,
    GroupFact,
    RankEvidence,
)
from shardscope.hang.evidence.names import find_dtype, find_kind, is_library_file, make_source
from shardscope.hang.readers.plain_pickle import PickleError, repair_truncated, unpickle
from shardscope.record.base import CollectiveKind
from shardscope.record.ranks import MAX_RANKS
from shardscope.record.recording import Gap
from shardscope.record.text import excerpt

MAX_JSON_BYTES = 512 * 1024**2
_Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Sizes = tuple[tuple[_Integer, ...], ...]
_NUMBER = re.compile(r"\d{1,9}")
_MAX_FRAMES = 200  # of a stack
_PEERS = re.compile(r"(\d+|\?)\s*(->|<-)\s*(\d+|\?)")
_ENTRIES = re.compile(rb'"entries"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_NOT_FLIGHT = "it has no entries of Flight Recorder"
_SIZES = ("input_sizes", "output_sizes")
_LISTS = (*_SIZES, "input_dtypes", "output_dtypes", "frames")


class _Entry(Struct, gc=False):
    """The fields of an entry that are compared."""

    record_id: _Integer
    process_group: tuple[str, str]
    profiling_name: str
    collective_seq_id: _Integer
    time_created_ns: _Integer
    state: str
    input_sizes: _Sizes
    output_sizes: _Sizes
    pg_id: _Integer = 0
    p2p_seq_id: _Integer = 0
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    is_p2p: bool = False
    retired: bool = False
    duration_ms: float | None = None
    time_discovered_started_ns: _Integer | None = None
    time_discovered_completed_ns: _Integer | None = None
    thread_id: str = ""


class _GroupStatus(Struct, gc=False):
    last_enqueued_collective: _Integer = -1
    last_completed_collective: _Integer = -1


class _GroupConfig(Struct, gc=False):
    name: str = ""
    desc: str = ""
    ranks: str | list[_Integer] = ""


class _Dump(Struct):
    entries: list[_Entry] = []
    version: str | None = None
    pg_config: dict[str, _GroupConfig] = {}
    pg_status: dict[str, _GroupStatus] = {}


class _Header(Struct):
    """A dump without its entries."""

    version: str | None = None
    pg_config: dict[str, _GroupConfig] = {}
    pg_status: dict[str, _GroupStatus] = {}


_DECODER = msgspec.json.Decoder(_Dump, strict=False)
_ENTRY_DECODER = msgspec.json.Decoder(_Entry, strict=False)


def read_pickle(data: bytes, path: str) -> tuple[RankEvidence, list[Gap]]:
    """The calls of a pickled dump, and gaps for what is damaged.

    Args:
        data: The bytes of the file.
        path: What gaps call the file.
    """
    gaps = []
    try:
        dump = unpickle(data)
    except PickleError as error:
        repaired = repair_truncated(data) if error.end else None
        if repaired is None:
            raise RecordingError(f"'{path}' is not read: {error}.") from error
        dump = unpickle(repaired)
        gaps.append(
            _make_gap(path, "it is truncated: calls after its last complete entry are lost")
        )
    if not isinstance(dump, dict) or not isinstance(entries := dump.get("entries", []), list):
        raise RecordingError(f"'{path}' is not read: {_NOT_FLIGHT}.")
    _check_size(dump, entries, len(data), path)
    header = _convert(dict(dump, entries=None), _Header, path)
    typed, num_damaged = _convert_entries(entries)
    gaps.extend(_describe_damaged(path, num_damaged, len(entries)))
    frames = _list_values(entries, "frames") if not num_damaged else []
    reader = _Reader(path, header.pg_config)
    evidence = reader.read(typed, frames, header.pg_status, header.version or "")
    return _complete(evidence, is_complete=not gaps), gaps


def read_json(data: bytes, path: str) -> tuple[RankEvidence, list[Gap]]:
    """The same of a dump in JSON."""
    gaps: list[Gap] = []
    try:
        dump = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        match = _ENTRIES.search(data)
        if match is None:
            raise RecordingError(f"'{path}' is not read: {excerpt(str(error))}.") from error
        typed, num_damaged = _decode_entries(data[match.end() :])
        dump = _Dump(entries=typed)
        gaps.append(
            _make_gap(
                path,
                f"it is truncated or damaged: {len(typed):,} of its entries were read, "
                f"{num_damaged} could not be, and what follows them is lost",
            )
        )
    reader = _Reader(path, dump.pg_config)
    evidence = reader.read(dump.entries, [], dump.pg_status, dump.version or "")
    return _complete(evidence, is_complete=not gaps), gaps


def _complete(evidence: RankEvidence, *, is_complete: bool) -> RankEvidence:
    # A dump without calls may be of a recorder that was off.
    has_calls = any(map(len, evidence.columns))
    return msgspec.structs.replace(evidence, is_complete=is_complete and has_calls)


def _check_size(dump: dict[Any, Any], entries: list[Any], num_bytes: int, path: str) -> None:
    """Refuse a dump whose lists are shared so often that reading them all would take hours."""
    total = len(entries) + len(dump.get("pg_config") or ())
    try:
        for name in _LISTS:
            total += sum(map(len, _list_values(entries, name)))
        if total <= num_bytes:
            for name in _SIZES:
                total += sum(map(len, chain.from_iterable(_list_values(entries, name))))
    except (TypeError, AttributeError) as error:
        raise RecordingError(f"'{path}' is not read: {_NOT_FLIGHT}.") from error
    if total > num_bytes:
        raise RecordingError(f"'{path}' is not read: it repeats itself without end.")


def _list_values(entries: list[Any], name: str) -> list[Any]:
    try:
        return list(map(itemgetter(name), entries))
    except KeyError:
        return [entry.get(name, ()) for entry in entries]


def _convert(value: Any, kind: type[_Header], path: str) -> _Header:
    try:
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise RecordingError(f"'{path}' is not read: {excerpt(str(error))}.") from error


def _convert_entries(entries: list[Any]) -> tuple[list[_Entry], int]:
    try:
        return msgspec.convert(entries, list[_Entry], strict=False), 0
    except (msgspec.MsgspecError, RecursionError, ValueError):
        typed = []
        for entry in entries:
            try:
                typed.append(msgspec.convert(entry, _Entry, strict=False))
            except (msgspec.MsgspecError, RecursionError, ValueError):
                continue
        return typed, len(entries) - len(typed)


def _decode_entries(data: bytes) -> tuple[list[_Entry], int]:
    """The entries of a list that does not end, and how many cannot be read."""
    typed: list[_Entry] = []
    num_damaged, start = 0, 0
    for match in _BETWEEN.finditer(data):
        piece, start = data[start : match.start() + 1], match.end()
        try:
            typed.append(_ENTRY_DECODER.decode(piece))
        except (msgspec.MsgspecError, RecursionError, ValueError):
            num_damaged += 1
    return typed, num_damaged + 1


def _describe_damaged(path: str, num_damaged: int, num_entries: int) -> Iterable[Gap]:
    if num_damaged:
        yield _make_gap(path, f"{num_damaged:,} of its {num_entries:,} entries cannot be read")


def _make_gap(path: str, fact: str) -> Gap:
    return Gap(place=path, fact=fact, is_loss=True)


@final
class _Reader:
    """Sorts entries into columns, one set for each group."""

    def __init__(self, path: str, configs: dict[str, _GroupConfig]) -> None:
        self._path = path
        self._members = {
            config.name: _read_ranks(config.ranks) for config in configs.values() if config.name
        }
        self._groups: list[GroupFact] = []
        self._builders: list[ColumnBuilder] = []
        self._group_ids: dict[tuple[str, str], int] = {}
        self._signatures: list[CallSignature] = []
        self._signature_ids: dict[Any, int] = {}
        self._combined: dict[tuple[int, int], int] = {}
        self._sites: list[CallSite] = [CallSite()]
        self._site_ids: dict[Any, int] = {(): 0}
        self._batches: dict[int, tuple[int, list[int]]] = {}  # by group: its last p2p number

    def read(
        self,
        entries: Sequence[_Entry],
        frames: Sequence[Any],
        statuses: dict[str, _GroupStatus],
        version: str,
    ) -> RankEvidence:
        """The evidence of a dump."""
        has_done = any(entry.state == "completed" for entry in entries)
        sites = self._find_sites(frames) if frames else [0] * len(entries)
        by_group: defaultdict[tuple[str, str], tuple[list[_Entry], list[int]]]
        by_group = defaultdict(lambda: ([], []))
        for entry, site in zip(entries, sites, strict=True):
            own = by_group[entry.process_group]
            own[0].append(entry)
            own[1].append(site)
        for names, (own_entries, own_sites) in by_group.items():
            group = self._add_group(names, own_entries[0].profiling_name)
            self._add_calls(group, own_entries, own_sites, has_done=has_done)
        self._read_statuses(entries, statuses)
        self._add_silent_groups()
        created = [entry.time_created_ns for entry in entries]
        is_gloo = any(entry.profiling_name.startswith("gloo:") for entry in entries)
        return RankEvidence(
            path=self._path,
            format=FileFormat.FLIGHT_RECORDER,
            groups=tuple(self._groups),
            signatures=tuple(self._signatures),
            sites=tuple(self._sites),
            columns=tuple(_count_done(builder) for builder in self._builders),
            is_wrapped=bool(entries) and entries[0].record_id > 0,
            has_sites=len(self._sites) > 1,
            has_states=has_done or is_gloo,
            has_start_times=any(entry.time_discovered_started_ns for entry in entries),
            first_ns=min(created, default=0),
            last_ns=max(created, default=0),
            version=version,
        )

    def _add_group(self, names: tuple[str, str], profiling_name: str) -> int:
        group = self._group_ids[names] = len(self._groups)
        name, description = names
        ranks = self._members.get(name)
        backend = profiling_name.rpartition(":")[0]
        self._groups.append(GroupFact(name, _describe(description), ranks, backend=backend))
        self._builders.append(ColumnBuilder(group))
        return group

    def _add_calls(
        self, group: int, entries: list[_Entry], sites: list[int], *, has_done: bool
    ) -> None:
        """The calls of a group; those that torch issued together share a sequence number."""
        # Sequence numbers begin at 1.
        positions = [entry.collective_seq_id - 1 for entry in entries]
        is_plain = positions[0] >= 0 and all(map(lt, positions, positions[1:]))
        if is_plain and not any(entry.is_p2p for entry in entries):
            self._builders[group].extend(
                positions,
                [entry.record_id for entry in entries],
                self._find_signatures(entries),
                sites,
                [_find_state(entry, has_done) for entry in entries],
                (
                    [entry.time_created_ns for entry in entries],
                    [entry.time_discovered_started_ns or 0 for entry in entries],
                    [entry.time_discovered_completed_ns or 0 for entry in entries],
                    [_to_ns(entry.duration_ms) for entry in entries],
                ),
            )
            return
        self._add_in_turn(group, entries, sites, has_done=has_done)

    def _add_in_turn(
        self, group: int, entries: list[_Entry], sites: list[int], *, has_done: bool
    ) -> None:
        builder = self._builders[group]
        last = -1
        signatures = self._find_signatures(entries)
        for entry, signature, site in zip(entries, signatures, sites, strict=True):
            state = _find_state(entry, has_done)
            times = (
                entry.time_created_ns,
                entry.time_discovered_started_ns or 0,
                entry.time_discovered_completed_ns or 0,
                _to_ns(entry.duration_ms),
            )
            is_end = entry.profiling_name.endswith("coalesced")
            position = entry.collective_seq_id - 1
            if entry.is_p2p:
                self._add_transfer(entry, group, signature, site, state, times, is_end=is_end)
            elif position != last or position < 0:
                last = position
                builder.add(max(0, position), entry.record_id, signature, site, state, times)
            else:
                builder.set_state(-1, state, times)
                if not is_end:
                    combined = self._combine(builder.signature_at(-1), signature)
                    builder.set_signature(-1, combined)

    def _add_transfer(
        self,
        entry: _Entry,
        group: int,
        signature: int,
        site: int,
        state: int,
        times: tuple[int, int, int, int],
        *,
        is_end: bool,
    ) -> None:
        """A send or receive; transfers issued together complete with the entry that ends them."""
        builder = self._builders[group]
        number, batch = self._batches.get(group, (-1, []))
        if number != entry.p2p_seq_id:
            batch = []
            self._batches[group] = entry.p2p_seq_id, batch
        if is_end:
            for index in batch:
                builder.set_state(index, state, times)
            return
        batch.append(builder.add_transfer(entry.record_id, signature, site, state, times))

    def _add_silent_groups(self) -> None:
        """Groups that the dump names and that have no entries: the rank may have issued nothing."""
        known = {fact.name for fact in self._groups}
        for name, ranks in self._members.items():
            if name not in known and ranks:
                self._groups.append(GroupFact(name, "", ranks))
                self._builders.append(ColumnBuilder(len(self._groups) - 1))

    def _find_signatures(self, entries: list[_Entry]) -> list[int]:
        numbers: list[int] = []
        known = self._signature_ids
        for entry in entries:
            key = (
                entry.profiling_name,
                entry.process_group,
                entry.input_sizes,
                entry.output_sizes,
                entry.input_dtypes,
                entry.output_dtypes,
            )
            number = known.get(key)
            if number is None:
                number = known[key] = len(self._signatures)
                self._signatures.append(self._make_signature(entry))
            numbers.append(number)
        return numbers

    def _make_signature(self, entry: _Entry) -> CallSignature:
        name = entry.profiling_name
        kind = find_kind(name.partition(" ")[0])
        dtypes = entry.input_dtypes or entry.output_dtypes
        peer, is_from_any = None, False
        if kind in (CollectiveKind.SEND, CollectiveKind.RECV):
            peer, is_from_any = self._find_peer(name, entry.process_group)
        return CallSignature(
            kind=kind,
            op=name,
            dtype=find_dtype(dtypes[0])[0] if dtypes else "",
            input_bytes=_count_bytes(entry.input_sizes, entry.input_dtypes),
            output_bytes=_count_bytes(entry.output_sizes, entry.output_dtypes),
            peer=peer,
            is_from_any=is_from_any,
        )

    def _find_peer(self, name: str, group: tuple[str, str]) -> tuple[int | None, bool]:
        """The global rank at the other end, if it is known, and whether any rank may be."""
        match = _PEERS.search(name)
        if match is None:
            return None, False
        if match[3] == "?":
            return None, True
        peer = int(match[3]) if len(match[3]) < 10 else MAX_RANKS
        members = self._members.get(group[0])
        if members:
            return (members[peer], False) if peer < len(members) else (None, False)
        return (peer if _is_default(group) and peer < MAX_RANKS else None), False

    def _combine(self, first: int, second: int) -> int:
        """The signature of two collectives that were issued together."""
        number = self._combined.get((first, second))
        if number is None:
            number = self._combined[first, second] = len(self._signatures)
            a, b = self._signatures[first], self._signatures[second]
            sizes = {
                field: None if x is None or y is None else x + y
                for field, x, y in (
                    ("input_bytes", a.input_bytes, b.input_bytes),
                    ("output_bytes", a.output_bytes, b.output_bytes),
                )
            }
            op = a.op if a.op.startswith(b.op) else f"{a.op}, {b.op}"
            self._signatures.append(msgspec.structs.replace(a, op=op, **sizes))
        return number

    def _find_sites(self, stacks: Sequence[Any]) -> list[int]:
        """The line of the program that issued each call; stacks share their frames in memory."""
        known = self._site_ids
        numbers: list[int] = []
        for frames in stacks:
            if not isinstance(frames, list) or not frames:
                numbers.append(0)
                continue
            key = tuple(map(id, frames if len(frames) <= _MAX_FRAMES else frames[:_MAX_FRAMES]))
            number = known.get(key)
            if number is None:
                number = known[key] = len(self._sites)
                self._sites.append(CallSite(_find_line(frames)))
            numbers.append(number)
        return numbers

    def _read_statuses(self, entries: Sequence[_Entry], statuses: dict[str, _GroupStatus]) -> None:
        """How many collectives a group has enqueued, also where none of them is in the dump.

        Only NCCL counts them so; gloo counts other calls too.
        """
        names = {str(entry.pg_id): entry.process_group for entry in entries}
        with_transfers = {entry.process_group for entry in entries if entry.is_p2p}
        for number, status in statuses.items():
            group = names.get(number)
            if group is None or group in with_transfers:
                continue
            builder = self._builders[self._group_ids[group]]
            if self._groups[self._group_ids[group]].backend.startswith("gloo"):
                continue
            builder.num_issued = max(
                builder.num_issued, min(status.last_enqueued_collective, 2**62)
            )
            builder.num_done = max(0, min(status.last_completed_collective, 2**62))


def _to_ns(duration_ms: float | None) -> int:
    return round(duration_ms * 1e6) if duration_ms is not None and 0 < duration_ms < 1e12 else 0


def _count_done(builder: ColumnBuilder) -> CallColumns:
    columns = builder.build()
    done = columns.states.rfind(bytes([CallState.DONE]))
    positions = memoryview(columns.positions).cast("q")
    while done >= 0 and positions[done] < 0:
        done = columns.states.rfind(bytes([CallState.DONE]), 0, done)
    if done < 0:
        return columns
    return msgspec.structs.replace(
        columns, num_done=max(columns.num_done or 0, positions[done] + 1)
    )


def _find_state(entry: _Entry, has_done: bool) -> int:
    if entry.state == "completed":
        return CallState.DONE
    if entry.profiling_name.startswith("gloo:"):
        # gloo tells completion only by retiring the entry.
        return CallState.DONE if entry.retired else CallState.ISSUED
    if entry.retired:
        return CallState.FAILED if has_done else CallState.UNKNOWN
    return CallState.STARTED if entry.state == "started" else CallState.ISSUED


def _read_ranks(text: str | list[int]) -> tuple[int, ...] | None:
    """The ranks of a group, from text such as `[0, 8, 16]`; None if it lists none."""
    numbers = text if isinstance(text, list) else [int(number) for number in _NUMBER.findall(text)]
    ranks = tuple(number for number in numbers if 0 <= number < MAX_RANKS)
    return ranks or None


def _is_default(group: tuple[str, str]) -> bool:
    return group[1] in ("default_pg", "") and group[0] in ("0", "", "default_pg")


def _describe(description: str) -> str:
    return "" if description == "undefined" else description


def _count_bytes(sizes: _Sizes, dtypes: tuple[str, ...]) -> int | None:
    """The bytes of tensors; None if their dtypes or sizes are not known."""
    if not sizes or not dtypes:
        return 0 if sizes == () and dtypes == () else None
    total = 0
    for index, size in enumerate(sizes):
        num_bytes = find_dtype(dtypes[min(index, len(dtypes) - 1)])[1]
        if num_bytes is None:
            return None
        for length in size:
            num_bytes *= length
            if not 0 <= num_bytes < 2**62:
                return None
        total += num_bytes
    return total if total < 2**62 else None


def _find_line(frames: list[Any]) -> Any:
    """The innermost frame outside of torch as a source line, None if there is none."""
    for frame in frames[:_MAX_FRAMES]:
        if not isinstance(frame, dict):
            continue
        file, line = frame.get("filename"), frame.get("line")
        if isinstance(file, str) and isinstance(line, int) and not is_library_file(file):
            return make_source(file, min(line, 2**31), str(frame.get("name", "")))
    return None
