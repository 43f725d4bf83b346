"""Reads what torch's debug server (`torch.distributed.debug`) writes: periodic dumps and pages.

Its text has a section for each rank: stacks, py-spy's output, or JSON. Its pages have the same in
HTML. Rank numbers are those of the world.
"""

from __future__ import annotations

import html
import re
from collections import defaultdict
from collections.abc import Iterator

from msgspec.structs import replace

from shardscope.errors import RecordingError
from shardscope.hang.evidence import (
    CallSignature,
    ColumnBuilder,
    EventKind,
    FileFormat,
    FileReport,
    GroupFact,
    RankEvent,
    RankEvidence,
)
from shardscope.hang.evidence.names import find_kind
from shardscope.hang.readers.flight_recorder import read_json
from shardscope.hang.readers.stack_dumps import parse_fault_stacks, parse_spy_stacks
from shardscope.hang.readers.text_lines import split_lines
from shardscope.record.ranks import MAX_RANKS
from shardscope.record.recording import Gap
from shardscope.record.text import excerpt

_SECTION = re.compile(r"(?m)^(?:=== |--- )?Rank (?P<rank>\d{1,7}): (?P<address>\S+)(?: ===| ---)?$")
_HTML_SECTION = re.compile(
    r"<h[234]>Rank (?P<rank>\d{1,7}): (?P<address>[^<]*)</h[234]>(?P<body>.*?)"
    r"(?=<h[234]>Rank |</section>|\Z)",
    re.DOTALL,
)
_PRE = re.compile(r"<pre>(?P<text>.*?)</pre>", re.DOTALL)
_PARTIAL = re.compile(r"PARTIAL DATA: (?P<num>\d+)/(?P<total>\d{1,7}) workers responded")
_ABSENT = re.compile(r"(?m)^  Rank (?P<rank>\d{1,7}): (?P<reason>.*)$")
_ERROR = re.compile(r"^(?:Error: \d{3}|Failed to fetch)")
_TABLES = re.compile(r"(?m)^=== (?:TorchComms )?FR Trace(?: NCCL)? ===$")
_TABLE = re.compile(r"(?m)^--- (?P<name>[\w ]+) ---$")
_HOST = re.compile(r"https?://(?P<host>[^:/]+)")


def is_debug_dump(text: str) -> bool:
    """Whether a text is a dump or a page of the debug server."""
    head = text[:200_000]
    return (
        "Torch Distributed Debug Server" in head
        or _TABLES.search(head) is not None
        or (_SECTION.search(head) is not None and "/handler/" in head)
        or _PARTIAL.search(head) is not None
    )


def read_debug_dump(data: bytes, path: str) -> FileReport:
    """The evidence of each rank in a dump or a page."""
    text = data.decode("utf-8", "replace")
    if _TABLES.search(text) is not None and "<html" not in text[:500]:
        return _read_tables(text, path)
    ranks: list[RankEvidence] = []
    gaps: list[Gap] = []
    seen: set[int] = set()
    for rank, address, content in _list_sections(text):
        if rank >= MAX_RANKS or rank in seen:
            continue  # sections that follow are of other dumps of the same page
        seen.add(rank)
        evidence, found = _read_section(path, rank, content)
        host = _HOST.match(address)
        ranks.append(replace(evidence, host=host["host"] if host is not None else ""))
        gaps.extend(found)
    ranks.extend(_list_absent(text, path, seen))
    return FileReport(
        path=path, format=FileFormat.DEBUG_SERVER, ranks=tuple(ranks), gaps=tuple(gaps)
    )


def _list_sections(text: str) -> Iterator[tuple[int, str, str]]:
    """Rank, address and content of each section."""
    if "<section" in text:
        for match in _HTML_SECTION.finditer(text):
            found = list(_PRE.finditer(match["body"]))
            content = html.unescape(found[-1]["text"]) if found else ""
            failed = "Failed to fetch" in match["body"]
            yield int(match["rank"]), match["address"], ("Error: 000 " if failed else "") + content
        return
    matches = list(_SECTION.finditer(text))
    for index, match in enumerate(matches):
        end = matches[index + 1].start() if index + 1 < len(matches) else len(text)
        yield int(match["rank"]), match["address"], text[match.end() : end].strip("\n")


def _read_section(path: str, rank: int, content: str) -> tuple[RankEvidence, list[Gap]]:
    base = RankEvidence(path=path, format=FileFormat.DEBUG_SERVER, rank=rank)
    if _ERROR.match(content):
        text = f"did not answer the debug server ({excerpt(content.splitlines()[0])})"
        return replace(base, events=(RankEvent(EventKind.UNREACHABLE, text),)), []
    if "most recent call first" in content:
        stacks, _ = parse_fault_stacks(content.splitlines())
        return replace(base, stacks=tuple(stacks)), []
    if content.lstrip().startswith("{") and '"pg_config"' in content:
        try:
            evidence, gaps = read_json(content.encode(), f"{path}, rank {rank}")
        except RecordingError as error:
            return base, [Gap(place=path, fact=str(error), rank=rank, is_loss=True)]
        return replace(evidence, path=path, rank=rank), gaps
    if "\nThread " in f"\n{content}":
        return replace(base, stacks=tuple(parse_spy_stacks(content.splitlines()))), []
    return base, []


def _list_absent(text: str, path: str, seen: set[int]) -> Iterator[RankEvidence]:
    """Ranks that the summary at the start names because they did not answer."""
    if (match := _PARTIAL.search(text)) is None:
        return
    for absent in _ABSENT.finditer(text, match.end(), match.end() + 1_000_000):
        rank = int(absent["rank"])
        if rank < MAX_RANKS and rank not in seen:
            seen.add(rank)
            reason = f"did not answer the debug server ({excerpt(absent['reason'])})"
            yield RankEvidence(
                path=path,
                format=FileFormat.DEBUG_SERVER,
                rank=rank,
                events=(RankEvent(EventKind.UNREACHABLE, reason),),
            )


def _read_tables(text: str, path: str) -> FileReport:
    """The table of calls in an analysis that the debug server has made of Flight Recorder.

    It lists for each rank the calls that are in its buffer; their states and numbers are only in
    the table of collectives.
    """
    calls: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    members: defaultdict[str, list[int]] = defaultdict(list)
    groups: dict[str, str] = {}
    for name, rows in _list_tables(text):
        if name == "Groups":
            groups.update((row[0], row[1]) for row in rows if len(row) >= 2)
        elif name == "Memberships":
            for row in rows:
                if len(row) == 2 and row[1].isdigit() and len(row[1]) < 8:
                    members[row[0]].append(int(row[1]))
        elif name == "NCCL Calls":
            for row in rows:
                numbers = [cell for cell in row if cell.isdigit() and len(cell) < 8]
                kind = next((cell for cell in row if ":" in cell and find_kind(cell)), None)
                if len(row) >= 5 and kind is not None and len(numbers) >= 2:
                    calls[_find_rank(row)].append((_find_group(row, groups), kind))
    ranks = tuple(
        _describe_calls(path, rank, own, groups, members)
        for rank, own in sorted(calls.items())
        if 0 <= rank < MAX_RANKS
    )
    detail = "an analysis by torch, without states of calls"
    return FileReport(path=path, format=FileFormat.DEBUG_SERVER, ranks=ranks, detail=detail)


def _list_tables(text: str) -> Iterator[tuple[str, list[list[str]]]]:
    matches = list(_TABLE.finditer(text))
    for index, match in enumerate(matches):
        end = matches[index + 1].start() if index + 1 < len(matches) else len(text)
        lines = split_lines(text[match.end() : end].encode())
        yield match["name"], [line.split() for line in lines[2:] if line.strip()]


def _find_rank(row: list[str]) -> int:
    """The global rank: the cell before the traceback's number and the kind."""
    for index, cell in enumerate(row):
        if ":" in cell and find_kind(cell) and index >= 2:
            return int(row[index - 2]) if row[index - 2].isdigit() else -1
    return -1


def _find_group(row: list[str], groups: dict[str, str]) -> str:
    return next((cell for cell in row if cell in groups), row[2] if len(row) > 2 else "")


def _describe_calls(
    path: str,
    rank: int,
    calls: list[tuple[str, str]],
    groups: dict[str, str],
    members: dict[str, list[int]],
) -> RankEvidence:
    names = list(dict.fromkeys(group for group, _ in calls))
    builders = {name: ColumnBuilder(index) for index, name in enumerate(names)}
    kinds = list(dict.fromkeys(kind for _, kind in calls))
    for order, (group, kind) in enumerate(calls):
        builders[group].add(builders[group].num_issued, order, kinds.index(kind))
    return RankEvidence(
        path=path,
        format=FileFormat.DEBUG_SERVER,
        rank=rank,
        groups=tuple(
            GroupFact(name, groups.get(name, ""), tuple(members.get(name, ())) or None)
            for name in names
        ),
        signatures=tuple(CallSignature(find_kind(kind), op=kind) for kind in kinds),
        columns=tuple(builder.build() for builder in builders.values()),
    )
