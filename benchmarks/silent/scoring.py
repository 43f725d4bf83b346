"""Scores what parity reports on a case: whether it found the bug, and its location and cause."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.silent.case import Case, find_file

ALARMS = ("error", "warning")
_MARK = "# BUG"
_WHOLE_PROGRAMS = ("train_step", "parallel_train_step", "parallelize", "main")


def list_alarms(findings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The findings that claim that something is wrong, those of parity only, in its order."""
    return [
        finding
        for finding in findings
        if finding["severity"] in ALARMS and finding["rule"].startswith("parity-")
    ]


def is_located(name: str, case: Case, finding: dict[str, Any]) -> bool:
    """Whether a finding is at the bug; strictly: it names the place in one of three ways.

    Its subject matches a pattern of the case's `locations`; its line is in the statement marked
    `# BUG`; or its line is in the function that contains the mark, unless that function is the
    entire step or all of `parallelize`, which would be no location.
    """
    if any(fnmatchcase(finding["subject"], pattern) for pattern in case.locations):
        return True
    source, file = finding.get("source"), find_file(name)
    if source is None or Path(source["file"]).resolve() != file.resolve():
        return False
    return any(source["line"] in lines for lines in _list_marked(file.read_text()))


def _list_marked(text: str) -> Iterator[range]:
    """The lines of marked statements, and of the functions that are a location."""
    marks = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(_MARK)]
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    for mark in marks:
        around = [node for node in nodes if mark in _lines_of(node)]
        innermost = max(around, key=lambda node: node.lineno)
        yield range(mark, mark + 1) if hasattr(innermost, "body") else _lines_of(innermost)
        functions = [node for node in around if isinstance(node, ast.FunctionDef)]
        if functions and functions[-1].name not in _WHOLE_PROGRAMS:
            yield _lines_of(functions[-1])


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def has_cause(case: Case, finding: dict[str, Any]) -> bool:
    """Whether the rule of a finding is a cause that is right."""
    return finding["rule"].removeprefix("parity-").replace("-", "_") in case.causes
