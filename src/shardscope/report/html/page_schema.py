"""The JSON Schema of a page, which TypeScript's types are made from.

python -m shardscope.report.html.page_schema
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import msgspec

from shardscope.report.html.page import FORMAT, SCHEMA, Page


def make_schema() -> dict[str, Any]:
    """The schema of a page's JSON, from the records themselves."""
    schema = msgspec.json.schema(Page)
    for record in schema["$defs"].values():
        _describe(record)
    page = schema["$defs"]["Page"]["properties"]
    page["format"], page["schema"] = {"const": FORMAT}, {"const": SCHEMA}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"shardscope page, schema {SCHEMA}",
        **schema,
    }


def _describe(record: dict[str, Any]) -> None:
    record["description"] = inspect.cleandoc(record["description"])
    # Defaults exist in Python alone: the JSON has every field, so that readers need no checks.
    record["required"] = list(record["properties"])
    record["additionalProperties"] = False
    for field in record["properties"].values():
        field.pop("default", None)


if __name__ == "__main__":
    print(json.dumps(make_schema(), indent=2, ensure_ascii=False))
