"""The published JSON Schema and the golden file say what the records say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from shardscope.record import (
    Agreement,
    AllocationTable,
    Axis,
    AxisTypes,
    BreakSite,
    Cause,
    Check,
    CheckOutcome,
    Collective,
    CollectiveKind,
    CompiledGraph,
    Condition,
    Coverage,
    Deviation,
    Diagnosis,
    Divergence,
    DroppedCollectives,
    Explanation,
    Fallback,
    FallbackKind,
    Finding,
    FrameGuards,
    Gap,
    GraphCollective,
    GraphEnd,
    GraphOp,
    Group,
    InferredTypes,
    Inserted,
    Level,
    Mark,
    MarkKind,
    MemoryKind,
    MemoryProfile,
    MemorySample,
    MemoryUse,
    Module,
    Move,
    OpCoverage,
    OpKind,
    OpVerdict,
    Parallelization,
    Parameter,
    Parity,
    Phase,
    Placed,
    PlacedKind,
    RankMemory,
    RankProcess,
    Recompile,
    Role,
    RunComparison,
    RunDeviation,
    RunInfo,
    SegmentTable,
    Severity,
    Sharding,
    SkippedFrame,
    Slice,
    Source,
    Span,
    SpanBegin,
    Stage,
    StageTime,
    Stop,
    Suspect,
    SuspectOp,
    TensorKind,
    TensorLayout,
    TensorRole,
    TensorTypes,
    TensorVerdict,
    ValueKind,
    ValueSample,
    Variation,
    encode,
)
from shardscope.record.hang_records import (
    GroupProgress,
    GroupSkew,
    HangAnalysis,
    HangCall,
    HangCause,
    HangDivergence,
    HangSide,
    HangSource,
    HangWait,
    RankState,
    SlowRank,
)
from shardscope.record.schema import make_schema

jsonschema = pytest.importorskip("jsonschema")

_ROOT = Path(__file__).parents[2]
_PUBLISHED = _ROOT / "docs" / "reference" / "recording.schema.json"
_REFERENCE = _ROOT / "docs" / "reference" / "recording.md"
_GOLDEN = _ROOT / "tests" / "golden" / "recording_v2.json"


@cache
def _validator():
    """Made once: to check a schema itself takes longer than what most recordings hold."""
    schema = make_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


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
    _validator().validate(json.loads(encode(any_recording)))


def test_schema_refuses_what_load_refuses():
    plain = json.loads(_GOLDEN.read_text())
    plain["collectives"][0]["rank"] = "zero"
    with pytest.raises(jsonschema.ValidationError, match="'zero' is not"):
        _validator().validate(plain)


def test_golden_file_fits_the_schema():
    _validator().validate(json.loads(_GOLDEN.read_text()))


@pytest.mark.parametrize("field", ["format", "schema"])
@pytest.mark.parametrize("change", ["missing", "another"])
def test_schema_refuses_a_file_that_does_not_say_what_it_is(field, change):
    plain = json.loads(_GOLDEN.read_text())
    if change == "missing":
        del plain[field]
    else:
        plain[field] = {"format": "chrome.trace", "schema": 3}[field]
    with pytest.raises(jsonschema.ValidationError, match=rf"{field}|was expected"):
        _validator().validate(plain)


def test_descriptions_are_not_indented():
    records = make_schema()["$defs"].values()
    assert [record["title"] for record in records if "\n " in record.get("description", "")] == []


# The heading of the reference's table, and the record whose fields it lists.
_TABLES = {
    "run": RunInfo,
    "axes": Axis,
    "groups": Group,
    "modules": Module,
    "parameters": Parameter,
    "collectives": Collective,
    "source": Source,
    "findings": Finding,
    "gaps": Gap,
    "processes": RankProcess,
    "dropped": DroppedCollectives,
    "checks": Check,
    "roles": Role,
    "variations": Variation,
    "hangs": HangAnalysis,
    "hang_sources": HangSource,
    "hang_causes": HangCause,
    "hang_calls": HangCall,
    "hang_waits": HangWait,
    "hang_divergences": HangDivergence,
    "hang_sides": HangSide,
    "hang_progress": GroupProgress,
    "hang_states": RankState,
    "skews": GroupSkew,
    "slow_ranks": SlowRank,
    "stops": Stop,
    "open_spans": SpanBegin,
    "marks": Mark,
    "spans": Span,
    "coverage": Coverage,
    "ops": OpCoverage,
    "moves": Move,
    "shardings": Sharding,
    "memory": MemoryProfile,
    "at_peak": MemoryUse,
    "samples": MemorySample,
    "allocations": AllocationTable,
    "segments": SegmentTable,
    "layouts": TensorLayout,
    "slices": Slice,
    "parity": Parity,
    "tensors": TensorVerdict,
    "divergences": Divergence,
    "types": InferredTypes,
    "tensors of `types": TensorTypes,
    "axes of `types": AxisTypes,
    "parallel": Parallelization,
    "inserted": Inserted,
    "fallbacks": Fallback,
    "placed": Placed,
    "rank_memory": RankMemory,
    "diagnoses": Diagnosis,
    "suspects": SuspectOp,
    "deviation": Deviation,
    "explanations": Explanation,
    "graphs": CompiledGraph,
    "ops of graphs": GraphOp,
    "break_sites": BreakSite,
    "recompiles": Recompile,
    "skipped_frames": SkippedFrame,
    "stages": StageTime,
    "guards": FrameGuards,
    "collectives of graphs": GraphCollective,
    "values": ValueSample,
    "comparisons": RunComparison,
    "run_deviations": RunDeviation,
}


def _read_tables():
    """The rows of every table in the reference, as cells, under the heading above it."""
    tables, heading = {}, ""
    for line in _REFERENCE.read_text().splitlines():
        if line.startswith("#"):
            heading = line.strip("#` ")
        elif line.startswith("|") and not line.startswith("|---"):
            tables.setdefault(heading, []).append(line.strip("|").split("|"))
    return {heading: rows[1:] for heading, rows in tables.items()}


def _names(cell):
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("heading", _TABLES)
def test_reference_lists_every_field_and_no_other(heading):
    listed = [name for row in _read_tables()[heading] for name in _names(row[0])]
    assert sorted(listed) == sorted(_TABLES[heading].__struct_fields__)


def test_reference_lists_every_cause_with_its_fields():
    listed = {_names(row[0])[0]: _names(row[1]) for row in _read_tables()["cause"]}
    causes = {cause.__struct_config__.tag: cause for cause in get_args(Cause)}
    assert listed == {tag: list(cause.__struct_fields__) for tag, cause in causes.items()}


def test_reference_names_every_kind_phase_and_severity():
    cells = {_names(row[0])[0]: row[1] for row in _read_tables()["collectives"]}
    assert _names(cells["kind"]) == [kind.value for kind in CollectiveKind]
    assert _names(cells["phase"]) == [phase.value for phase in Phase]
    findings = {_names(row[0])[0]: row[1] for row in _read_tables()["findings"]}
    assert _names(findings["severity"]) == [severity.value for severity in Severity]


@pytest.mark.parametrize(
    ("heading", "field", "values"),
    [
        ("marks", "kind", MarkKind),
        ("coverage", "level", Level),
        ("ops", "verdict", OpVerdict),
        ("at_peak", "kind", MemoryKind),
        ("tensors", "kind", TensorKind),
        ("tensors", "agreement", Agreement),
        ("divergences", "suspect", Suspect),
        ("fallbacks", "kind", FallbackKind),
        ("placed", "kind", PlacedKind),
        ("diagnoses", "condition", Condition),
        ("diagnoses", "stage", Stage),
        ("graphs", "end", GraphEnd),
        ("ops of graphs", "kind", OpKind),
        ("values", "kind", ValueKind),
        ("variations", "outcome", CheckOutcome),
        ("tensors of `types", "role", TensorRole),
    ],
)
def test_reference_names_every_value_of_a_choice(heading, field, values):
    cells = {_names(row[0])[0]: row[1] for row in _read_tables()[heading]}
    assert _names(cells[field]) == [value.value for value in values]


def test_every_record_of_a_recording_has_a_table():
    tags = {cause.__struct_config__.tag for cause in get_args(Cause)}
    covered = {record.__name__ for record in _TABLES.values()} | {"Recording", "RankSpan"}
    structs = {
        name
        for name, entry in make_schema()["$defs"].items()
        if "properties" in entry
        and entry["properties"].get("type", {}).get("enum", [""])[0] not in tags
    }
    assert structs <= covered
