"""TypeScript's types of a page, from its JSON Schema: `npm run types` writes src/page.ts."""

from __future__ import annotations

import json
from typing import Any

from shardscope.report.html.page_schema import make_schema

_NAMES = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean"}


def write_types() -> str:
    """All records of a page as interfaces, by name."""
    definitions = make_schema()["$defs"]
    parts = [_write_interface(name, definitions[name]) for name in sorted(definitions)]
    head = "/** Made by page_types.py from the page's JSON Schema; do not edit. */\n"
    return "\n".join([head, *parts])


def _write_interface(name: str, schema: dict[str, Any]) -> str:
    lines = [f"  {key}: {_write_type(one)};" for key, one in schema["properties"].items()]
    comment = "\n".join(f" * {line}".rstrip() for line in schema["description"].splitlines())
    return "\n".join(["/**", comment, " */", f"export interface {name} {{", *lines, "}\n"])


def _write_type(schema: dict[str, Any]) -> str:
    # Python writes every field, also those that have their default, so that none is optional.
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "const" in schema:
        return json.dumps(schema["const"])
    if "anyOf" in schema:
        return " | ".join(_write_type(one) for one in schema["anyOf"])
    if schema["type"] == "array":
        item = _write_type(schema["items"]) if "items" in schema else "unknown"
        is_simple = item.isidentifier()
        return f"readonly {item}[]" if is_simple else f"readonly ({item})[]"
    return "null" if schema["type"] == "null" else _NAMES[schema["type"]]


if __name__ == "__main__":
    print(write_types(), end="")
