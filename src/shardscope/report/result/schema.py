"""The JSON Schema of a result.

python -m shardscope.report.result.schema > docs/reference/result.schema.json
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import msgspec

from shardscope.report.result.result import SCHEMA, CommandResult, CommandStatus


def make_result_schema() -> dict[str, Any]:
    """Make the JSON Schema of what `--json` prints, from the structs of a result."""
    schema = msgspec.json.schema(CommandResult)
    for struct in schema["$defs"].values():
        if "description" in struct:
            struct["description"] = inspect.cleandoc(struct["description"])
    # Every document has all fields of the top level, also those that have a default in Python.
    document = schema["$defs"]["CommandResult"]
    document["required"] = list(document["properties"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Result of a shardscope command, schema {SCHEMA}",
        **schema,
    }


def make_outer_schema() -> dict[str, Any]:
    """Make the JSON Schema of the top level alone, for where the full one would be too long."""
    document = make_result_schema()["$defs"]["CommandResult"]
    return {
        "type": "object",
        "properties": {name: _cut(field) for name, field in document["properties"].items()},
        "required": document["required"],
    }


def _cut(field: dict[str, Any]) -> dict[str, Any]:
    """The type of a field without what is inside it."""
    if "anyOf" in field:
        return {"anyOf": [_cut(option) for option in field["anyOf"]]}
    if field.get("$ref") == "#/$defs/CommandStatus":
        return {"enum": list(CommandStatus)}
    if "$ref" in field or "allOf" in field:
        return {"type": "object"}
    return {key: value for key, value in field.items() if key in ("type", "const", "enum")}


if __name__ == "__main__":
    print(json.dumps(make_result_schema(), indent=2, ensure_ascii=False))
