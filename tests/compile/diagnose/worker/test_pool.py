"""Calls in another process: values, errors, crashes, hangs, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import isolated_calls as calls
from shardscope.compile.diagnose.worker.pool import Workers
from shardscope.compile.diagnose.worker.sandbox import Sandbox
from shardscope.errors import CompileError, RemoteError, WorkerCrashed, WorkerHung

TESTS = Path(__file__).resolve().parents[3]


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def test_one_process_serves_many_calls_and_keeps_what_they_leave(workers: Workers) -> None:
    first = workers.call(calls.count)
    assert [workers.call(calls.count) for _ in range(3)] == [first + 1, first + 2, first + 3]
    assert workers.call(calls.pid) == workers.pid != os.getpid()


def test_functions_that_cannot_be_imported_travel_by_value(workers: Workers) -> None:
    offset = torch.tensor([1.0, 2.0])

    def shifted(context: object, value: torch.Tensor) -> torch.Tensor:
        return value + offset + len(CONSTANT)

    assert torch.equal(workers.call(shifted, torch.zeros(2)), offset + 3)
    assert workers.call(lambda context: wait_until_gone.__name__) == "wait_until_gone"


CONSTANT = "abc"


def test_what_is_printed_reaches_neither_the_terminal_nor_the_protocol(
    workers: Workers, capfd: pytest.CaptureFixture[str]
) -> None:
    workers.call(calls.print_much, "hello")
    assert workers.output.endswith("from a child\n")
    assert len(workers.output) <= 16_384
    assert capfd.readouterr() == ("", "")


def test_an_error_comes_back_with_its_type_message_traceback_and_itself(workers: Workers) -> None:
    with pytest.raises(RemoteError, match="ValueError: the cat is on the mat") as caught:
        workers.call(calls.fail, "plain")
    assert caught.value.kind == "ValueError"
    assert caught.value.message == "the cat is on the mat"
    assert "in fail\n" in caught.value.trace
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_that_cannot_travel_is_reported(workers: Workers) -> None:
    with pytest.raises(RemoteError, match=r"isolated_calls.OddError: 1 is not 2") as caught:
        workers.call(calls.fail, "odd")
    assert caught.value.__cause__ is None


def test_a_call_that_exits_is_an_error_and_the_process_stays(workers: Workers) -> None:
    before = workers.pid
    with pytest.raises(RemoteError, match="SystemExit: 4"):
        workers.call(calls.fail, "exit")
    assert workers.call(calls.pid) == before


def test_what_cannot_be_sent_or_returned_is_reported(workers: Workers) -> None:
    with pytest.raises(CompileError, match=r"a call of add cannot be sent to another process"):
        workers.call(calls.add, threading.Lock(), 1)
    with pytest.raises(RemoteError, match=r"TypeError: cannot pickle '_thread.lock' object"):
        workers.call(calls.return_a_lock)
    assert workers.call(calls.add, 1, 2) == 3


def test_a_preparation_runs_once_in_a_process_until_another_takes_its_place(
    workers: Workers,
) -> None:
    value = torch.zeros(2)
    workers.prepare(calls.keep, "prepared", value, name="value")
    value.fill_(5)
    assert torch.equal(workers.call(calls.held, "prepared"), torch.zeros(2))
    assert workers.call(calls.held, "times") == 1
    workers.prepare(calls.keep, "prepared", value, name="value")
    assert torch.equal(workers.call(calls.held, "prepared"), value)
    assert workers.call(calls.held, "times") == 2


def test_big_tensors_go_both_ways(workers: Workers) -> None:
    big = torch.arange(3_000_000)
    assert torch.equal(workers.call(calls.add, big, 1), big + 1)


def test_a_crash_is_reported_and_the_next_call_has_a_prepared_process(fragile: Workers) -> None:
    fragile.prepare(calls.keep, "word", "kept")
    assert fragile.call(calls.held, "word") == "kept"
    before, started = fragile.pid, fragile.num_started
    with pytest.raises(WorkerCrashed, match=r"died \(SIGSEGV\) while compiling") as caught:
        fragile.call(calls.read_address_zero, limits=60)
    assert caught.value.phase == "compiling"
    assert "in read_address_zero" in caught.value.output
    assert fragile.call(calls.held, "word") == "kept"
    assert fragile.call(calls.held, "times") == 1
    assert fragile.pid != before
    assert fragile.num_started == started + 1, "the next to stand by"


def test_an_exit_code_is_reported_with_the_last_output(fragile: Workers) -> None:
    with pytest.raises(WorkerCrashed, match=r"died \(exit code 3\)\.") as caught:
        fragile.call(calls.exit_with_three)
    assert caught.value.output == "goodbye\n"


def test_a_hang_in_c_is_ended_at_the_limit_of_its_phase_with_all_children(
    fragile: Workers, tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    limits = {"running": 0.5, "": 60}
    with pytest.raises(WorkerHung, match=r"no progress for 0\.5 s while running") as caught:
        fragile.call(calls.begin_a_child_and_sleep_with_the_lock, str(file), limits=limits)
    assert (caught.value.phase, caught.value.seconds) == ("running", 0.5)
    assert "in sleep_with_the_lock" in caught.value.output
    assert wait_until_gone(int(file.read_text()))


def test_a_request_that_the_worker_does_not_read_is_ended_at_the_limit(fragile: Workers) -> None:
    fragile.call(calls.stop_reading_requests, 0.1)
    time.sleep(0.3)
    more_than_a_pipe_holds = torch.zeros(1_000_000)
    with pytest.raises(WorkerHung, match=r"no progress for 0\.5 s"):
        fragile.call(calls.add, more_than_a_pipe_holds, 1, limits=0.5)
    assert fragile.call(calls.add, 1, 2) == 3


def test_an_interrupt_ends_the_process_and_the_next_call_works(fragile: Workers) -> None:
    fragile.call(calls.count)
    before = fragile.pid
    assert before is not None
    with pytest.raises(KeyboardInterrupt):
        fragile.call(calls.interrupt, os.getpid())
    assert wait_until_gone(before)
    assert fragile.call(calls.count) == 1


def test_two_workers_answer_at_once_and_ctrl_c_reaches_neither(
    workers: Workers, fragile: Workers
) -> None:
    sums: dict[str, list[int]] = {}

    def ask(name: str, pool: Workers) -> None:
        sums[name] = [pool.call(calls.add, number, 1) for number in range(50)]

    threads = [threading.Thread(target=ask, args=pair) for pair in (("a", workers), ("b", fragile))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums["a"] == sums["b"] == list(range(1, 51))
    for pool in (workers, fragile):
        assert pool.pid == os.getsid(pool.pid or 0) != os.getsid(0)


def test_starting_does_not_wait_and_closing_leaves_nothing(sandbox: Sandbox) -> None:
    with Workers(sandbox) as workers:
        assert (workers.num_started, workers.output) == (1, "")
        pid = workers.pid
        assert pid is not None
        assert is_running(pid)
    assert wait_until_gone(pid)
    with pytest.raises(CompileError, match="the workers are closed"):
        workers.call(calls.count)


def test_a_worker_that_cannot_start_says_why(sandbox: Sandbox) -> None:
    with (
        Workers(sandbox, preload=("no_such_module",)) as workers,
        pytest.raises(WorkerCrashed, match=r"exit code 1\) while starting") as caught,
    ):
        workers.call(calls.count)
    assert "No module named 'no_such_module'" in caught.value.output


_PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
import isolated_calls as calls
from shardscope.compile.diagnose.worker.sandbox import Sandbox
from shardscope.compile.diagnose.worker.pool import Workers

workers = Workers(Sandbox(sys.argv[2]), preload=(), has_standby=False)
print(workers.call(calls.pid), flush=True)
workers.call(calls.sleep_with_the_lock)
"""


def test_no_worker_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(TESTS), str(tmp_path)], stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
    assert wait_until_gone(pid)
