"""The published JSON Schema and the golden file say what the records say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from sample_recordings import make_collective
from shardscope.record import encode
from shardscope.record.schema import make_schema

_ROOT = Path(__file__).parents[2]
_PUBLISHED = _ROOT / "docs" / "reference" / "recording.schema.json"
_GOLDEN = _ROOT / "tests" / "golden" / "recording_v1.json"


def test_published_schema_is_current():
    assert json.loads(_PUBLISHED.read_text()) == json.loads(json.dumps(make_schema())), (
        "the records changed and their schema did not. Run "
        "`python -m shardscope.record.schema > docs/reference/recording.schema.json`."
    )


def test_module_prints_the_published_file():
    command = [sys.executable, "-m", "shardscope.record.schema"]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    printed = subprocess.run(command, capture_output=True, check=True, env=environment).stdout
    assert printed.decode() == _PUBLISHED.read_text()


def test_saved_recordings_fit_the_schema(any_recording):
    schema = make_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(encode(any_recording)), schema)


def test_schema_refuses_what_load_refuses():
    plain = json.loads(_GOLDEN.read_text())
    plain["collectives"][0]["rank"] = "zero"
    with pytest.raises(jsonschema.ValidationError, match="'zero' is not"):
        jsonschema.validate(plain, make_schema())


def test_golden_file_fits_the_schema():
    jsonschema.validate(json.loads(_GOLDEN.read_text()), make_schema())


def test_every_field_is_in_the_reference():
    reference = (_ROOT / "docs" / "reference" / "recording.md").read_text()
    missing = [name for name in type(make_collective()).__struct_fields__ if name not in reference]
    assert missing == []
