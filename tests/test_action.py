"""action.yml and the hook for pre-commit: their steps run as they are, in a checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from checked_repository import git, make_repository
from github_api import Comments, serve_comments
from sarif_schema import CODE_QUALITY, SARIF

ROOT = Path(__file__).resolve().parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
TIMEOUT_S = 200


def expand(text: str, values: dict[str, str]) -> str:
    """Evaluate the expressions of an action: names, and the first of several that is not empty."""

    def look_up(match: re.Match[str]) -> str:
        names = [name.strip() for name in match[1].split("||")]
        return next((values[name] for name in names if values[name]), "")

    return re.sub(r"\$\{\{(.*?)\}\}", look_up, text)


def run_steps(inputs: dict[str, str], environment: dict[str, str], workspace: Path) -> list[Any]:
    """Run the scripts of the action's steps as GitHub's runner does."""
    values = {
        **{
            f"inputs.{name}": str(item.get("default", ""))
            for name, item in ACTION["inputs"].items()
        },
        **{f"inputs.{name}": value for name, value in inputs.items()},
        "github.action_path": str(ROOT),
        "github.token": "from-the-runner",
    }
    values = {name: expand(value, values) for name, value in values.items()}
    done = []
    for step in ACTION["runs"]["steps"]:
        if "run" not in step:
            continue
        assert step["shell"] == "bash"
        assert "${{" not in step["run"], "an input in the text of a script can run commands"
        variables = {name: expand(text, values) for name, text in step.get("env", {}).items()}
        done.append(
            subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=workspace / expand(step.get("working-directory", "."), values),
                env={**environment, **variables},
                check=False,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        )
    return done


def make_environment(tmp_path: Path, workspace: Path) -> dict[str, str]:
    """What GitHub sets for a job that a pull request to main has started."""
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"pull_request": {"number": 7}}))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path / "installed"),
        "OMP_NUM_THREADS": "1",
        "GITHUB_ACTIONS": "true",
        "GITHUB_BASE_REF": "main",
        "GITHUB_EVENT_PATH": str(event),
        "GITHUB_OUTPUT": str(tmp_path / "outputs"),
        "GITHUB_REPOSITORY": "octo/model",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "GITHUB_WORKSPACE": str(workspace),
        "RUNNER_TEMP": str(tmp_path / "temp"),
    }


def test_the_action_installs_checks_compares_and_comments(tmp_path: Path) -> None:
    workspace = make_repository(tmp_path)
    environment = make_environment(tmp_path, workspace)
    offline = (
        f"--no-index --no-deps --no-build-isolation --no-compile --target {tmp_path / 'installed'}"
    )
    inputs = {"pip-args": offline, "fail-on": "bytes:worse"}
    with serve_comments(Comments(["hello"] * 100 + ["<!-- shardscope ci -->\nold"])) as comments:
        environment["GITHUB_API_URL"] = comments.url
        installed, checked = run_steps(inputs, environment, workspace)
    assert installed.returncode == 0, installed.stderr
    assert (tmp_path / "installed" / "shardscope" / "cli" / "ci.py").is_file()
    assert checked.returncode == 1, checked.stderr
    lines = checked.stdout.splitlines()
    assert "updated the comment on pull request 7." in lines
    assert lines[-1] == (
        "shardscope ci: 1 of 3 limits broken; --fail-on matched: bytes:worse (2 changes)"
    )
    assert [line for line in lines if line.startswith("::error file=shardscope.toml,line=4,")]
    # It is the comment of an earlier run that was updated, with the token of the runner.
    assert len(comments.bodies) == 101
    assert comments.bodies[100].startswith("<!-- shardscope ci -->\n\n## ❌ shardscope: 1 of 3")
    assert "`all_reduce[tp] in forward, sent` | 3.00 KiB | 6.00 KiB |" in comments.bodies[100]
    assert comments.tokens == {"Bearer from-the-runner"}
    assert (tmp_path / "summary.md").read_text() == comments.bodies[100]
    outputs = dict(line.split("=", 1) for line in (tmp_path / "outputs").read_text().splitlines())
    folder = tmp_path / "temp" / "shardscope-ci"
    assert outputs == {"folder": str(folder), "sarif": str(folder / "shardscope.sarif")}
    log = json.loads((folder / "shardscope.sarif").read_bytes())
    jsonschema.validate(log, SARIF)
    rules = [result["ruleId"] for result in log["runs"][0]["results"]]
    assert rules == ["contract-bytes", "diff-bytes"]
    issues = json.loads((folder / "gl-code-quality-report.json").read_bytes())
    jsonschema.validate(issues, CODE_QUALITY)
    assert {path.name for path in (folder / "base").iterdir()} == {"1-trace.json.gz"}
    # The checkout is as it was: no worktree, no files.
    assert git("status", "--porcelain", "--ignored", cwd=workspace) in ("", "!! pkg/__pycache__/")
    assert len(git("worktree", "list", cwd=workspace).splitlines()) == 1


def test_every_input_of_the_action_is_used_and_described() -> None:
    text = json.dumps(ACTION["runs"])
    assert {name for name in ACTION["inputs"] if f"inputs.{name}" not in text} == set()
    assert all(item["description"] for item in ACTION["inputs"].values())
    assert all("default" in item for item in ACTION["inputs"].values())
    uploads = [step for step in ACTION["runs"]["steps"] if "upload" in step.get("uses", "")]
    assert all("always()" in step["if"] for step in uploads)  # also after a failed check


def test_the_hook_records_nothing_if_no_changed_file_matters(tmp_path: Path) -> None:
    assert HOOK["language"] == "system"  # it imports the user's model
    workspace = make_repository(tmp_path)
    words = HOOK["entry"].split()
    assert words[0] == "shardscope"
    done = subprocess.run(
        [sys.executable, "-m", *words, "pkg/unrelated.py"],
        cwd=workspace,
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "shardscope ci: the changed files are not part of the recorded programs\n"
