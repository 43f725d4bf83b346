"""Measures with gloo, in float64, which calls a program reaches, and what mutations change.

Nothing of shardscope is used. A mutation is effective if it changes a number that the steps return
or a parameter, on any rank, and no rank raises.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.silent import mutations
from benchmarks.silent.correct import PROGRAMS, Program, Script
from benchmarks.silent.correct_steps import plain_name
from benchmarks.silent.proof import gather, make_batches, make_model, shard
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

LEAST = 1e-6  # of the error, relative to the largest element of a tensor
_TIMEOUT = timedelta(seconds=20)
_LIMIT_S = 45  # of a job
Named = dict[str, Tensor]


@final
@dataclass(frozen=True)
class Mutation:
    """A mutation of a program: the number of the site, and the kind."""

    program: str
    site: int
    kind: str


@final
@dataclass(frozen=True)
class Outcome:
    """What a mutation does, and where: the modules, lines and parameters that reach the call."""

    error: float = 0.0
    failure: str = ""
    modules: tuple[str, ...] = ()
    lines: tuple[tuple[str, int], ...] = ()
    parameters: tuple[str, ...] = ()
    sites: Mapping[int, Any] = field(default_factory=dict)  # that a program reaches unmutated

    @property
    def is_effective(self) -> bool:
        """Whether numbers change, silently."""
        return not self.failure and self.error > LEAST


def measure(jobs: Sequence[Mutation]) -> Iterator[dict[Mutation, Outcome]]:
    """The outcomes of the mutations, some at a time; a site of -1 is the program as it is."""
    by_size: dict[int, list[Mutation]] = {}
    for job in jobs:
        by_size.setdefault(math.prod(PROGRAMS[job.program].layout.mesh.values()), []).append(job)
    for size, group in by_size.items():
        remaining = group
        while remaining:
            known = _run_processes(size, remaining)
            if not known:
                known = {remaining[0]: Outcome(failure="the processes ended")}
            yield known
            remaining = [job for job in remaining if job not in known]


def _run_processes(size: int, jobs: Sequence[Mutation]) -> dict[Mutation, Outcome]:
    """Run mutations on `size` processes, until one of them fails."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _run_rank, (size, folder, list(jobs)), nprocs=size, join=False, start_method="fork"
        )
        with suppress(mp.ProcessExitedException, mp.ProcessRaisedException):
            while not context.join(grace_period=5):
                pass
        path = os.path.join(folder, "outcomes")
        return torch.load(path, weights_only=False) if os.path.exists(path) else {}


def _run_rank(rank: int, size: int, folder: str, jobs: Sequence[Mutation]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    outcomes: dict[Mutation, Outcome] = {}
    singles: dict[str, Named] = {}
    for job in jobs:
        failure = ""
        signal.alarm(_LIMIT_S)  # a mismatch may let ranks wait for each other forever
        try:
            outcome = _measure(job, singles)
        except Exception as error:  # noqa: BLE001 - a failure is a result
            failure = f"{type(error).__name__}: {error!s:.200}"
            outcome = Outcome(failure=failure)
        try:
            all_outcomes: list[Any] = [None] * size
            dist.all_gather_object(all_outcomes, outcome)
            is_clean = len({bool(each.failure) for each in all_outcomes}) == 1
            outcome = _merge(all_outcomes)
        except RuntimeError as error:
            outcome, is_clean = Outcome(failure=failure or f"{error!s:.200}"), False
        outcomes[job] = outcome
        if rank == 0:
            torch.save(outcomes, os.path.join(folder, "outcomes"))
        if not is_clean:
            break  # messages may be left between the ranks
    os._exit(0)


def _merge(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of all ranks together."""
    failure = next((outcome.failure for outcome in outcomes if outcome.failure), "")
    error = max(outcome.error for outcome in outcomes)
    modules, lines, parameters = (
        tuple(sorted({item for outcome in outcomes for item in getattr(outcome, name)}))
        for name in ("modules", "lines", "parameters")
    )
    sites: dict[int, Any] = {}
    for outcome in outcomes:
        sites |= outcome.sites
    return Outcome(error, failure, modules, lines, parameters, sites)


def _measure(job: Mutation, singles: dict[str, Named]) -> Outcome:
    program, sites = PROGRAMS[job.program], mutations.list_sites()
    if job.program not in singles:
        singles[job.program] = _run_single(program)
    axes = program.layout.mesh
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    mutations.marks.clear()
    kinds = dict.fromkeys(sites, "mark") if job.site < 0 else {sites[job.site]: job.kind}
    with mutations.mutated(kinds):
        local = _run_rank_of(program, mesh)
    expected = singles[job.program]
    error = max((_error(value, expected[name]) for name, value in local.items()), default=0.0)
    if job.site < 0:
        return Outcome(error, sites=dict.fromkeys(mutations.marks))
    mark = mutations.marks.get(job.site, {})
    return Outcome(
        error,
        modules=tuple(mark.get("modules", ())),
        lines=tuple(mark.get("lines", ())),
        parameters=tuple(mark.get("parameters", ())),
    )


def _error(value: Tensor, expected: Tensor) -> float:
    if value.shape != expected.shape:
        return math.inf
    error = float((value - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf


def _run_single(program: Program | Script) -> Named:
    """The numbers and parameters of a single device."""
    model = make_model(program)
    trainer = program.make_trainer(model)
    numbers: Named = {}
    for index, batch in enumerate(make_batches(program)):
        numbers |= _name_numbers(program.train_step(model, batch, trainer), index)
    return numbers | {name: p.detach() for name, p in model.named_parameters()}


def _run_rank_of(program: Program | Script, mesh: DeviceMesh) -> Named:
    """The numbers and parameters of this rank; those of shards are gathered."""
    layout = program.layout
    if hasattr(layout, "dtype"):
        layout.dtype = None  # the policy would round to half precision
    model = make_model(program)
    mutations.watch(model, mesh)
    model = layout.parallelize(model, mesh)
    mutations.watch(model, mesh)
    trainer = program.make_trainer(model)
    numbers: Named = {}
    step = program.rank_step
    for index, batch in enumerate(make_batches(program)):
        returned = step(model, shard(batch, program, mesh), trainer, mesh=mesh)
        numbers |= _name_numbers(returned, index)
    full: Named = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        for axis, dim in layout.sharded_axes(plain_name(name)).items():
            value = gather(value, mesh, axis, dim)
        full[plain_name(name)] = value
    return numbers | full


def _name_numbers(returned: Any, index: int) -> Named:
    """The numbers that a step returns, named by step and place."""
    leaves = [leaf for leaf in tree_flatten(returned)[0] if leaf is not None]
    tensors = [
        leaf.detach().full_tensor() if isinstance(leaf, DTensor) else torch.as_tensor(leaf).detach()
        for leaf in leaves
    ]
    return {f"{index}.{place}": tensor.double() for place, tensor in enumerate(tensors)}
