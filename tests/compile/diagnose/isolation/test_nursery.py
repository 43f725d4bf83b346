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
from shardscope.compile.diagnose.isolation.enclosure import Enclosure
from shardscope.compile.diagnose.isolation.nursery import Nursery
from shardscope.compile.diagnose.isolation.scripts import ScriptResult, prewarm, run_script
from shardscope.compile.diagnose.isolation.workers import Workers
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


def run_in(nursery: Nursery, enclosure: Enclosure, script: Path, timeout_s: float) -> ScriptResult:
    with prewarm(enclosure, nursery=nursery) as warm:
        return run_script(
            script, enclosure=enclosure, timeout_s=timeout_s, arguments=["--flag"], warm=warm
        )


def test_a_script_in_a_fork_runs_as_python_would_run_it(
    nursery: Nursery, enclosure: Enclosure, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_LOOK_AROUND)
    script.with_name("sibling.py").write_text("WORD = 'hello'")
    result = run_in(nursery, enclosure, script, 60)
    assert result.output.splitlines() == [
        f"__main__ ['--flag'] hello {enclosure.work} True",
        "[]",
        "['/dev/null', 'pipe', 'pipe']",
        "[]",
        "at exit",
    ]
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("os.abort()", ScriptResult(None, "before\n", signal="SIGABRT")),
        ("time.sleep(100)", ScriptResult(None, "before\n", is_timeout=True)),
    ],
)
def test_a_fork_that_dies_or_does_not_end_is_told(
    nursery: Nursery, enclosure: Enclosure, tmp_path: Path, code: str, expected: ScriptResult
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os, time\nprint('before')\n{code}")
    assert run_in(nursery, enclosure, script, 1.0) == expected


def test_a_fork_that_nobody_waits_for_any_more_is_never_left_running(enclosure: Enclosure) -> None:
    with Nursery(enclosure) as nursery:
        Workers(enclosure, preload=(), has_standby=False, nursery=nursery).close()
        with Workers(enclosure, preload=(), has_standby=False, nursery=nursery) as workers:
            assert workers.call(calls.pid) == workers.pid
            children = Path(f"/proc/{nursery.pid}/task/{nursery.pid}/children").read_text().split()
            assert children == [str(workers.pid)]


def test_forks_end_with_their_nursery_which_is_told(enclosure: Enclosure) -> None:
    with (
        Nursery(enclosure) as nursery,
        Workers(enclosure, preload=(), has_standby=False, nursery=nursery) as workers,
    ):
        workers.call(calls.count)
        os.kill(nursery.pid, signal.SIGKILL)
        with pytest.raises(WorkerCrashed, match="SIGKILL"):
            workers.call(calls.sleep_with_the_lock, limits=60)


_PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
import isolated_calls as calls
from shardscope.compile.diagnose.isolation.enclosure import Enclosure
from shardscope.compile.diagnose.isolation.nursery import Nursery
from shardscope.compile.diagnose.isolation.workers import Workers

enclosure = Enclosure(sys.argv[2])
nursery = Nursery(enclosure)
workers = Workers(enclosure, preload=(), has_standby=False, nursery=nursery)
print(nursery.pid, workers.call(calls.pid), flush=True)
workers.call(calls.sleep_with_the_lock)
"""


def test_neither_nursery_nor_fork_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(TESTS), str(tmp_path)], stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(one) for one in parent.stdout.readline().split()]
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
