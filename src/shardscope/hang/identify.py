"""Finds out which rank each piece of evidence is of, by names of files and by what they hold.

Flight Recorder's dumps do not name their rank; their names do, sometimes with a host's name that
has numbers too. Stacks name a process, which another file may know as a rank.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from shardscope.hang.evidence import FileFormat, FileReport, RankEvidence, view_numbers
from shardscope.record.ranks import MAX_RANKS
from shardscope.record.recording import Gap

_NUMBER = re.compile(r"\d+")
_RANK = re.compile(r"rank[-_.=]?(\d{1,7})(?!\d)", re.IGNORECASE)
_COPY = re.compile(r"(?:\.(?:json|jsonl|pkl|pickle|txt|log|gz|bin|out|err|dump|html))+$")
_DATED = re.compile(r"_\d{8}_\d{6}$")
_FROM_END = 4  # numbers of a name that are tried, from its end
Extract = Callable[[str], int | None]

# Formats of which one file is one rank's.
_SINGLE = (
    FileFormat.FLIGHT_RECORDER,
    FileFormat.FAULTHANDLER,
    FileFormat.PY_SPY,
    FileFormat.LOG,
    FileFormat.TORCH_TRACE,
    FileFormat.NCCL_LOG,
)


def identify_ranks(
    reports: Sequence[FileReport],
) -> tuple[dict[int, list[RankEvidence]], list[RankEvidence], list[Gap]]:
    """Evidence by rank, evidence of no known rank, and gaps for files whose rank is not known."""
    by_name = _name_files(reports)
    pieces = [
        (file_report, _find_own(evidence, file_report, by_name))
        for file_report in reports
        for evidence in file_report.ranks
    ]
    world = _find_world(evidence for _, evidence in pieces)
    pieces = [(file_report, _find_in_world(piece, world)) for file_report, piece in pieces]
    processes = _find_processes(evidence for _, evidence in pieces)
    ranks: defaultdict[int, list[RankEvidence]] = defaultdict(list)
    unknown: list[RankEvidence] = []
    for _, evidence in pieces:
        rank = evidence.rank
        if rank is None and evidence.pid is not None:
            rank = processes.get((evidence.host, evidence.pid))
            if rank is None and not evidence.host:
                rank = _find_on_any_host(processes, evidence.pid)
        if rank is None or not 0 <= rank < MAX_RANKS:
            unknown.append(evidence)
        else:
            ranks[rank].append(replace(evidence, rank=rank))
    members = _list_members(ranks)
    for rank, found in ranks.items():
        ranks[rank] = [_name_members(evidence, members) for evidence in found]
    return dict(ranks), unknown, _describe_unknown(unknown)


def _find_own(
    evidence: RankEvidence, file_report: FileReport, by_name: dict[str, int]
) -> RankEvidence:
    """Evidence with the rank that its file's content or name says."""
    if evidence.rank is not None:
        return evidence
    members = _intersect_members(evidence)
    if members is not None and len(members) == 1:
        return replace(evidence, rank=next(iter(members)))
    is_single = file_report.format in _SINGLE and len(file_report.ranks) == 1
    rank = by_name.get(file_report.path) if is_single else None
    if rank is None and file_report.format is FileFormat.LOG and evidence.pid is None:
        # Lines that name no rank, in a log of which the name or other lines name one.
        named = {found.rank for found in file_report.ranks} - {None}
        rank = by_name.get(file_report.path) if len(named) <= 1 else None
        rank = rank if rank is not None else next(iter(named), None) if len(named) == 1 else None
    return evidence if rank is None else replace(evidence, rank=rank)


def _intersect_members(evidence: RankEvidence) -> set[int] | None:
    """The ranks that are in every group of a dump; None if it does not list members."""
    listed = [set(group.ranks) for group in evidence.groups if group.ranks]
    return set.intersection(*listed) if listed else None


def _find_world(pieces: Iterable[RankEvidence]) -> str | None:
    """A communicator of NCCL that has all ranks: the largest, if its ranks are the same in all.

    Several largest communicators may be those of several groups of the world.
    """
    sizes: dict[str, int] = {}
    members: defaultdict[tuple[str, int | None], dict[str, int]] = defaultdict(dict)
    for piece in pieces:
        for count in piece.counts:
            sizes[count.communicator] = count.size
            members[piece.host, piece.pid][count.communicator] = count.member
    largest = {name for name, size in sizes.items() if size == max(sizes.values())}
    for known in members.values():
        own = {known[name] for name in largest if name in known}
        if len(own) > 1 or not known.keys() >= largest:
            return None
    return min(largest, default=None)


def _find_in_world(evidence: RankEvidence, world: str | None) -> RankEvidence:
    """Evidence of a process with its rank in the communicator that has all ranks."""
    for count in evidence.counts if evidence.rank is None else ():
        if count.communicator == world:
            return replace(evidence, rank=count.member, world_size=count.size)
    return evidence


def _list_members(ranks: Mapping[int, list[RankEvidence]]) -> dict[str, dict[int, int]]:
    """By NCCL's communicator and rank in it, the rank in the world."""
    members: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for rank, pieces in ranks.items():
        for piece in pieces:
            for count in piece.counts:
                members[count.communicator][count.member] = rank
    return members


def _name_members(evidence: RankEvidence, members: Mapping[str, Mapping[int, int]]) -> RankEvidence:
    """Evidence of NCCL's with the ranks of the world: members of groups, and peers of calls."""
    if evidence.format not in (FileFormat.NCCL_LOG, FileFormat.NCCL_RAS):
        return evidence
    groups = list(evidence.groups)
    signatures = list(evidence.signatures)
    for index, group in enumerate(groups):
        known = members.get(group.name, {})
        if group.size is not None and len(known) == group.size:
            groups[index] = replace(group, ranks=tuple(known[own] for own in sorted(known)))
    for columns in evidence.columns:
        known = members.get(groups[columns.group].name, {})
        for number in set(view_numbers(columns.signatures)):
            signature = evidence.signatures[number]
            if signature.peer is not None:
                peer = known.get(signature.peer)
                signatures[number] = replace(signature, peer=peer, is_rooted=peer is not None)
    return replace(evidence, groups=tuple(groups), signatures=tuple(signatures))


def _name_files(reports: Iterable[FileReport]) -> dict[str, int]:
    """The rank of each file by its name, where the names of a set of files tell it."""
    sets: defaultdict[object, list[FileReport]] = defaultdict(list)
    for file_report in reports:
        if file_report.format in _SINGLE:
            plain = _plain_name(file_report.path)
            sets[file_report.format, file_report.path[len(plain) :]].append(file_report)
    ranks: dict[str, int] = {}
    for files in sets.values():
        extract = _choose_extract(files)
        if extract is not None:
            _apply(extract, files, ranks)
            continue
        by_start: defaultdict[str, list[FileReport]] = defaultdict(list)
        for file_report in files:
            by_start[_NUMBER.split(os.path.basename(file_report.path))[0]].append(file_report)
        for similar_files in by_start.values() if len(by_start) > 1 else ():
            extract = _choose_extract(similar_files)
            if extract is not None:
                _apply(extract, similar_files, ranks)
    return ranks


def _apply(extract: Extract, files: Iterable[FileReport], ranks: dict[str, int]) -> None:
    for file_report in files:
        rank = extract(file_report.path)
        if rank is not None:
            ranks[file_report.path] = rank


def _choose_extract(files: list[FileReport]) -> Extract | None:
    """How to read the rank from these names; None if no way fits what the files hold."""
    paths = {file_report.path for file_report in files}
    members = {
        file_report.path: _intersect_members(file_report.ranks[0])
        for file_report in files
        if file_report.ranks
    }
    for extract in _list_extracts():
        found = {path: rank for path in paths if (rank := extract(path)) is not None}
        if len(found) < len(paths):
            continue
        allowed = all(
            (known := members.get(path)) is None or found[path] in known for path in paths
        )
        if allowed and _are_distinct(found):
            return extract
    return None


def _are_distinct(found: dict[str, int]) -> bool:
    """Whether different files have different ranks; dumps of one rank at several times aside."""
    names: defaultdict[int, set[str]] = defaultdict(set)
    for path, rank in found.items():
        names[rank].add(_DATED.sub("", _plain_name(path).rpartition("/")[2]))
    return all(len(names_of_rank) == 1 for names_of_rank in names.values())


def _list_extracts() -> list[Extract]:
    return [_read_rank, *(_make_read(index) for index in range(1, _FROM_END + 1)), _read_folder]


def _read_rank(path: str) -> int | None:
    """The number after the last "rank" of the name or, if it has none, of its folders."""
    for part in reversed(_plain_name(path).split("/")):
        matches = _RANK.findall(part)
        if matches:
            return int(matches[-1])
    return None


def _make_read(index: int) -> Extract:
    def read(path: str) -> int | None:
        """A number of the file's name, counted from its end."""
        name = _DATED.sub("", _plain_name(path).rpartition("/")[2])
        numbers = _NUMBER.findall(name)
        if len(numbers) < index or len(numbers[-index]) > 7:
            return None
        return int(numbers[-index])

    return read


def _read_folder(path: str) -> int | None:
    """The name of the folder if it is a number, as in torchrun's `attempt_0/3/stderr.log`."""
    folder = os.path.basename(os.path.dirname(path))
    return int(folder) if folder.isdecimal() and len(folder) < 8 else None


def _plain_name(path: str) -> str:
    return _COPY.sub("", path.replace(os.sep, "/"))


def _find_processes(pieces: Iterable[RankEvidence]) -> dict[tuple[str, int], int]:
    """Which rank a process is, where a file says it."""
    ranks: dict[tuple[str, int], int] = {}
    for evidence in pieces:
        if evidence.rank is not None and evidence.pid is not None:
            ranks.setdefault((evidence.host, evidence.pid), evidence.rank)
    return ranks


def _find_on_any_host(processes: dict[tuple[str, int], int], pid: int) -> int | None:
    """The rank of a process id, if it is one on all hosts together."""
    found = {rank for (_, number), rank in processes.items() if number == pid}
    return next(iter(found)) if len(found) == 1 else None


def _describe_unknown(unknown: Iterable[RankEvidence]) -> list[Gap]:
    """Gaps for files with calls or stacks of a rank that is not known."""
    paths = dict.fromkeys(
        evidence.path for evidence in unknown if evidence.columns or evidence.stacks
    )
    return [
        Gap(
            place=path,
            fact="it is not known which rank it is of: neither its name nor its content says so",
            is_loss=True,
        )
        for path in paths
    ]
