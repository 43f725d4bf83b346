"""Traces a training step with private names of torch missing, one at a time and all together.

A test runs it as a program. Each case is a fork of a process that has imported torch and not
shardscope, in which the lookup of one name fails, or of all. The results are printed as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.testing._internal.distributed.fake_pg
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import shardscope.record  # imports no torch

__all__ = ["run_all"]

# Modules whose functions are called while a step is traced.
TRACING_SHIMS = {
    "autograd",
    "checkpoint",
    "ddp",
    "dispatch",
    "events",
    "frames",
    "fsdp",
    "functional",
    "hooks",
    "mesh",
    "module_calls",
    "modules",
    "schema",
    "skip_dynamo",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._run, x, use_reentrant=False)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def make_step() -> tuple[nn.Module, Callable[[], float]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Net()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with torch.no_grad():
        for parameter in model.parameters():  # a fake group scatters uninitialized data
            nn.init.constant_(parameter.to_local(), 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        dist.all_reduce(torch.ones(2))
        optimizer.step()
        return float(loss.detach())

    return model, step


def find_public_names() -> list[str]:
    """The names of the public API that cannot be imported, with errors."""
    failed = []
    for name in shardscope.__all__:
        try:
            getattr(shardscope, name)
        except Exception as error:  # noqa: BLE001 - errors are the result
            failed.append(f"{name}: {error!r}")
    return failed


def trace_step(expected: float) -> dict[str, Any]:
    trace = shardscope.trace
    model, step = make_step()
    with trace(model) as t:
        loss = step()
    recording = t.recording
    return {
        "is_same_step": loss == expected,
        "collectives": [
            [str(c.kind), str(c.phase), c.owner, c.output_bytes] for c in recording.collectives
        ],
        "gaps": [gap.fact for gap in recording.gaps],
    }


def hide(names: Iterable[str]) -> None:
    """Make lookups of these names fail, as in a torch without them."""
    private = import_module("shardscope._torch.private")
    resolve, hidden = private._resolve, set(names)

    def resolve_unless_hidden(name: str) -> Any:
        if name in hidden:
            raise AttributeError(name)
        return resolve(name)

    private._resolve = resolve_unless_hidden


def in_fork(run: Callable[[], Any]) -> Any:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answer = run()
        except BaseException as error:  # noqa: BLE001 - errors are the result
            answer = {"error": repr(error)}
        with os.fdopen(writing, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        answer = json.load(file)
    os.waitpid(pid, 0)
    return answer


def without(names: Iterable[str], run: Callable[[], Any]) -> Callable[[], Any]:
    def hide_and_run() -> Any:
        hide(names)
        return run()

    return hide_and_run


def find_names() -> dict[str, list[str]]:
    for name in shardscope.__all__:
        getattr(shardscope, name)
    needs = import_module("shardscope._torch.private").all_needs()
    names: dict[str, list[str]] = {}
    for shim, name in needs:
        names.setdefault(name, []).append(shim)
    return names


def run_all() -> dict[str, Any]:
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    with torch.no_grad():
        float(make_step()[0](torch.ones(2, 4)).sum())  # DTensor's caches, which all forks then have
    gc.freeze()
    names = in_fork(find_names)
    expected = in_fork(lambda: make_step()[1]())  # autograd allows no fork after a backward
    on_the_way = sorted(name for name, shims in names.items() if TRACING_SHIMS & set(shims))

    def trace_it() -> Any:
        return trace_step(expected)

    return {
        "names": sorted(names),
        "imports": in_fork(without(names, find_public_names)),
        "all": in_fork(without(names, trace_it)),
        "none": in_fork(trace_it),
        "each": {name: in_fork(without([name], trace_it)) for name in on_the_way},
    }


if __name__ == "__main__":
    json.dump(run_all(), sys.stdout)
