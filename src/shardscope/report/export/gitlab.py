"""Annotations as GitLab's code quality report, a list of issues that a merge request shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from shardscope.record import Severity, escape_controls
from shardscope.record.encoding import encode_json
from shardscope.report.export.annotations import (
    Annotation,
    clean_text,
    fingerprint,
    make_relative,
)

_SEVERITIES = {Severity.ERROR: "critical", Severity.WARNING: "major", Severity.INFO: "info"}


def render_code_quality(annotations: Sequence[Annotation], *, folder: str) -> Iterator[bytes]:
    """The report, with paths relative to `folder`, the checkout, where they are inside it."""
    issues = [
        {
            "description": " ".join(clean_text(annotation.text).splitlines()),
            "check_name": f"shardscope/{annotation.rule}",
            "fingerprint": code,
            "severity": _SEVERITIES[annotation.severity],
            "location": {
                "path": escape_controls(make_relative(annotation.file, folder)),
                "lines": {"begin": annotation.line},
            },
        }
        for annotation, code in zip(annotations, fingerprint(annotations, folder), strict=True)
    ]
    yield msgspec.json.format(encode_json(issues), indent=1)
    yield b"\n"
