"""SARIF logs and GitLab's code quality reports: valid, placed, and recognized in the next run."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

import sample_recordings as samples
from sarif_schema import CODE_QUALITY, SARIF
from shardscope.cli import main
from shardscope.record import Finding, Recording, Severity, Source, save
from shardscope.report.export.annotations import describe_rule
from source_trees import list_nodes, parse

SOURCES = Path(__file__).parents[2] / "src" / "shardscope"


def make_findings(line: int = 7, count: int = 4) -> Recording:
    """Two findings at a line of the program and one without a line."""
    source = Source(file="pkg/my train.py", line=line, function="step", text="y = f(x)")
    findings = (
        *(
            Finding(
                rule="recompiles",
                severity=Severity.WARNING,
                subject="f",
                fact=f"compiled {count} times",
                remedy="Mark the dim as dynamic.",
                source=source,
            )
            for _ in range(2)
        ),
        Finding(
            rule="replicated",
            severity=Severity.ERROR,
            subject="layers.3.mlp\x1b[31m",
            fact="64 MiB on every rank",
            remedy="Shard it.",
        ),
    )
    run = samples.make_run(command="shardscope trace pkg/train.py --mesh dp=8")
    return replace(samples.make_recording(), findings=findings, run=run)


def run_json(*arguments: str) -> tuple[int, Any]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, json.loads(result.stdout)


def read_places(log: Any) -> list[tuple[str, str, int]]:
    places = [result["locations"][0]["physicalLocation"] for result in log["runs"][0]["results"]]
    return [
        (result["ruleId"], place["artifactLocation"]["uri"], place["region"]["startLine"])
        for result, place in zip(log["runs"][0]["results"], places, strict=True)
    ]


def read_fingerprints(log: Any) -> list[str]:
    return [result["partialFingerprints"]["shardscope/v1"] for result in log["runs"][0]["results"]]


def test_findings_are_a_valid_sarif_log_that_the_next_run_matches(here: Path) -> None:
    save(make_findings(), "run.json")
    code, log = run_json("export", "run.json", "--to", "sarif", "-o", "-")
    assert code == 0
    jsonschema.validate(log, SARIF)
    assert read_places(log) == [
        ("recompiles", "pkg/my%20train.py", 7),
        ("recompiles", "pkg/my%20train.py", 7),
        ("replicated", "pkg/train.py", 1),
    ]
    (run,) = log["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["recompiles", "replicated"]
    assert [result["level"] for result in run["results"]] == ["warning", "warning", "error"]
    text = run["results"][2]["message"]["text"]
    assert "Shard it. No source line was recorded for this." in text
    assert "\x1b" not in text
    before = read_fingerprints(log)
    assert len(set(before)) == 3
    save(make_findings(line=70, count=9), "moved.json")
    assert (
        read_fingerprints(run_json("export", "moved.json", "--to", "sarif", "-o", "-")[1]) == before
    )


def test_paths_are_those_of_the_repository_where_a_command_runs_in_a_folder_of_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / ".git").mkdir()
    (here / "models").mkdir()
    monkeypatch.chdir(here / "models")
    save(make_findings(), "run.json")
    _, log = run_json("export", "run.json", "--to", "sarif", "-o", "-")
    assert [place[1] for place in read_places(log)] == [
        "models/pkg/my%20train.py",
        "models/pkg/my%20train.py",
        "models/pkg/train.py",
    ]
    _, issues = run_json("export", "run.json", "--to", "gitlab", "-o", "-")
    assert issues[0]["location"]["path"] == "models/pkg/my train.py"


def test_findings_are_a_code_quality_report_with_the_fields_that_gitlab_requires(
    here: Path,
) -> None:
    save(make_findings(), "run.json")
    result = CliRunner().invoke(main, ["export", "run.json", "--to", "gitlab"])
    assert result.output == "saved run.codequality.json\n"
    issues = json.loads(Path("run.codequality.json").read_bytes())
    jsonschema.validate(issues, CODE_QUALITY)
    assert [issue["severity"] for issue in issues] == ["major", "major", "critical"]
    assert [issue["check_name"] for issue in issues][2] == "shardscope/replicated"
    assert len({issue["fingerprint"] for issue in issues}) == 3
    assert issues[0]["location"] == {"path": "pkg/my train.py", "lines": {"begin": 7}}


def test_a_violation_of_a_contract_is_at_its_source_line_or_at_its_limit(here: Path) -> None:
    source = Source(file=str(here / "train.py"), line=12, text="dist.all_reduce(x)")
    save(samples.make_recording((samples.make_collective(source=source),)), "run.json")
    Path("shardscope.toml").write_text(
        "[contract]\npeak_memory = 1\n[[contract.comm]]\ncount = 0\n"
    )
    code, log = run_json("contract", "check", "run.json", "--format", "sarif")
    assert code == 1
    jsonschema.validate(log, SARIF)
    assert log["runs"][0]["automationDetails"]["id"] == "shardscope/contract/"
    assert read_places(log) == [
        ("contract-peak-memory", "shardscope.toml", 2),
        ("contract-count", "train.py", 12),
    ]
    code, issues = run_json("contract", "check", "run.json", "--format", "gitlab")
    assert code == 1
    jsonschema.validate(issues, CODE_QUALITY)
    assert "expected: exactly 0 actual: 1 on rank 0" in issues[1]["description"]


def test_of_a_comparison_only_what_got_worse_is_annotated(here: Path) -> None:
    source = Source(file="train.py", line=3, text="y = f(x)")
    call = samples.make_collective(source=source)
    more = samples.make_collective(source=source, order=1, group_order=1)
    save(samples.make_recording((call,)), "base.json")
    save(samples.make_recording((call, more)), "head.json")
    code, log = run_json("diff", "base.json", "head.json", "--format", "sarif")
    assert code == 0
    jsonschema.validate(log, SARIF)
    assert read_places(log) == [("diff-collectives", "train.py", 3), ("diff-bytes", "train.py", 3)]
    _, issues = run_json("diff", "base.json", "head.json", "--format", "gitlab")
    jsonschema.validate(issues, CODE_QUALITY)
    assert len(issues) == 2
    lines = CliRunner().invoke(main, ["diff", "base.json", "head.json", "--format", "github"])
    assert lines.stdout.startswith("::warning file=train.py,line=3,title=shardscope collectives")
    assert run_json("diff", "head.json", "base.json", "--format", "gitlab") == (0, [])
    # JSON has the line of each change, too.
    _, document = run_json("diff", "base.json", "head.json", "--format", "json")
    assert document["changes"][0]["source"]["line"] == 3


@pytest.mark.parametrize("form", ["sarif", "gitlab"])
def test_a_recording_without_findings_is_a_valid_empty_report(here: Path, form: str) -> None:
    save(samples.make_recording(), "run.json")
    _, report = run_json("export", "run.json", "--to", form, "-o", "-")
    jsonschema.validate(report, SARIF if form == "sarif" else CODE_QUALITY)
    assert (report["runs"][0]["results"] if form == "sarif" else report) == []


def list_rules() -> set[str]:
    """The rules that our code gives to findings, as far as they are literals."""
    rules = set()
    for path in SOURCES.rglob("*.py"):
        if "Finding(" not in path.read_text():
            continue
        constants = {
            ast.unparse(node.targets[0]): node.value.value
            for node in parse(path).body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        }
        for call in list_nodes(path):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "Finding":
                value = next(word.value for word in call.keywords if word.arg == "rule")
                rules |= {
                    str(node.value) if isinstance(node, ast.Constant) else constants[node.id]
                    for node in ast.walk(value)
                    if isinstance(node, ast.Constant)
                    or (isinstance(node, ast.Name) and node.id in constants)
                }
    return {rule for rule in rules if rule.replace("-", "").isalpha() and not rule.endswith("-")}


def test_every_rule_of_a_finding_has_a_description_of_its_own() -> None:
    rules = list_rules()
    assert len(rules) > 20
    plain = {
        rule for rule in rules if describe_rule(rule) == f"{rule.replace('-', ' ').capitalize()}."
    }
    assert plain == set()
