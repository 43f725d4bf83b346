"""A small training program on gloo in which a rank fails: `python program.py FOLDER`, as a rank.

The environment says the mesh, the fault, its rank and step. Every rank writes a stream; a thread
that sees no progress writes its Flight Recorder dumps and its stacks, as a cluster's tools would.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

FOLDER = Path(sys.argv[1])
FAULT = os.environ.get("FAULT", "")
PLACE = os.environ.get("FAULT_PLACE", "tp")
RANK = int(os.environ["RANK"])
IS_FAULTY = int(os.environ.get("FAULT_RANK", "-1")) == RANK
STEP = int(os.environ.get("FAULT_STEP", "3"))
QUIET_S = float(os.environ.get("QUIET_S", "4"))
AXES = dict(
    (name, int(size)) for name, size in (axis.split("=") for axis in os.environ["MESH"].split(","))
)
progress = [0]  # changes with every call of a collective


class Loader:
    """Batches; on the faulty rank, one that never comes."""

    def __iter__(self):
        for step in range(6):
            if is_at("data", step) and FAULT == "data_loading":
                time.sleep(1000)
            if FAULT == "slow_rank" and IS_FAULTY:
                time.sleep(0.03)
            yield step, torch.ones(16)


def is_at(place: str, step: int) -> bool:
    return IS_FAULTY and step == STEP and place == ("data" if FAULT == "data_loading" else PLACE)


def prepare(place: str, step: int, x):
    """The tensor of the next collective; None if it is skipped. The fault happens here."""
    progress[0] += 1
    if not is_at(place, step):
        return x
    match FAULT:
        case "skip":
            return None
        case "size":
            return torch.ones(x.numel() * 2)
        case "dtype":
            return x.double()
        case "crash":
            raise ValueError("the batch has no labels")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "out_of_memory":
            torch.empty(1 << 50)
        case "hang":
            compute_for_ever()
        case "exit":
            os._exit(0)
    return x


def compute_for_ever() -> None:
    while True:
        time.sleep(0.1)


def forward(step, x, groups):
    for _ in range(2):
        y = prepare("tp", step, x)
        if y is not None:
            dist.all_reduce(y, group=groups["tp"])
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=groups["tp"])


def backward(step, x, groups):
    y = prepare("dp", step, x)
    if y is None:
        return
    if FAULT == "other_branch" and is_at("dp", step):
        dist.broadcast(y, group=groups["dp"], group_src=0)
    else:
        dist.all_reduce(y, group=groups["dp"])
    shard = torch.ones(len(x) * groups["dp"].size())
    dist.all_gather_into_tensor(shard, x, group=groups["dp"])


def finish(step, x, groups):
    y = prepare("world", step, x[:1])
    order = [groups["world"], groups["all"]]
    if FAULT == "order" and is_at("world", step):
        order.reverse()
    for group in order:
        if y is not None:
            dist.all_reduce(y.clone(), group=group)


def train(groups) -> None:
    for step, x in Loader():
        forward(step, x, groups)
        backward(step, x, groups)
        finish(step, x, groups)


def dump_when_quiet() -> None:
    """Write dumps when no collective was called for some seconds, as a watchdog does."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < QUIET_S:
        if progress[0] != seen or not seen:
            seen, since = progress[0], time.monotonic()
        time.sleep(0.05)
    write_dumps()


def write_dumps() -> None:
    from torch._C import _distributed_c10d as c10d

    data = c10d._dump_fr_trace()
    for name, content in (
        (f"nccl_trace_rank_{RANK}", data),
        (f"fr_rank{RANK}.json", c10d._dump_fr_trace_json()),
    ):
        content = content if isinstance(content, bytes) else content.encode()
        (FOLDER / name).write_bytes(content)
    with (FOLDER / f"stacks_rank{RANK}.txt").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    (FOLDER / f"done_{RANK}").touch()


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", tuple(AXES.values()), mesh_dim_names=tuple(AXES))
    groups = {name: mesh.get_group(name) for name in AXES}
    groups |= {"world": dist.group.WORLD, "all": dist.new_group(group_desc="all")}
    threading.Thread(target=dump_when_quiet, daemon=True).start()
    if os.environ.get("STREAM"):
        from shardscope import trace

        with trace(stream=str(FOLDER / "run-{rank}.jsonl"), force=True):
            train(groups)
    else:
        train(groups)
    write_dumps()
    time.sleep(1)


if __name__ == "__main__":
    main()
