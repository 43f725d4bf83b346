"""The formats in which commands report to CI: GitHub's annotations, SARIF and GitLab's issues."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from shardscope.contract import ContractFile, Violation
from shardscope.contract.violation_text import list_rows
from shardscope.record import Severity
from shardscope.record.layer_names import fold_layers
from shardscope.report.export.annotations import Annotation, render_github
from shardscope.report.export.gitlab import render_code_quality
from shardscope.report.export.sarif import render_sarif
from shardscope.version import __version__

CI_FORMATS = ("github", "sarif", "gitlab")
"""What `--format` of commands that check something takes besides its other formats."""


def render_annotations(
    annotations: Sequence[Annotation], form: str, *, category: str
) -> Iterator[bytes]:
    """Annotations in one of the CI formats; paths are relative to the root of the repository.

    `category` keeps logs of different commands apart: a SARIF log replaces the last one of its
    category.
    """
    folder = str(_find_repository())
    here = os.path.relpath(os.getcwd(), folder)  # of which recorded paths are relative
    if here != os.curdir:
        annotations = [replace(item, file=os.path.join(here, item.file)) for item in annotations]
    if form == "github":
        return render_github(annotations, folder=folder)
    if form == "gitlab":
        return render_code_quality(annotations, folder=folder)
    return render_sarif(annotations, folder=folder, version=__version__, category=category)


def _find_repository() -> Path:
    """The root of the repository that the current folder is in, or, if none, the folder."""
    here = Path.cwd()
    return next((path for path in (here, *here.parents) if (path / ".git").exists()), here)


def annotate_violations(
    violations: Sequence[Violation], file: ContractFile
) -> Iterator[Annotation]:
    """An annotation for each violation, at its source line or at the line of the limit."""
    for violation in violations:
        source = next((item.source for item in violation.evidence if item.source is not None), None)
        code = () if source is None else (source.function, source.text.strip())
        yield Annotation(
            rule=f"contract-{violation.limit.figure.replace('_', '-')}",
            severity=Severity.ERROR,
            title=f"contract: {violation.title}",
            text="\n".join(f"{row.label}: {row.text}" for row in list_rows(violation)),
            file=file.path if source is None else source.file,
            line=file.lines.get(violation.limit, 1) if source is None else max(source.line, 1),
            identity=(fold_layers(violation.title), violation.kind, *code),
        )
