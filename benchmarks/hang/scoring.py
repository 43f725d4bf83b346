"""Injects a fault, writes what tools leave of it, and compares what shardscope says with the truth.

`score_torch` does the same with torch's own analyzer of Flight Recorder dumps.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from msgspec import Struct

from hang.faults import BUSY, KINDS, SILENT, Fault, Outcome, run_fault
from hang.log_writers import write_nccl_log, write_ras_json, write_ras_text, write_run_log
from hang.schedule import World, make_step
from hang.writers import (
    name_groups,
    write_debug_stacks,
    write_flight,
    write_py_spy,
    write_recordings,
)
from shardscope import explain_hang
from shardscope.record import expand_ranks

WRITERS = {
    "flight": lambda outcome, folder: write_flight(outcome, folder, as_json=False),
    "flight_json": lambda outcome, folder: write_flight(outcome, folder, as_json=True),
    "recording": write_recordings,
    "nccl_log": write_nccl_log,
    "ras_json": write_ras_json,
    "ras_text": write_ras_text,
    "log": write_run_log,
    "py_spy": write_py_spy,
    "debug_server": write_debug_stacks,
}
# Sets of files by kind of fault. Reductions and roots are in streams and NCCL's logs only.
_CALLS = (("flight",), ("flight_json",), ("recording",), ("nccl_log",))
_BUSY_FILES = (
    ("flight", "py_spy"),
    ("flight_json", "debug_server"),
    ("recording", "py_spy"),
    ("ras_json", "py_spy"),
    ("flight",),
    ("nccl_log",),
    ("ras_text",),
    ("log",),
)
FILES = {
    "skip": _CALLS,
    "other_branch": _CALLS,
    "size": _CALLS,
    "dtype": _CALLS,
    "reduction": (("recording",), ("nccl_log",)),
    "root": (("recording",), ("nccl_log",)),
    "crash": (("flight", "log"), ("recording",), ("log",), ("ras_json", "log")),
    "out_of_memory": (("flight", "log"), ("recording",), ("log",), ("flight_json", "log")),
    "killed": (("flight", "log"), ("recording", "log"), ("log",), ("flight",), ("ras_text",)),
    "stopped": (("flight",), ("ras_json",), ("ras_text",), ("flight_json", "debug_server")),
    "compute": _BUSY_FILES,
    "data_loading": _BUSY_FILES[:4],
    "file_system": _BUSY_FILES[:4],
    "compiling": _BUSY_FILES[:4],
    "order": _CALLS[:3],
    "no_send": (("flight",), ("recording",), ("nccl_log",)),
    "no_receive": (("flight",), ("recording",), ("nccl_log",)),
    "exit": (("recording",), ("flight",)),
    "network": (("flight", "log"), ("flight_json", "log"), ("log",)),
}
_HAS_STACKS = {"py_spy", "debug_server"}
_WITH_ORDER = {"flight", "flight_json", "recording", "nccl_log"}
_SHARED = ("network",)  # kinds without a single responsible rank


class Case(Struct, frozen=True):
    """A fault in a world, and the files that are left of it."""

    axes: dict[str, int]
    fault: Fault
    files: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        mesh = "×".join(f"{name}{size}" for name, size in self.axes.items())
        return f"{mesh} {self.fault.kind} {self.fault.axis} rank {self.fault.rank} {'+'.join(self.files)}"


class Score(Struct):
    """What was said of a case."""

    case: Case
    is_rank: bool
    is_place: bool
    is_class: bool
    seconds: float
    said: str

    @property
    def is_right(self) -> bool:
        return self.is_rank and self.is_place and self.is_class


def choose_cases(num_cases: int, seed: int = 7) -> list[Case]:
    """Cases that go through worlds, kinds, axes and files in turn, with random ranks and places."""
    rng = random.Random(seed)
    worlds = (
        {"dp": 4, "tp": 2},
        {"pp": 2, "dp": 2, "tp": 2},
        {"replicate": 2, "dp": 4},
        {"dp": 8},
        {"pp": 4, "dp": 2, "tp": 2},
        {"replicate": 2, "dp": 4, "tp": 4},
        {"pp": 4, "dp": 4, "tp": 4},
        {"dp": 16, "tp": 8},
        {"pp": 8, "dp": 8, "tp": 4},
        {"replicate": 4, "dp": 16, "tp": 8},
        {"pp": 8, "dp": 16, "tp": 8},
    )
    weights = (6, 6, 5, 4, 5, 4, 3, 3, 2, 1, 1)
    turns = dict.fromkeys(KINDS, 0)
    cases: list[Case] = []
    kinds = list(KINDS)
    while len(cases) < num_cases:
        kind = kinds[len(cases) % len(kinds)]
        axes = rng.choices(worlds, weights)[0]
        files = FILES[kind][turns[kind] % len(FILES[kind])]
        case = _place_fault(rng, axes, kind, files)
        if case is not None:
            turns[kind] += 1
            cases.append(case)
    return cases


def _place_fault(
    rng: random.Random, axes: dict[str, int], kind: str, files: tuple[str, ...]
) -> Case | None:
    """A fault of a kind at a random rank and place where it can be; None if there is none."""
    world = World(axes)
    rank = rng.randrange(world.size)
    step = make_step(world, rank)
    places = [index for index, op in enumerate(step) if _can_fail(kind, step, index)]
    if not places:
        return None
    by_axis: dict[str, list[int]] = {}
    for index in places:
        by_axis.setdefault(step[index].axis, []).append(index)
    axis = rng.choice(sorted(by_axis))
    index = rng.choice(by_axis[axis])
    is_blocking = kind == "order" or "recording" in files or rng.random() < 0.4
    fault = Fault(kind, axis, rank, index, is_blocking)
    case = Case(axes, fault, files, rng.randrange(10**6))
    outcome = run_fault(world, fault, case.seed)
    return case if _is_stuck(outcome) else None


def _can_fail(kind: str, step: list, index: int) -> bool:
    op = step[index]
    is_transfer = op.kind in ("send", "recv")
    if kind in ("no_send", "no_receive"):
        return op.kind == ("send" if kind == "no_send" else "recv")
    if is_transfer:
        return kind in (*SILENT, *BUSY) and kind != "exit"
    match kind:
        case "reduction":
            return op.reduce_op is not None
        case "root":
            return op.kind == "broadcast"
        case "skip":
            return index < len(step) - 2
        case "order":
            after = step[index + 1] if index + 1 < len(step) else op
            return after.axis != op.axis and after.kind not in ("send", "recv")
        case "exit":
            return op.axis == "world"
    return True


def _is_stuck(outcome: Outcome) -> bool:
    """Whether ranks wait, and the fault shows in what they issued."""
    if outcome.fault.kind == "order":
        return bool(outcome.waiting) and outcome.fault.rank in outcome.waiting
    return bool(outcome.waiting)


def score_case(case: Case, folder: Path) -> Score:
    """Write the files of a case, let them be explained, and compare."""
    outcome = write_case(case, folder)
    start = time.perf_counter()
    recording = explain_hang(folder)
    seconds = time.perf_counter() - start
    causes = recording.hangs[0].causes
    if not causes:
        return Score(case, False, False, False, seconds, "nothing")
    cause = causes[0]
    ranks = set(expand_ranks(cause.ranks))
    return Score(
        case,
        is_rank=_is_rank(outcome, ranks),
        is_place=_is_place(case, outcome, cause.group, cause.position),
        is_class=str(cause.kind) in accept_classes(case),
        seconds=seconds,
        said=f"{cause.kind} {cause.certainty} ranks {sorted(ranks)[:9]} group {cause.group} "
        f"position {cause.position} (truth: position {outcome.position})",
    )


def write_case(case: Case, folder: Path) -> Outcome:
    """Write the files of a case into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcome = run_fault(World(case.axes), case.fault, case.seed)
    for name in case.files:
        WRITERS[name](outcome, folder)
    return outcome


def _is_rank(outcome: Outcome, ranks: set[int]) -> bool:
    fault = outcome.fault
    if fault.kind in _SHARED:
        return set(outcome.world.group(fault.rank, fault.axis)) == ranks
    if fault.kind in ("no_send", "no_receive"):
        return fault.rank in ranks and len(ranks) <= 2
    return ranks == {fault.rank}


def accept_classes(case: Case) -> tuple[str, ...]:
    """The classes that are right for what these files can show."""
    kind, files = case.fault.kind, set(case.files)
    accepted = list(KINDS[kind])
    if kind in BUSY and not files & _HAS_STACKS and "recording" not in files:
        accepted.append("slow")
    if kind in BUSY and kind != "compute" and files == {"recording"}:
        accepted.append("slow")
    if kind == "killed" and "log" not in files:
        accepted.append("lost")
    if kind == "skip" and case.fault.blocking:
        accepted.append("wrong_order")  # a call left out leaves the same as one that comes later
    if kind == "order":
        accepted.append("skipped_call")
    if kind == "other_branch":
        accepted.append("skipped_call")
    return tuple(accepted)


def _is_place(case: Case, outcome: Outcome, group: str | None, position: int | None) -> bool:
    """Whether the group and the position are those of the collective at the fault."""
    if group is None:
        # What RAS and logs have of a rank that is gone does not say what it would have issued.
        return case.fault.kind in SILENT and not set(case.files) & _WITH_ORDER
    fault = case.fault
    wanted = outcome.world.group(fault.rank, fault.axis)
    if not set(case.files) & _WITH_ORDER:
        # RAS and watchdogs do not say in which order groups began to wait: any that does counts.
        axis = _axis_of(group, outcome)
        return any(
            call.op.axis == axis and not call.is_done and fault.rank in call.group
            for calls in outcome.calls.values()
            for call in calls[-8:]
        )
    if _axis_of(group, outcome) != fault.axis:
        return False
    if position is None or outcome.position is None:
        return bool(wanted)
    return position == outcome.position


def _axis_of(group: str, outcome: Outcome) -> str:
    """The axis of a group by the name that shardscope gives it."""
    hashes = re.findall(r"0x([0-9a-f]+)", group)
    if hashes:
        number = int(hashes[0], 16) - 0xABC0000
        for (axis, _), (name, _) in name_groups(outcome).items():
            if int(name) == number:
                return axis
    return re.split(r"[\[ ]", group)[0].removeprefix("mesh_")


def score_torch(case: Case, folder: Path) -> bool | None:
    """Whether torch's analyzer names the rank of a case; None if it cannot read these files."""
    if "flight" not in case.files:
        return None
    command = [
        sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder),
        "-p", "nccl_trace_rank_", "--allow-incomplete-ranks",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return read_torch(case, done.stdout + done.stderr)


def read_torch(case: Case, text: str) -> bool:
    """Whether the first problem that the analyzer prints is on the right rank and group."""
    start = re.search(
        r"Not all ranks joining|has errors|mismatch in the collective|We cannot decide", text
    )
    if start is None:
        return False
    block = text[start.start() : start.start() + 4000]
    ranks = {int(number) for number in re.findall(r"Culprit rank (\d+)", block)}
    missing = re.search(r"missing ranks: \{([\d, ]*)\}", block)
    if missing is not None:
        ranks |= {int(number) for number in re.findall(r"\d+", missing[1])}
    without = re.search(r"missed FR dumps from ranks \(\{([\d, ]*)\}\)", block)
    if without is not None:
        ranks |= {int(number) for number in re.findall(r"\d+", without[1])}
    axis = case.fault.axis
    described = "default_pg" if axis == "world" else f"mesh_{axis}"
    return ranks == {case.fault.rank} and (described in block or without is not None)
