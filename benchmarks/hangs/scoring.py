"""Scores what a tool says of a case: whether its location, its ranks and its remedy are right.

All of a finding is read: its subject, its fact, which names the lines of both sides, its source,
its rank and its remedy. The record of the case (`NAME.toml`) says what is right. A remedy that
names more than `MOST_REMEDIES` kinds of remedy is none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.hangs.case import Case

ALARMS = ("error", "warning")
MOST_REMEDIES = 3
# Functions that are an entire program, which would be no location.
_PROGRAMS = ("main", "train", "fit", "run", "forward", "train_step", "train_one_epoch")

# What a remedy says, by its key in REMEDIES.
_PATTERNS: Mapping[str, str] = {
    "run the module": r"dummy|run (it|the module|\S+) on (every|each|all)",
    "unused FSDP parameters": r"set_reduce_scatter_unused_params|zero gradient|gradients of zero",
    "wrap a larger module": r"\bwrap|fully_shard",
    "unused DDP parameters": r"find_unused_parameters",
    "join": r"\bjoin\b|drop_last|(same|equal) number of (batches|steps)|as many batches",
    "agree": r"\bagree|all_reduce|broadcast",
    "every rank": r"(on|from|by) (every|each|all) ranks?\b|out of (the|its) branch",
    "no collective": r"\.module\b|sync_on_compute|needs no other rank",
    "same size": r"\bpad|exchange (the |their )?(size|shape|length)s?",
    "same order": r"same order|\bsort",
    "same names": r"same (names|keys)|every name|zeros for",
    "right group": r"\bgroup",
    "create groups": r"new_group",
    "pair the messages": r"batch_isend_irecv|isend|irecv|alternate",
    "propagate the failure": r"re-?raise|propagate|flag of failure|let .* raise",
    "compile together": r"guard.collectives|mark_dynamic|recompil",
}


def list_alarms(findings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The findings that claim that something is wrong, in the tool's order."""
    return [finding for finding in findings if finding["severity"] in ALARMS]


def is_located(case: Case, finding: dict[str, Any]) -> bool:
    """Whether a finding names a line of either side, the marked line, or a module of the record."""
    allowed = _allowed_lines(case)
    if any(line in allowed for line in _lines_of_finding(case, finding)):
        return True
    patterns = [p for side in (case.differing, case.others) for p in side.modules if p]
    words = re.findall(r"[\w.]+", f"{finding.get('subject') or ''} {finding['fact']}")
    words += [word.partition(".")[2] for word in words]  # without the class of the model
    return any(fnmatchcase(word, pattern) for word in words for pattern in patterns)


def has_ranks(case: Case, finding: dict[str, Any]) -> bool:
    """Whether a finding names the ranks that leave the common path, or those that it varied."""
    named = set(_ranks_of_text(finding["fact"]))
    if finding.get("rank") is not None:
        named.add(int(finding["rank"]))
    if isinstance(case.differing.ranks, str):
        return bool(named)
    return set(case.differing.ranks) <= named


def has_remedy(case: Case, finding: dict[str, Any]) -> bool:
    """Whether the remedy of a finding is one of those that the record has."""
    text = finding.get("remedy") or ""
    named = {key for key, pattern in _PATTERNS.items() if re.search(pattern, text, re.IGNORECASE)}
    return bool(named & set(case.remedies)) and len(named) <= MOST_REMEDIES


def _lines_of_finding(case: Case, finding: dict[str, Any]) -> Iterator[int]:
    """The lines of the case's program that a finding names."""
    source = finding.get("source")
    if source and Path(source["file"]).name == case.file.name:
        yield int(source["line"])
    for number in re.findall(re.escape(case.file.name) + r":(\d+)", finding["fact"]):
        yield int(number)


def _allowed_lines(case: Case) -> set[int]:
    """The statements of the marked and the named lines, and the functions that are a location."""
    nodes = [
        node for node in ast.walk(ast.parse(case.file.read_text())) if isinstance(node, ast.stmt)
    ]
    allowed: set[int] = set()
    marked = case.marked_lines()
    for line in [*marked, *case.named_lines()]:
        around = [node for node in nodes if line in _range_of(node)]
        innermost = max(around, key=lambda node: node.lineno)
        allowed |= {line} if hasattr(innermost, "body") else set(_range_of(innermost))
        functions = [node for node in around if isinstance(node, ast.FunctionDef)]
        if line in marked and functions and functions[-1].name not in _PROGRAMS:
            allowed |= set(_range_of(functions[-1]))
    return allowed


def _range_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _ranks_of_text(text: str) -> Iterator[int]:
    """The ranks in a text such as `ranks 0-1,3 issued …; rank 2 issued …`."""
    for part in re.findall(r"\branks? ([\d,\-]+)", text):
        for word in filter(None, part.strip(",-").split(",")):
            first, _, last = word.partition("-")
            yield from range(int(first), int(last or first) + 1)
