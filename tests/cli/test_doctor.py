"""doctor: versions, checks that are tried, and what a check that crashes or hangs becomes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardscope.cli import doctor, main
from shardscope.cli.doctor_checks import CHECKS, CheckResult, Status
from shardscope.version import TESTED_TORCH, __version__

REQUIRED = ("torch", "fork", "gloo", "private torch names", "simulated worlds", "dynamo")


def test_doctor_tries_everything_and_says_what_works() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["shardscope_version"] == __version__
    assert document["verdict"] == "ok"
    report = document["figures"]["environment"]
    assert report["tested_torch"] == list(TESTED_TORCH)
    assert report["packages"]["torch"]
    checks = {check["name"]: check for check in report["checks"]}
    assert set(checks) == set(CHECKS)
    for name in REQUIRED:
        assert checks[name]["status"] == "ok", checks[name]
    for name, check in checks.items():
        # What is missing says what does not work, and what to do.
        assert check["detail"], name
        assert ("disables" in check) == ("remedy" in check) == (check["status"] != "ok"), name


@pytest.mark.parametrize(
    ("text", "status", "detail"),
    [
        ("import os\nos.abort()", Status.FAILED, "the process was ended by SIGABRT"),
        ("import os\nos._exit(3)", Status.FAILED, "the process exited with 3"),
        ("import time\ntime.sleep(600)", Status.FAILED, "no answer within 3 s"),
        ("print('noise')\n1 / 0", Status.FAILED, "ZeroDivisionError: division by zero"),
        ("raise ModuleNotFoundError(name='duckdb')", Status.MISSING, "duckdb is not installed"),
    ],
)
def test_a_check_that_ends_its_process_is_a_failure_and_the_others_go_on(
    here: Path, monkeypatch: pytest.MonkeyPatch, text: str, status: Status, detail: str
) -> None:
    Path("duckdb.py").write_text(text)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("PYTHONPATH", f"{here}:{Path(doctor.__file__).parents[2]}")
    is_hang = "sleep" in text
    if is_hang:
        monkeypatch.setattr(doctor, "_SILENCE_S", 3)
    first, *others = doctor._run_checks(["tables", "git"][: 1 if is_hang else 2], lambda _: None)
    assert first == CheckResult(
        name="tables",
        status=status,
        detail=detail,
        disables="query, and recordings as Parquet files and data frames",
        remedy="pip install duckdb pyarrow",
    )
    assert [check.status for check in others] == ([] if is_hang else [Status.OK])


def test_a_failed_check_is_printed_with_its_remedy_and_the_exit_code_is_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(names: list[str], _: object) -> list[CheckResult]:
        return [
            doctor.make_problem(name, Status.FAILED if name == "gloo" else Status.MISSING, "why")
            for name in names
        ]

    monkeypatch.setattr(doctor, "_run_checks", run)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "without it: run --data, and real ranks on the CPU" in result.stdout
    assert result.stdout.splitlines()[-1] == f"0 work, {len(CHECKS) - 1} missing, 1 failed"
