"""Programs that run the same on a real process group and in a simulated world, one rank each.

`python rank_programs.py FOLDER NAME...` runs them as one rank of a real gloo group and saves what
each recorded as FOLDER/NAME-RANK.json.gz.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import empty, nn, ones
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardscope import Trace, phases, trace

WIDTH = 8


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep what comes in, and add to it."""
        return x + self.down(self.up(x).relu())


def train_tensor_parallel_with_fsdp() -> Trace:
    """Two blocks on a mesh of 2 × 2, one step with gradient clipping and an optimizer."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(Block(), Block())
    for block in model:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model) as t, phases("step"):
        model(ones(4, WIDTH)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with phases("optimizer"):
            optimizer.step()
    return t


def train_with_ddp() -> Trace:
    """Two steps, for DDP rebuilds its buckets after the first."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(Block(), Block()), bucket_cap_mb=0.001)
    with trace(model) as t:
        for _ in range(2):
            model(ones(4, WIDTH)).sum().backward()
    return t


def train_in_a_pipeline() -> Trace:
    """One stage per rank, four microbatches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    example = empty(1, WIDTH, device="meta", requires_grad=True)
    stage = PipelineStage(
        Block(), rank, size, torch.device("cpu"), input_args=example, output_args=example
    )
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).sum())
    batch = ones(4, WIDTH)
    with trace(stage.submod) as t:
        if rank == 0:
            schedule.step(batch)
        elif rank == size - 1:
            schedule.step(target=batch)
        else:
            schedule.step()
    return t


def call_everything() -> Trace:
    """Plain calls of every kind that gloo knows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    pieces = [ones(3) for _ in range(size)] if rank == 1 else None
    gathered = [empty(3) for _ in range(size)] if rank == 2 else None
    # Rank r sends r + s + 1 rows to rank s, and so gets as many from it.
    splits = [rank + other + 1 for other in range(size)]
    with trace() as t:
        dist.all_reduce(ones(3))
        dist.all_reduce(ones(3, dtype=torch.int64), op=dist.ReduceOp.MAX)
        dist.all_gather([empty(3) for _ in range(size)], ones(3))
        dist.all_gather_into_tensor(empty(size * 3), ones(3))
        dist.reduce_scatter_tensor(empty(3), ones(size * 3))
        dist.broadcast(ones(3), src=1)
        dist.reduce(ones(3), dst=2)
        dist.gather(ones(3), gathered, dst=2)
        dist.scatter(empty(3), pieces, src=1)
        dist.all_to_all_single(empty(size), ones(size))
        dist.all_to_all_single(empty(sum(splits), 2), ones(sum(splits), 2), splits, splits)
        dist.barrier()
        swaps = [dist.P2POp(dist.isend, ones(3), after), dist.P2POp(dist.irecv, empty(3), before)]
        for work in dist.batch_isend_irecv(swaps):
            work.wait()
        reduced = dist.all_reduce(ones(3), async_op=True)
        assert reduced is not None
        reduced.wait()
    return t


def exchange_objects() -> Trace:
    """All six object collectives; what travels has the same size on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    thing = {"rank": "x" * 10}
    held: list[Any] = [None] * size
    with trace() as t:
        dist.all_gather_object(held, thing)
        dist.gather_object(thing, held if rank == 0 else None, dst=0)
        dist.broadcast_object_list([thing] * 2, src=0)
        dist.scatter_object_list([thing], [thing] * size if rank == 0 else None, src=0)
        if rank == 0:
            dist.send_object_list([thing], dst=1)
        elif rank == 1:
            dist.recv_object_list([thing], src=0)
    assert held == [thing] * size
    return t


def disagree_on_a_reduction() -> Trace:
    """Rank 1 asks for the maximum where the others ask for the sum: gloo takes it in silence."""
    operation = dist.ReduceOp.MAX if dist.get_rank() == 1 else dist.ReduceOp.SUM
    with trace() as t:
        dist.all_reduce(ones(4))
        dist.all_reduce(ones(4), op=operation)
    return t


def disagree_on_what_comes_next() -> Trace:
    """Rank 1 goes on to a broadcast, the others to an all-reduce: nobody waits."""
    with trace() as t:
        dist.all_reduce(ones(4))
        if dist.get_rank() == 1:
            dist.broadcast(ones(4), src=0, async_op=True)
        else:
            dist.all_reduce(ones(4), async_op=True)
    return t


PROGRAMS: dict[str, Callable[[], Trace]] = {
    function.__name__: function
    for function in (
        train_tensor_parallel_with_fsdp,
        train_with_ddp,
        train_in_a_pipeline,
        call_everything,
        exchange_objects,
        disagree_on_a_reduction,
        disagree_on_what_comes_next,
    )
}


UNFINISHED = {"disagree_on_what_comes_next", "die_in_the_third_step"}


def die_in_the_third_step(folder: Path) -> None:
    """Stream the recording; rank 1 is killed while its third all-reduce is under way."""
    model = Block()
    t = trace(model, stream=folder / "stream-{rank}.jsonl")
    with t:
        for step in range(3):
            model(ones(1, WIDTH))
            dist.all_reduce(ones(4 + step), async_op=step == 2)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    t.save(folder / "run-{rank}.json.gz")


def main() -> None:
    """Run as one rank, started by torchrun or with its variables set."""
    folder, *names = sys.argv[1:]
    dist.init_process_group("gloo")
    for name in names:
        if name == "die_in_the_third_step":
            die_in_the_third_step(Path(folder))
        else:
            PROGRAMS[name]().save(Path(folder) / f"{name}-{{rank}}.json.gz")
    if UNFINISHED.intersection(names):
        os._exit(0)  # work that no other rank will finish would hold this one back
    dist.destroy_process_group()
    # torch's gloo now and then aborts a process as it ends, without us too.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
