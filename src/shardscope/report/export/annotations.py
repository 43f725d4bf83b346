"""Annotations: what CI shows at a line of the program, from findings and from changes.

`sarif.py` and `gitlab.py` write them as files, and `render_github` as the workflow commands that
GitHub shows in a pull request. Violations of contracts become annotations in `cli/ci_formats.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from shardscope.record import Recording, Severity, Source, escape_controls, sanitize_text
from shardscope.record.finding_rules import FINDING_RULES
from shardscope.record.layer_names import fold_layers
from shardscope.report.compare.changes import Change, Changes, hide_input_rows

_MAX_TEXT = 2000  # characters of a message
_LINE = re.compile(r":\d+")  # a number that shifts when code above is edited
_UNPLACED = "No source line was recorded for this."
_FAMILIES = {
    "contract-": "A limit of the contract is exceeded: {}.",
    "diff-": "It got worse since the base: {}.",
}


class Annotation(Struct, frozen=True, kw_only=True):
    """What CI shows at a line: a finding, a violation of a contract, or a change for the worse.

    `identity` holds what stays equal when figures change and lines move, so that CI recognizes the
    annotation in the next run.
    """

    rule: str
    severity: Severity
    title: str
    text: str  # may have several lines
    file: str
    line: int = 1
    identity: tuple[str, ...] = ()


def describe_rule(rule: str) -> str:
    """What a rule detects, as a sentence."""
    if rule in FINDING_RULES:
        return FINDING_RULES[rule].explanation
    for prefix, sentence in _FAMILIES.items():
        if rule.startswith(prefix):
            return sentence.format(rule.removeprefix(prefix).replace("-", " "))
    return f"{rule.replace('-', ' ').capitalize()}."


def annotate_findings(recording: Recording, *, fallback: str) -> Iterator[Annotation]:
    """An annotation for each finding; those without a line are at line 1 of the program.

    `fallback` is the file to name if the program is not known either.
    """
    program = find_program(recording) or fallback
    for finding in recording.findings:
        text = f"{finding.subject}: {finding.fact}. {finding.remedy}"
        annotation = Annotation(
            rule=finding.rule,
            severity=finding.severity,
            title=f"{finding.rule.replace('-', ' ')}: {finding.subject}",
            text=text,
            file=program,
            identity=(finding.rule, fold_layers(finding.subject)),
        )
        yield _place(annotation, finding.source)


def annotate_changes(changes: Changes, *, fallback: str) -> Iterator[Annotation]:
    """An annotation for each change for the worse, at its line or at line 1 of `fallback`."""
    for change in hide_input_rows(changes.rows):
        if change.is_worse is True:
            annotation = Annotation(
                rule=f"diff-{change.area}",
                severity=Severity.WARNING,
                title=f"{change.area.replace('-', ' ')} got worse: {change.what}",
                text=_describe_change(change, changes),
                file=fallback,
                identity=(change.area, fold_layers(change.path or ""), _LINE.sub("", change.what)),
            )
            yield _place(annotation, change.source)


def find_program(recording: Recording) -> str:
    """The Python file that the recording's command names; empty if there is none."""
    try:
        words = shlex.split(recording.run.command)
    except ValueError:
        return ""
    return next((word for word in words if word.endswith(".py")), "")


def _place(annotation: Annotation, source: Source | None) -> Annotation:
    """The annotation at a source line, or, if that is not known, at line 1 of its file."""
    if source is None:
        return replace(annotation, text=f"{annotation.text} {_UNPLACED}")
    identity = (*annotation.identity, source.function, source.text.strip())
    return replace(annotation, file=source.file, line=max(source.line, 1), identity=identity)


def _describe_change(change: Change, changes: Changes) -> str:
    because = f" {change.because.rstrip('.')}." if change.because else ""
    return f"{change} (from {changes.before} to {changes.after}).{because}"


def fingerprint(annotations: Sequence[Annotation], folder: str) -> list[str]:
    """A hash for each annotation: equal in later runs, and different within this one."""
    seen: Counter[tuple[str, ...]] = Counter()
    hashes = []
    for annotation in annotations:
        key = (annotation.rule, make_relative(annotation.file, folder), *annotation.identity)
        text = "\0".join((*key, str(seen[key])))
        seen[key] += 1
        hashes.append(hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32])
    return hashes


def make_relative(path: str, folder: str) -> str:
    """The path relative to `folder` if it is inside, with slashes; otherwise as it is."""
    absolute = os.path.abspath(os.path.join(folder, path))
    if os.path.commonpath([absolute, os.path.abspath(folder)]) != os.path.abspath(folder):
        return path
    return os.path.relpath(absolute, folder).replace(os.sep, "/")


def clean_text(text: str) -> str:
    """The text without control characters, its lines apart, at most a comment's length."""
    safe = "\n".join(map(sanitize_text, text.splitlines()))
    return safe if len(safe) <= _MAX_TEXT else f"{safe[: _MAX_TEXT - 1]}…"


# Characters that a workflow command may not contain, and their escapes.
_IN_MESSAGES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_IN_PROPERTIES = _IN_MESSAGES | {":": "%3A", ",": "%2C"}
_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def render_github(annotations: Iterable[Annotation], *, folder: str) -> Iterator[bytes]:
    """A GitHub workflow command for each annotation, a line each.

    Paths inside `folder` are relative to it, as GitHub wants them.
    """
    for annotation in annotations:
        properties = {
            "file": escape_controls(make_relative(annotation.file, folder)),
            "line": str(annotation.line),
            "title": sanitize_text(f"shardscope {annotation.title}"),
        }
        named = ",".join(
            f"{key}={_escape(text, _IN_PROPERTIES)}" for key, text in properties.items()
        )
        message = _escape(clean_text(annotation.text), _IN_MESSAGES)
        command = f"::{_COMMANDS[annotation.severity]} {named}::{message}\n"
        yield command.encode("utf-8", "replace")


def _escape(text: str, characters: dict[str, str]) -> str:
    return "".join(characters.get(character, character) for character in text)
