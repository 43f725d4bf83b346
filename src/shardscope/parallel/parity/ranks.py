"""The parallel version: every rank of it, each with a copy of the original of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from shardscope._torch.played_group import OWN
from shardscope._torch.propagation import quiet_collectives
from shardscope.errors import ParityError
from shardscope.parallel.parity.execute import Whole, execute, named_parameters
from shardscope.parallel.parity.looks import Look
from shardscope.parallel.parity.outcome import Outcome
from shardscope.parallel.parity.single import copy_model
from shardscope.parallel.parity.task import Task, seed_all, shard_batch
from shardscope.parallel.parity.variants import AS_IT_IS, Variant
from shardscope.record import TensorKind
from shardscope.world.play import play

__all__ = ["Eager", "Parallelize", "run_rank", "share"]

Parallelize = Callable[[nn.Module, DeviceMesh], Any]
"""Shards a model, in place or by returning another, as TARGETs do."""


@final
@dataclass(frozen=True, eq=False)
class Eager:
    """A model that `parallelize` shards on a mesh of these axes, rank by rank.

    `batch_axes` are those along which the batch is cut; along others each rank has all of it.
    `gather(model, mesh)` gives who puts together what a rank holds in pieces of its own kind;
    without it, DTensors are, and plain pieces as far as their shapes tell.
    """

    model: nn.Module
    axes: Mapping[str, int]
    parallelize: Parallelize
    task: Task
    batch_axes: Sequence[str] = ()
    batch_dim: int = 0
    device: str = "cpu"
    gather: Callable[[nn.Module, DeviceMesh], Whole] | None = None

    @property
    def num_batch_shards(self) -> int:
        return math.prod(self.axes[axis] for axis in self.batch_axes)

    def live(
        self, mesh: DeviceMesh, variant: Variant = AS_IT_IS, look: Look | None = None
    ) -> Outcome:
        """Be one rank."""
        return run_rank(self, mesh, variant, look)

    def run(self, variant: Variant = AS_IT_IS, look: Look | None = None) -> list[Outcome]:
        """What each rank gave; all run in this process."""
        first: dict[Any, torch.Tensor] = {}

        def live(_: int, mesh: DeviceMesh) -> Outcome:
            return share(run_rank(self, mesh, variant, look), first)

        return play(self.axes, live, device=self.device)


def run_rank(eager: Eager, mesh: DeviceMesh, variant: Variant, look: Look | None = None) -> Outcome:
    """Be one rank: copy, shard, run."""
    own = copy_model(eager.model)
    task = _own_task(eager, mesh)
    probe = None if look is None else look.make_probe(scale=float(eager.num_batch_shards))
    gatherer = _Gatherer()
    seed_all(task.seed)
    with variant.applied(own, task) as applied:
        sharded = eager.parallelize(own, mesh)
        model = sharded if isinstance(sharded, nn.Module) else own
        _check_supported(model)
        variant.adapt(model)
        whole = gatherer if eager.gather is None else eager.gather(model, mesh)
        parameters = _find_changed(whole, model, dict(named_parameters(eager.model)))
        if torch.initial_seed() == task.seed:  # unless the program gave this rank one of its own
            seed_all(task.seed)
        outcome = execute(model, applied, whole=whole, probe=probe)
    outcome.parameters.update(parameters)
    names = {name for name, _ in named_parameters(model)}
    absent = {name for name, _ in named_parameters(eager.model)} - names
    return replace(outcome, absent=frozenset(absent))


def _check_supported(model: nn.Module) -> None:
    if any(isinstance(one, FullyShardedDataParallel) for one in model.modules()):
        raise ParityError(
            "the parallel model is wrapped in FullyShardedDataParallel (FSDP1), which keeps "
            "gradients in flat shards that cannot be attributed. Shard it with fully_shard "
            "(FSDP2)."
        )


def _own_task(eager: Eager, mesh: DeviceMesh) -> Task:
    num_shards, index = eager.num_batch_shards, 0
    for axis in eager.batch_axes:
        index = index * eager.axes[axis] + mesh.get_local_rank(axis)
    if num_shards == 1:
        return eager.task
    inputs = shard_batch(eager.task.inputs, dim=eager.batch_dim, num_shards=num_shards, index=index)
    # Gradients are averaged over ranks; the default loss is a sum.
    is_summed = eager.task.loss is None and eager.task.step is None
    return eager.task.with_inputs(inputs, loss_scale=float(num_shards) if is_summed else 1.0)


def _find_changed(
    whole: Whole, model: nn.Module, originals: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The parameters that sharding did not leave as they were, put together."""
    held = {name: one.detach() for name, one in named_parameters(model) if not one.is_meta}
    return {
        name: one.clone()
        for name, one in whole(TensorKind.PARAMETER, held).items()
        if name in originals and not _is_same(one, originals[name].detach().to(one.dtype))
    }


@final
class _Gatherer:
    """Makes whole tensors of DTensors. Every rank must call it, if with other names than the rest.

    It has a group of its own: what a program leaves undone on its groups is not taken for ours.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(group_desc=f"{OWN}the end of its step")

    def __call__(self, _: TensorKind, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = [name for name, one in named.items() if isinstance(one, DTensor)]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own, group=self._group)
        common = set(own).intersection(*everyone)
        wholes: dict[int, torch.Tensor] = {}  # tied tensors stay one
        with quiet_collectives(), torch.no_grad():
            for name in everyone[0]:
                if name in common and id(named[name]) not in wholes:
                    wholes[id(named[name])] = _make_whole(named[name])
        return {
            name: wholes[id(one)] if id(one) in wholes else _strip(one)
            for name, one in named.items()
        }


def _make_whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.detach().full_tensor()
    return whole.wait() if hasattr(whole, "wait") else whole


def _strip(tensor: Any) -> torch.Tensor:
    """What this rank has of a DTensor that not all ranks have."""
    local: torch.Tensor = tensor
    if isinstance(tensor, DTensor):
        local = tensor.to_local().detach()
    return local


def share(outcome: Outcome, first: dict[Any, torch.Tensor]) -> Outcome:
    """The same, without a copy of what an earlier rank has too."""
    groups = (outcome.gradients, outcome.buffers, outcome.parameters, outcome.seen)
    for index, group in enumerate(groups):
        for name, tensor in group.items():
            known = first.setdefault((index, name), tensor)
            if known is not tensor and _is_same(known, tensor):
                group[name] = known
    return outcome


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
