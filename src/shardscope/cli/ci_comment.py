"""The result of `shardscope ci` as Markdown, and as a comment on a GitHub pull request."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from shardscope.contract import ContractFile, Violation
from shardscope.contract.violation_text import list_rows, summarize
from shardscope.record import Finding
from shardscope.record.base import name_line
from shardscope.record.units import plural
from shardscope.report.compare.changes import Changes
from shardscope.report.compare.changes_markdown import write_changes
from shardscope.report.text.markdown_text import BoundedMarkdown, make_code, make_prose

_MARKER = "<!-- shardscope ci -->"
"""The first line of our comment, by which the next run finds it."""
_PER_PAGE = 100
_MAX_PAGES = 50
_TIMEOUT_S = 30
_DENIED = (401, 403, 404)


class CIResult(Struct, frozen=True, kw_only=True):
    """What `shardscope ci` found: violations, what changed since the base, and what it lacked.

    `divergences` are the findings of `check`, each of which is a failure.
    """

    contract: ContractFile | None
    violations: tuple[Violation, ...]
    changes: tuple[Changes, ...]
    divergences: tuple[Finding, ...] = ()
    reasons: tuple[str, ...] = ()  # which --fail-on matched
    notes: tuple[str, ...] = ()

    @property
    def is_failed(self) -> bool:
        """Whether a limit is exceeded, ranks diverge, or a change was asked to fail."""
        return bool(self.violations or self.divergences or self.reasons)


def render_comment(result: CIResult) -> str:
    """Render the result for a pull request; the first line identifies the comment."""
    document = BoundedMarkdown()
    document.add(_MARKER)
    document.add(f"## {'❌' if result.is_failed else '✅'} shardscope: {summarize_result(result)}")
    if result.notes:
        document.add_list(result.notes, make_prose)
    if result.contract is not None and result.violations:
        _write_violations(document, result.contract, result.violations)
    if result.divergences:
        _write_divergences(document, result.divergences)
    for changes in result.changes:
        write_changes(document, changes)
    return document.render()


def summarize_result(result: CIResult) -> str:
    """`2 of 14 limits broken; worse than the base (3 changes)`."""
    parts = []
    if result.contract is not None:
        parts.append(summarize(result.violations, len(result.contract.contract.limits)))
    if result.divergences:
        parts.append(f"ranks diverge ({plural(len(result.divergences), 'finding')})")
    if result.reasons:
        parts.append(f"--fail-on matched: {', '.join(result.reasons)}")
    elif result.changes:
        num_changes = sum(row.repeat for changes in result.changes for row in changes.rows)
        count = f"{num_changes:,} change{'' if num_changes == 1 else 's'}"
        parts.append(f"{count if num_changes else 'no change'} since the base")
    return "; ".join(parts) or "recorded"


def _write_violations(
    document: BoundedMarkdown, file: ContractFile, violations: Sequence[Violation]
) -> None:
    document.add(f"### {make_code(file.path)}: limits that are exceeded")

    def make_row(violation: Violation) -> list[str]:
        rows = {row.label: row.text for row in list_rows(violation)}
        where = rows.get("line", f"{file.path}:{file.lines.get(violation.limit, 1)}")
        return [
            make_code(violation.title),
            make_prose(violation.expected),
            make_prose(rows["actual"]),
            make_code(where),
            make_prose(rows.get("remedy", "")),
        ]

    document.add_table(["limit", "expected", "actual", "line", "remedy"], violations, make_row)


def _write_divergences(document: BoundedMarkdown, findings: Sequence[Finding]) -> None:
    document.add("### Ranks that diverge")

    def make_row(finding: Finding) -> list[str]:
        return [
            make_code(finding.rule),
            make_prose(finding.fact),
            make_code(name_line(finding.source)) if finding.source else "",
            make_prose(finding.remedy),
        ]

    document.add_table(["rule", "fact", "line", "remedy"], findings, make_row)


class PullRequest(Struct, frozen=True):
    """The pull request that a job of GitHub Actions runs for."""

    api: str
    repository: str
    number: int
    token: str

    def write_comment(self, body: str) -> str:
        """Create our comment, or update it; returns what happened, as a sentence.

        A token that may not write, as that of a pull request from a fork, is no error.
        """
        try:
            number = self._find_comment()
            comments = f"/repos/{self.repository}/issues"
            if number is None:
                self._request("POST", f"{comments}/{self.number}/comments", {"body": body})
                return f"wrote a comment on pull request {self.number}"
            self._request("PATCH", f"{comments}/comments/{number}", {"body": body})
            return f"updated the comment on pull request {self.number}"
        except urllib.error.HTTPError as error:
            if error.code in _DENIED:
                return (
                    f"no comment on pull request {self.number}: the token may not write it (HTTP "
                    f"{error.code}). Give the job `permissions: pull-requests: write`; pull "
                    "requests from forks never have it. The job's summary has the same text"
                )
            return f"no comment on pull request {self.number}: GitHub answered HTTP {error.code}"
        except (OSError, ValueError) as error:
            return f"no comment on pull request {self.number}: GitHub did not answer ({error})"

    def _find_comment(self) -> int | None:
        for page in range(1, _MAX_PAGES + 1):
            path = f"/repos/{self.repository}/issues/{self.number}/comments"
            comments = self._request("GET", f"{path}?per_page={_PER_PAGE}&page={page}")
            for comment in comments:
                if str(comment.get("body", "")).startswith(_MARKER):
                    return int(comment["id"])
            if len(comments) < _PER_PAGE:
                return None
        return None

    def _request(self, method: str, path: str, values: Mapping[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            self.api.rstrip("/") + path,
            method=method,
            data=None if values is None else json.dumps(values).encode(),
            headers={
                "Accept": "application/vnd.github+json",
                "Authorization": f"Bearer {self.token}",
                "Content-Type": "application/json",
                "X-GitHub-Api-Version": "2022-11-28",
            },
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)


def find_pull_request(environment: Mapping[str, str] = os.environ) -> PullRequest | str:
    """The pull request that GITHUB_… variables describe, or why there is none."""
    lacking = [
        name
        for name in ("GITHUB_API_URL", "GITHUB_REPOSITORY", "GITHUB_EVENT_PATH", "GITHUB_TOKEN")
        if not environment.get(name)
    ]
    if lacking:
        return f"no comment: {', '.join(lacking)} is not set. --comment is for GitHub Actions"
    try:
        event = json.loads(Path(environment["GITHUB_EVENT_PATH"]).read_bytes())
        number = int(event["pull_request"]["number"])
    except (OSError, ValueError, TypeError, KeyError):
        return "no comment: this job was not started by a pull request"
    return PullRequest(
        environment["GITHUB_API_URL"],
        environment["GITHUB_REPOSITORY"],
        number,
        environment["GITHUB_TOKEN"],
    )
