"""What SARIF 2.1.0 and GitHub's code scanning require of a log, as a JSON schema.

Written from the standard's text: the properties that shardscope writes, with `additionalProperties`
false as in the standard's own schema, and what GitHub requires beyond it (a location with a line,
a description of each rule).
"""

from __future__ import annotations

from typing import Any


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "minLength": 1}
_MESSAGE = _object(["text"], text=_TEXT)
_LEVEL = {"enum": ["none", "note", "warning", "error"]}
_RULE = _object(
    ["id", "shortDescription", "fullDescription", "help"],
    id=_TEXT,
    name=_TEXT,
    shortDescription=_MESSAGE,
    fullDescription=_MESSAGE,
    help=_MESSAGE,
    defaultConfiguration=_object(["level"], level=_LEVEL),
    properties=_object([], tags={"type": "array", "items": _TEXT, "uniqueItems": True}),
)
_LOCATION = _object(
    ["physicalLocation"],
    physicalLocation=_object(
        ["artifactLocation", "region"],
        # A URI: not a path with spaces, a backslash or a drive.
        artifactLocation=_object(
            ["uri"], uri={"type": "string", "pattern": r"^[A-Za-z0-9%._~/:+-]+$"}, uriBaseId=_TEXT
        ),
        region=_object(["startLine"], startLine={"type": "integer", "minimum": 1}),
    ),
)
_RESULT = _object(
    ["ruleId", "message", "locations", "partialFingerprints"],
    ruleId=_TEXT,
    ruleIndex={"type": "integer", "minimum": 0},
    level=_LEVEL,
    message=_MESSAGE,
    locations={"type": "array", "minItems": 1, "items": _LOCATION},
    partialFingerprints={"type": "object", "minProperties": 1, "additionalProperties": _TEXT},
)
_RUN = _object(
    ["tool", "results"],
    tool=_object(
        ["driver"],
        driver=_object(
            ["name", "rules"],
            name=_TEXT,
            semanticVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+"},
            rules={"type": "array", "items": _RULE, "uniqueItems": True},
        ),
    ),
    automationDetails=_object(["id"], id=_TEXT),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    results={"type": "array", "items": _RESULT},
    properties={"type": "object"},
)
SARIF = _object(
    ["version", "runs"],
    **{
        "$schema": {"type": "string", "format": "uri"},
        "version": {"const": "2.1.0"},
        "runs": {"type": "array", "items": _RUN, "minItems": 1},
    },
)

CODE_QUALITY: dict[str, Any] = {
    "type": "array",
    "items": _object(
        ["description", "check_name", "fingerprint", "severity", "location"],
        description=_TEXT,
        check_name=_TEXT,
        fingerprint=_TEXT,
        severity={"enum": ["info", "minor", "major", "critical", "blocker"]},
        location=_object(
            ["path", "lines"],
            path={"type": "string", "pattern": r"^[^/.]|^\.[^/.]"},  # relative, and not ./
            lines=_object(["begin"], begin={"type": "integer", "minimum": 1}),
        ),
    ),
}
"""GitLab's code quality report: the fields that its documentation requires."""
