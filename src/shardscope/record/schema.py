"""The JSON Schema of a recording.

python -m shardscope.record.schema > docs/reference/recording.schema.json
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import msgspec

from shardscope.record.recording import FORMAT, SCHEMA, Recording


def make_schema() -> dict[str, Any]:
    """The JSON Schema of the files that `save` writes, made from the record types."""
    schema = msgspec.json.schema(Recording)
    for record in schema["$defs"].values():
        if "description" in record:
            record["description"] = inspect.cleandoc(record["description"])
    _demand_header(schema["$defs"]["Recording"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"shardscope recording, schema {SCHEMA}",
        **schema,
    }


def _demand_header(recording: dict[str, Any]) -> None:
    # In Python they have defaults; a file must have them.
    recording["properties"]["format"] = {"const": FORMAT}
    recording["properties"]["schema"] = {"const": SCHEMA}
    recording["required"] = [*recording["required"], "format", "schema"]


if __name__ == "__main__":
    print(json.dumps(make_schema(), indent=2, ensure_ascii=False))
