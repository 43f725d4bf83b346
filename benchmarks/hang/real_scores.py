"""Scores `shardscope hang` on gloo processes that are really killed, stopped or slowed.

Each run is scored with every set of files that it left: streams alone, dumps and stacks alone, and
all together. Then the same mistakes run with TORCH_DISTRIBUTED_DEBUG=DETAIL, which checks kinds,
sizes and dtypes of collectives before they are issued.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from benchmarks.hang.real_runs import run_ranks
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from shardscope import explain_hang
from shardscope.errors import RecordingError
from shardscope.record import Recording, expand_ranks

MESH = {"dp": 2, "tp": 2}
RANK = 3
# Files by the pattern of their names.
FILES = {
    "streams": ("run-*.jsonl",),
    "dumps, stacks": ("nccl_trace_rank_*", "stacks_rank*"),
    "all": ("*",),
}
_SKIPPED = ("skipped_call", "different_call")  # the next call is then in its place
_SLOW = ("slow", "crash", "lost", "stopped")


class RealFault(Struct, frozen=True):
    """A fault at a place, and the classes of cause that streams and stacks can show of it."""

    kind: str
    place: str
    by_streams: tuple[str, ...]
    by_stacks: tuple[str, ...]


FAULTS = (
    RealFault("skip", "tp", _SKIPPED, (*_SKIPPED, "wrong_order")),
    RealFault("other_branch", "dp", ("different_call",), ("different_call",)),
    RealFault("size", "dp", ("mismatch",), ("mismatch",)),
    RealFault("dtype", "dp", ("mismatch",), ("mismatch",)),
    RealFault("order", "world", ("wrong_order", "skipped_call"), ("wrong_order", "skipped_call")),
    RealFault("crash", "dp", ("crash",), _SLOW),
    RealFault("out_of_memory", "tp", ("out_of_memory",), _SLOW),
    RealFault("kill", "dp", ("crash", "slow"), _SLOW),
    RealFault("stop", "dp", ("slow",), ("stopped", "lost")),
    RealFault("data_loading", "tp", ("slow", "data_loading"), ("data_loading",)),
    RealFault("hang", "world", ("slow",), ("slow",)),
    RealFault("slow_rank", "dp", ("slow_rank",), ()),
)


def score_real(folder: Path, console: Console) -> None:
    """Run each fault with streams and dumps, then with DETAIL mode, and print what was named."""
    table = Table("fault", *FILES, "DETAIL mode", title="4 gloo processes")
    num_right = num_scored = 0
    for fault in FAULTS:
        place = folder / fault.kind
        run_ranks(place, MESH, fault.kind, rank=RANK, place=fault.place, stream=True)
        row = []
        for name in FILES:
            accepted = fault.by_streams if name == "streams" else fault.by_stacks
            if name == "all":
                accepted = (*fault.by_streams, *fault.by_stacks)
            if not accepted:
                row.append("–")
                continue
            if name == "dumps, stacks" and len(list(place.glob("nccl_trace_rank_*"))) < 2:
                row.append("– (ranks ended without them)")
                continue
            said, is_right = explain_files(place, FILES[name], accepted)
            num_right += is_right
            num_scored += 1
            row.append(said if is_right else f"[yellow]{said}")
        table.add_row(fault.kind, *row, run_detail(folder / f"{fault.kind}_detail", fault))
    console.print(table)
    console.print(f"{num_right} of {num_scored} right")


def explain_files(
    folder: Path, patterns: tuple[str, ...], accepted: tuple[str, ...]
) -> tuple[str, bool]:
    """What is said of some files of a run, and whether it is the right rank and class."""
    files = [str(file) for pattern in patterns for file in sorted(folder.glob(pattern))]
    try:
        recording = explain_hang(files)
    except RecordingError as error:
        return str(error), False
    kind, ranks = name_cause(recording)
    return f"{kind} {sorted(ranks)}", kind in accepted and ranks == {RANK}


def name_cause(recording: Recording) -> tuple[str, set[int]]:
    """The class and the ranks of the first cause, or of the slowest rank."""
    (hang,) = recording.hangs
    if hang.causes:
        return str(hang.causes[0].kind), set(expand_ranks(hang.causes[0].ranks))
    if hang.slow_ranks:
        return "slow_rank", {hang.slow_ranks[0].rank}
    return "nothing", set()


def run_detail(folder: Path, fault: RealFault) -> str:
    """What DETAIL mode says of the fault: the ranks that it names, or that it says nothing."""
    run_ranks(
        folder, MESH, fault.kind, rank=RANK, place=fault.place,
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
    )  # fmt: skip
    said = list(dict.fromkeys(_list_messages(folder)))
    shutil.rmtree(folder)
    return "; ".join(said[:2]) or "nothing"


def _list_messages(folder: Path) -> Iterator[str]:
    for log in sorted(folder.glob("log_*.txt")):
        text = log.read_text()
        for match in re.finditer(r"Detected mismatch between collectives on ranks", text):
            line = text[match.start() : text.find("\n", match.start())]
            ranks = re.findall(r"Rank (\d+) is running", line)
            yield f"ranks {' and '.join(ranks)} of a group disagree"
