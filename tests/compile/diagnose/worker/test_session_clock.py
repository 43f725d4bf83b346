"""A clock that load on the machine does not move, and who is called hung by it."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from shardscope.compile.diagnose.worker import rpc as conversation
from shardscope.compile.diagnose.worker import server as main
from shardscope.compile.diagnose.worker.process import SessionClock
from shardscope.compile.diagnose.worker.rpc import Kind, Message

SESSION = 7


class FakeMachine:
    """A process with one thread in the session, and one outside it, which always runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state, self.used, self.now = "S", 0, 1.0
        monkeypatch.setattr(glob, "glob", self._list)
        monkeypatch.setattr(SessionClock, "_read", lambda _, stat: self._read(stat))
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def _list(self, pattern: str) -> list[str]:
        return (
            [pattern.replace("*", "7")] if "task" in pattern else ["/proc/7/stat", "/proc/8/stat"]
        )

    def _read(self, stat: str) -> list[str]:
        is_ours = stat.startswith("/proc/7/")
        session, state = (SESSION, self.state) if is_ours else (8, "R")
        used = self.used * os.sysconf("SC_CLK_TCK")
        return [state, "1", "1", str(session), *["0"] * 7, f"{used:.0f}", "0", "0", "0"]

    def let_pass(self, seconds: float, *, state: str, used: float = 0.0) -> None:
        self.now += seconds
        self.used += used
        self.state = state


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine(monkeypatch)


@pytest.mark.parametrize(
    ("state", "used", "counted"),
    [
        ("S", 0.0, 0.5),  # asleep: nothing keeps it from going on but itself
        ("R", 0.5, 0.5),  # it has a processor to itself
        ("R", 0.1, 0.1),  # it shares one with four others
        ("R", 0.0, 0.0),  # it waits for one
        ("D", 0.0, 0.0),  # it waits for a disk
        ("R", 2.0, 0.5),  # four of its threads have one each
    ],
)
def test_only_time_that_a_process_was_given_or_did_not_want_counts(
    machine: FakeMachine, state: str, used: float, counted: float
) -> None:
    clock = SessionClock(SESSION)
    assert clock.look() == 0.0
    machine.let_pass(0.5, state=state, used=used)
    assert clock.look() == pytest.approx(counted)
    assert clock.processes == {"/proc/7/stat"}


def test_a_process_group_of_its_own_within_a_session_counts_for_both() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, process_group=0)
    try:
        clocks = [SessionClock(child.pid), SessionClock(os.getsid(0))]
        for clock in clocks:
            clock.look()
            assert f"/proc/{child.pid}/stat" in clock.processes
    finally:
        child.communicate(b"\n")


def test_time_between_two_looks_at_the_clock_is_limited(
    machine: FakeMachine,
) -> None:
    clock = SessionClock(SESSION)
    clock.look()
    machine.let_pass(60, state="S")
    assert clock.look() == SessionClock.LONGEST_STEP


def watchdog(machine: FakeMachine, phase: str) -> Any:
    limits = {"": 60.0, "running": 10.0}
    found = conversation._Watchdog(SimpleNamespace(pid=SESSION), limits)  # type: ignore[arg-type]
    found.begin(phase)
    assert not found.is_hung()
    return found


def test_a_starved_process_is_never_hung_and_one_that_does_nothing_is(
    machine: FakeMachine,
) -> None:
    dog = watchdog(machine, "running")
    for _ in range(1000):
        machine.let_pass(1, state="R")
        assert not dog.is_hung()
    answers = []
    for _ in range(12):
        machine.let_pass(1, state="R", used=1.0)
        answers.append(dog.is_hung())
    assert answers == [False] * 10 + [True] * 2


def test_progress_is_waited_for_as_long_as_compiling_may_take(machine: FakeMachine) -> None:
    dog = watchdog(machine, "running")
    hung = []
    for _ in range(70):
        machine.let_pass(1, state="S")
        dog.see_progress()
        hung.append(dog.is_hung())
    assert hung == [False] * 61 + [True] * 9  # the first look has nothing to count
    dog.begin("running")
    assert not dog.is_hung()


def test_a_process_that_it_begins_is_progress(machine: FakeMachine) -> None:
    dog = watchdog(machine, "running")
    for number in range(3):
        for _ in range(8):
            machine.let_pass(1, state="S")
            assert not dog.is_hung()
        dog._clock.processes.add(f"/proc/{100 + number}/stat")


def spin(until: threading.Event) -> None:
    while not until.is_set():
        pass


def spin_elsewhere(until: threading.Event) -> None:
    while not until.is_set():
        time.sleep(0)


def test_code_that_is_new_is_progress_and_a_loop_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_LOOK_S", 0.001)
    sent: list[Message] = []
    looks = threading.Semaphore(0)
    frames = main.sys._current_frames  # type: ignore[attr-defined]

    def look() -> Any:
        looks.release()
        return {ident: frame for ident, frame in frames().items() if ident in threads}

    reporter = main._ProgressReporter(SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    threads: set[int] = set()
    monkeypatch.setattr(main, "sys", SimpleNamespace(_current_frames=look))
    watcher = threading.Thread(target=reporter.watch, daemon=True)
    watcher.start()

    def run(function: Any) -> int:
        """How many messages come while a function loops, from when its lines are known."""
        end = threading.Event()
        thread = threading.Thread(target=function, args=(end,), daemon=True)
        thread.start()
        threads.add(thread.ident or 0)
        for _ in range(100):
            looks.acquire()
        known = len(sent)
        for _ in range(30):
            looks.acquire()
        end.set()
        threads.clear()
        thread.join()
        assert len(sent) == known
        return known

    with reporter:
        first = run(spin)
        second = run(spin_elsewhere)
        reporter.begin("running")
        assert sent[-1].kind is Kind.PHASE
        third = run(spin)
    assert 0 < first < second < third
