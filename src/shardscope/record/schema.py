"""The JSON Schema of a recording.

python -m shardscope.record.schema > docs/reference/recording.schema.json
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from shardscope.record.recording import SCHEMA, Recording

__all__ = ["make_schema"]


def make_schema() -> dict[str, Any]:
    """The schema of what `save` writes, from the records themselves."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"shardscope recording, schema {SCHEMA}",
        **msgspec.json.schema(Recording),
    }


if __name__ == "__main__":
    print(json.dumps(make_schema(), indent=2, ensure_ascii=False))
