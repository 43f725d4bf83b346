"""Forks of a process that has imported torch: they are as fresh as others, and end as others do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import isolated_calls as calls
from shardscope.compile.diagnose.worker.fork_server import (
    ForkServer,
    ScriptRun,
    prewarm,
    run_script,
)
from shardscope.compile.diagnose.worker.pool import Workers
from shardscope.compile.diagnose.worker.sandbox import Sandbox
from shardscope.errors import WorkerCrashed

TESTS = Path(__file__).resolve().parents[3]

_LOOK_AROUND = """
import atexit, os, sys
import sibling
atexit.register(print, "at exit")
print(__name__, sys.argv[1:], sibling.WORD, os.getcwd(), os.getsid(0) == os.getpid())
loaded_by_torch = ("shardscope", "shardscope._torch", "shardscope._torch.autoload")
print(sorted(name for name in {*sys.modules} - {*loaded_by_torch} if name.startswith("shardscope")))
print([os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in (0, 1, 2)])
print(sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[3:-1])
sys.exit(1)
"""


def run_in(fork_server: ForkServer, sandbox: Sandbox, script: Path, timeout_s: float) -> ScriptRun:
    with prewarm(sandbox, fork_server=fork_server) as warm:
        return run_script(
            script, sandbox=sandbox, timeout_s=timeout_s, arguments=["--flag"], warm=warm
        )


def test_a_script_in_a_fork_runs_as_python_would_run_it(
    fork_server: ForkServer, sandbox: Sandbox, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_LOOK_AROUND)
    script.with_name("sibling.py").write_text("WORD = 'hello'")
    result = run_in(fork_server, sandbox, script, 60)
    assert result.output.splitlines() == [
        f"__main__ ['--flag'] hello {sandbox.work} True",
        "[]",
        "['/dev/null', 'pipe', 'pipe']",
        "[]",
        "at exit",
    ]
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("os.abort()", ScriptRun(None, "before\n", signal="SIGABRT")),
        ("time.sleep(100)", ScriptRun(None, "before\n", is_timeout=True)),
    ],
)
def test_a_fork_that_dies_or_does_not_end_is_reported(
    fork_server: ForkServer, sandbox: Sandbox, tmp_path: Path, code: str, expected: ScriptRun
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, time\nprint('before')\n{code}")
    assert run_in(fork_server, sandbox, script, 1.0) == expected


def test_a_fork_that_is_no_longer_waited_for_is_never_left_running(sandbox: Sandbox) -> None:
    with ForkServer(sandbox) as fork_server:
        Workers(sandbox, preload=(), has_standby=False, fork_server=fork_server).close()
        with Workers(sandbox, preload=(), has_standby=False, fork_server=fork_server) as workers:
            assert workers.call(calls.pid) == workers.pid
            children = (
                Path(f"/proc/{fork_server.pid}/task/{fork_server.pid}/children").read_text().split()
            )
            assert children == [str(workers.pid)]


def test_forks_end_with_their_fork_server_which_is_reported(sandbox: Sandbox) -> None:
    with (
        ForkServer(sandbox) as fork_server,
        Workers(sandbox, preload=(), has_standby=False, fork_server=fork_server) as workers,
    ):
        workers.call(calls.count)
        os.kill(fork_server.pid, signal.SIGKILL)
        with pytest.raises(WorkerCrashed, match="SIGKILL"):
            workers.call(calls.sleep_with_the_lock, limits=60)


_PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
import isolated_calls as calls
from shardscope.compile.diagnose.worker.sandbox import Sandbox
from shardscope.compile.diagnose.worker.fork_server import ForkServer
from shardscope.compile.diagnose.worker.pool import Workers

sandbox = Sandbox(sys.argv[2])
fork_server = ForkServer(sandbox)
workers = Workers(sandbox, preload=(), has_standby=False, fork_server=fork_server)
print(fork_server.pid, workers.call(calls.pid), flush=True)
workers.call(calls.sleep_with_the_lock)
"""


def test_neither_fork_server_nor_fork_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(TESTS), str(tmp_path)], stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 2
    assert not any(map(_is_running, pids))


def _is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
