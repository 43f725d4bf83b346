"""Results: figures agree with the recording, documents are bounded, valid and safe to print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace

import compared_recordings
import large_recording
import sample_recordings as samples
from shardscope.record import Finding, Gap, Recording, Severity
from shardscope.report.compare.compare_recordings import compare
from shardscope.report.result.figures import Figures, TableFigures
from shardscope.report.result.recording_figures import read_changes
from shardscope.report.result.result import (
    MAX_TOKENS,
    CommandResult,
    CommandStatus,
    RecordingSummary,
    encode_result,
    estimate_tokens,
    summarize_recording,
)
from shardscope.report.result.schema import make_result_schema

SCHEMA_FILE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "result.schema.json"
VALIDATOR = jsonschema.Draft202012Validator(make_result_schema())
SAMPLES = ("diagnosed", "explained", "holdings", "llama", "parallel", "phases", "varied")


def make_document(recording: Recording | RecordingSummary) -> dict[str, Any]:
    is_read = isinstance(recording, RecordingSummary)
    parts = recording if is_read else summarize_recording(recording)
    result = CommandResult(
        shardscope_version="1",
        command="shardscope show run.json --json",
        exit_code=0,
        verdict=CommandStatus.OK,
        summary=parts.summary,
        findings=parts.findings,
        gaps=parts.gaps,
        figures=parts.figures,
        run=parts.run,
    )
    data = encode_result(result, ["shardscope show run.json"])
    assert estimate_tokens(data) <= MAX_TOKENS
    document = json.loads(data)
    VALIDATOR.validate(document)
    assert list(document) == list(CommandResult.__struct_fields__)
    return document


def test_the_committed_schema_is_the_generated_one() -> None:
    generated = json.dumps(make_result_schema(), indent=2, ensure_ascii=False)
    assert SCHEMA_FILE.read_text() == f"{generated}\n", "run: make schema"


@pytest.mark.parametrize("name", SAMPLES)
def test_every_kind_of_recording_gives_a_valid_bounded_document(name: str) -> None:
    document = make_document(getattr(samples, f"make_{name}")())
    assert document["summary"]
    assert document["figures"]


def test_communication_adds_up_to_the_recorded_collectives() -> None:
    llama = samples.make_llama()
    figures = make_document(llama)["figures"]["communication"]
    assert figures["count"] == len(llama.collectives)
    assert figures["wire_bytes"] == sum(call.wire_bytes for call in llama.collectives)
    for part in ("totals", "causes", "modules"):
        assert sum(entry["wire_bytes"] for entry in figures[part]) == figures["wire_bytes"], part
    assert figures["causes"] == sorted(figures["causes"], key=lambda entry: -entry["wire_bytes"])


def test_what_does_not_fit_is_counted_and_commands_print_it() -> None:
    llama = samples.make_llama()
    findings = tuple(
        Finding(rule=f"r{number}", severity=Severity.INFO, subject="s", fact="f", remedy="r")
        for number in range(300)
    )
    gaps = tuple(Gap(place=f"place {number}", fact="f" * 50) for number in range(300))
    full = summarize_recording(replace(llama, findings=findings, gaps=gaps))
    document = make_document(full)
    truncated = document["truncated"]
    assert truncated["commands"] == ["shardscope show run.json"]
    for name, entries in (("findings", full.findings), ("gaps", full.gaps)):
        assert 0 < len(document[name]) < len(entries)
        assert len(document[name]) + truncated["left_out"][name] == len(entries)
    assert [entry["rule"] for entry in document["findings"]][:2] == ["r0", "r1"]


def test_findings_of_identical_layers_share_an_entry_and_the_gravest_come_first() -> None:
    def make(layer: int, severity: Severity) -> Finding:
        subject = f"layers.{layer}.wq"
        return Finding(
            rule="r", severity=severity, subject=subject, fact=f"{subject} is.", remedy="Do."
        )

    findings = (make(7, Severity.INFO), *(make(layer, Severity.ERROR) for layer in range(4)))
    document = make_document(samples.make_recording(findings=findings))
    assert [(entry["severity"], entry.get("count", 1)) for entry in document["findings"]] == [
        ("error", 4),
        ("info", 1),
    ]
    assert document["findings"][0]["fact"] == "layers.0-3.wq is."
    assert "4 error findings, 1 info finding" in document["summary"]


def test_untrusted_text_cannot_control_a_terminal_or_a_ci_runner() -> None:
    document = make_document(large_recording.make_hostile())
    texts = json.dumps(document, ensure_ascii=False)
    assert "\x1b" not in json.loads(texts)["summary"]
    assert not {"\x1b", "\u202e", "\x07"}.intersection(str(json.loads(texts)))
    data = encode_result(
        CommandResult(
            shardscope_version="1",
            command="::error::x\n##[error]y",
            exit_code=0,
            verdict=CommandStatus.OK,
            summary="",
        )
    )
    assert not any(line.lstrip().startswith(b"::") for line in data.splitlines())
    assert b"##[" not in data


def test_a_comparison_has_worse_changes_first() -> None:
    changes = compare(*compared_recordings.make_pair(), titles=("a.json", "b.json"))
    result = CommandResult(
        shardscope_version="1",
        command="shardscope diff a.json b.json --json",
        exit_code=0,
        verdict=CommandStatus.PROBLEMS,
        summary="",
        figures=Figures(comparisons=(read_changes(changes),)),
    )
    document = json.loads(encode_result(result))
    VALIDATOR.validate(document)
    comparison = document["figures"]["comparisons"][0]
    is_worse = [change.get("is_worse") for change in comparison["changes"]]
    assert True in is_worse
    assert is_worse == sorted(is_worse, key=lambda worse: (not worse, worse is None))
    assert comparison["num_changes"] == sum(row.repeat for row in changes.rows)


def test_long_texts_are_shortened_and_what_does_not_fit_is_dropped_last_entry_first() -> None:
    entries = tuple(f"{number} {'x' * 5_000}" for number in range(100))
    result = CommandResult(
        shardscope_version="1",
        command="c",
        exit_code=0,
        verdict=CommandStatus.OK,
        summary="y" * 10_000,
        messages=entries,
    )
    data = encode_result(result)
    document = json.loads(data)
    assert estimate_tokens(data) <= MAX_TOKENS
    assert document["summary"].endswith("…")
    numbers = [int(message.split()[0]) for message in document["messages"]]
    assert numbers == list(range(len(numbers)))
    assert document["truncated"]["left_out"] == {"messages": 100 - len(numbers)}


def test_a_table_of_numbers_counts_each_digit_as_a_token() -> None:
    rows = tuple((number, 10**12 + number) for number in range(1_000))
    table = TableFigures(columns=("order", "bytes"), num_rows=len(rows), rows=rows)
    result = CommandResult(
        shardscope_version="1",
        command="c",
        exit_code=0,
        verdict=CommandStatus.OK,
        summary="",
        figures=Figures(table=table),
    )
    data = encode_result(result)
    shown = json.loads(data)["figures"]["table"]["rows"]
    assert shown == [list(row) for row in rows[: len(shown)]]
    assert len(shown) > 100
    assert sum(char in b"0123456789" for char in data) < MAX_TOKENS
    assert json.loads(data)["truncated"]["left_out"] == {"figures.table.rows": 1_000 - len(shown)}
