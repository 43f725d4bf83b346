"""Annotations as SARIF 2.1.0, which GitHub's code scanning and editors read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from shardscope.record import Severity
from shardscope.record.encoding import encode_json
from shardscope.report.export.annotations import (
    Annotation,
    clean_text,
    describe_rule,
    fingerprint,
    make_relative,
)

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_MAX_RESULTS = 5000  # GitHub shows no more
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_ROOT = "%SRCROOT%"


def render_sarif(
    annotations: Sequence[Annotation], *, folder: str, version: str, category: str
) -> Iterator[bytes]:
    """A SARIF log with one run.

    Args:
        annotations: What the log contains; those beyond the first 5,000 are left out.
        folder: The checkout; paths inside it are relative to it.
        version: shardscope's version.
        category: Distinguishes logs of one commit: a log replaces the last of its category.
    """
    results = annotations[:_MAX_RESULTS]
    rules = list(dict.fromkeys(annotation.rule for annotation in results))
    hashes = fingerprint(results, folder)
    log = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "shardscope",
                        "semanticVersion": version,
                        "rules": [_describe_rule(rule, results) for rule in rules],
                    }
                },
                "automationDetails": {"id": f"shardscope/{category}/"},
                "columnKind": "unicodeCodePoints",
                "results": [
                    _make_result(annotation, rules.index(annotation.rule), code, folder)
                    for annotation, code in zip(results, hashes, strict=True)
                ],
                "properties": {"omittedResults": len(annotations) - len(results)},
            }
        ],
    }
    yield msgspec.json.format(encode_json(log), indent=1)
    yield b"\n"


def _describe_rule(rule: str, annotations: Sequence[Annotation]) -> dict[str, Any]:
    severities = {annotation.severity for annotation in annotations if annotation.rule == rule}
    worst = next(severity for severity in Severity if severity in severities)
    sentence = describe_rule(rule)
    return {
        "id": rule,
        "name": "".join(word.capitalize() for word in rule.replace("_", "-").split("-")),
        "shortDescription": {"text": sentence},
        "fullDescription": {"text": sentence},
        "help": {"text": f"{sentence} The message says where, why and what to do."},
        "defaultConfiguration": {"level": _LEVELS[worst]},
        "properties": {"tags": ["pytorch", "distributed"]},
    }


def _make_result(annotation: Annotation, index: int, code: str, folder: str) -> dict[str, Any]:
    return {
        "ruleId": annotation.rule,
        "ruleIndex": index,
        "level": _LEVELS[annotation.severity],
        "message": {"text": clean_text(f"{annotation.title}\n{annotation.text}")},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": _locate(annotation.file, folder),
                    "region": {"startLine": annotation.line},
                }
            }
        ],
        # GitHub tracks results by the first; other readers take any.
        "partialFingerprints": {"primaryLocationLineHash": f"{code}:1", "shardscope/v1": code},
    }


def _locate(file: str, folder: str) -> dict[str, str]:
    path = make_relative(file, folder)
    if os.path.isabs(path):
        return {"uri": Path(path).as_uri()}
    return {"uri": quote(path.encode("utf-8", "replace")), "uriBaseId": _ROOT}
