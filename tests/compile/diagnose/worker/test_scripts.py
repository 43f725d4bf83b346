"""Scripts in fresh processes: exit codes, signals, time-outs, and nothing of ours in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardscope.compile.diagnose.worker.fork_server import ScriptRun, prewarm, run_script
from shardscope.compile.diagnose.worker.sandbox import Sandbox

_LOOK_AROUND = """
import os, sys
import sibling
print(__name__, sys.argv[1:], sibling.WORD, os.environ["WORD"])
# What torch calls when it is imported, where the package is installed, is all that may be there.
ours = {name for name in sys.modules if name.startswith("shardscope")}
print(sorted(ours - {"shardscope", "shardscope._torch", "shardscope._torch.autoload"}))
print(os.getcwd())
sys.exit(1)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def test_a_script_runs_as_python_would_run_it(script: Path, sandbox: Sandbox) -> None:
    script.write_text(_LOOK_AROUND)
    script.with_name("sibling.py").write_text("WORD = 'hello'")
    result = run_script(
        script,
        sandbox=sandbox,
        timeout_s=60,
        arguments=["--flag", "ü"],
        extra={"WORD": "there"},
    )
    assert result.output.splitlines() == [
        "__main__ ['--flag', 'ü'] hello there",
        "[]",
        str(sandbox.work),
    ]
    assert result == ScriptRun(1, result.output)
    assert not list(script.parent.rglob("__pycache__"))


def test_a_signal_is_reported_also_of_a_process_that_was_warm(
    script: Path, sandbox: Sandbox
) -> None:
    script.write_text("import os\nprint('before')\nos.abort()")
    with prewarm(sandbox) as warm:
        result = run_script(script, sandbox=sandbox, timeout_s=60, warm=warm)
    assert result == ScriptRun(None, "before\n", signal="SIGABRT")


def test_a_script_that_takes_too_long_is_ended(script: Path, sandbox: Sandbox) -> None:
    script.write_text("import time\nprint('before')\ntime.sleep(100)")
    result = run_script(script, sandbox=sandbox, timeout_s=0.5)
    assert result == ScriptRun(None, "before\n", is_timeout=True)
