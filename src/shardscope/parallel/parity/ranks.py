"""The parallel version: a step on every rank, each with its own copy of the original."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from shardscope._torch.random_state import seed_generators
from shardscope.errors import ParityError
from shardscope.parallel.parity.execute import execute, named_parameters
from shardscope.parallel.parity.looks import Look
from shardscope.parallel.parity.names import OriginalNames
from shardscope.parallel.parity.outcome import Key, Outcome, Region, tie_names
from shardscope.parallel.parity.single import copy_model
from shardscope.parallel.parity.task import Task, shard_batch
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

    Along `batch_axes` each rank has a shard of the batch; along other axes it is replicated.
    """

    model: nn.Module
    axes: Mapping[str, int]
    parallelize: Parallelize
    task: Task
    batch_axes: Sequence[str] = ()
    batch_dim: int = 0
    device: str = "cpu"

    def live(
        self, mesh: DeviceMesh, variant: Variant = AS_IT_IS, look: Look | None = None
    ) -> Outcome:
        """Run a step as one rank."""
        return run_rank(self, mesh, variant, look)

    def run(self, variant: Variant = AS_IT_IS, look: Look | None = None) -> list[Outcome]:
        """The outcome of each rank; all run in this process."""
        first: dict[Any, torch.Tensor] = {}

        def live(_: int, mesh: DeviceMesh) -> Outcome:
            return share(run_rank(self, mesh, variant, look), first)

        return play(self.axes, live, device=self.device)


def run_rank(eager: Eager, mesh: DeviceMesh, variant: Variant, look: Look | None = None) -> Outcome:
    """Run a step as one rank: copy the model, shard the copy, call it."""
    own = copy_model(eager.model)
    task = _own_task(eager, mesh)
    gather = _Gatherer()
    seed_generators(task.seed)
    with variant.applied(own, task) as applied:
        names = OriginalNames(own, {} if look is None else look.renamed.get(dist.get_rank(), {}))
        sharded = eager.parallelize(own, mesh)
        model = sharded if isinstance(sharded, nn.Module) else own
        _check_supported(model)
        variant.adapt(model)
        named = {name: tensor for name, tensor in names.parameters(model) if not tensor.is_meta}
        ties = tie_names(named)
        frozen = frozenset(name for name, tensor in named.items() if not tensor.requires_grad)
        parameters = {name: tensor.detach() for name, tensor in named.items()}
        full = gather(TensorKind.PARAMETER, parameters)
        originals = dict(named_parameters(eager.model))
        changed = {} if variant.is_marked else dict(_find_changed(full, originals))
        if variant.is_marked:
            return Outcome([], {}, {}, parameters=full, ties=ties)
        if torch.initial_seed() == task.seed:  # unless the program gave this rank one of its own
            seed_generators(task.seed)
        probe = None if look is None else look.make_probe()
        outcome = execute(model, applied, names=names, gather=gather, probe=probe)
        tensors = {name for name, _ in (*names.parameters(model), *names.buffers(model))}
    return replace(
        outcome,
        parameters=changed,
        absent=frozenset(originals.keys() - parameters.keys()),
        added=frozenset(tensors - names.known),
        ties=ties,
        frozen=frozen,
        regions=gather.regions,
    )


def _check_supported(model: nn.Module) -> None:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ParityError(
            "the parallel model is wrapped in FullyShardedDataParallel (FSDP1), whose gradients "
            "are flat shards that parity cannot assign to parameters. Use fully_shard (FSDP2)."
        )


def _own_task(eager: Eager, mesh: DeviceMesh) -> Task:
    num_shards, index = 1, 0
    for axis in eager.batch_axes:
        num_shards *= eager.axes[axis]
        index = index * eager.axes[axis] + mesh.get_local_rank(axis)
    if num_shards == 1:
        return eager.task
    inputs = shard_batch(eager.task.inputs, dim=eager.batch_dim, num_shards=num_shards, index=index)
    # Gradients are averaged over ranks; the default loss is a sum.
    is_summed = eager.task.loss is None and eager.task.step is None
    return eager.task.with_inputs(inputs, loss_scale=float(num_shards) if is_summed else 1.0)


def _find_changed(
    parameters: Mapping[str, torch.Tensor], originals: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that sharding changed, and those that the original does not have."""
    for name, tensor in parameters.items():
        original = originals.get(name)
        if original is None or not _is_same(tensor, original.detach().to(tensor.dtype)):
            yield name, tensor.clone()


@final
class _Gatherer:
    """Gathers DTensors into full tensors; every rank calls it, though perhaps with other names.

    It has its own process group, so that a collective which the program did not finish is not
    matched with one of these.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(group_desc=f"{OWN}the end of its step")
        self.regions: dict[Key, Region] = {}  # what this rank holds of the gathered tensors

    def __call__(self, kind: TensorKind, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = [name for name, tensor in named.items() if isinstance(tensor, DTensor)]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own, group=self._group)
        common = set(own).intersection(*everyone)
        full: dict[int, torch.Tensor] = {}  # tied tensors stay one
        with quiet_collectives(), torch.no_grad():
            for name in everyone[0]:
                if name in common and id(named[name]) not in full:
                    full[id(named[name])] = _make_full(named[name])
            for name in common:
                region = _find_region(named[name], full[id(named[name])])
                if region is not None:
                    self.regions[kind, name] = region
        return {
            name: full[id(tensor)] if id(tensor) in full else _strip(tensor)
            for name, tensor in named.items()
        }


def _make_full(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.detach().full_tensor()
    return full.wait() if hasattr(full, "wait") else full


def _find_region(tensor: Any, full: torch.Tensor) -> Region | None:
    """What this rank holds of a DTensor; None where it is not known, as of partial sums.

    Where two mesh axes shard one dim, either may come first, so the values decide.
    """
    coordinate, local = tensor.device_mesh.get_coordinate(), tensor.to_local()
    if coordinate is None:
        return None
    steps = [
        (placement.dim, tensor.device_mesh.size(axis), coordinate[axis])
        for axis, placement in enumerate(tensor.placements)
        if hasattr(placement, "dim")  # both kinds of shards
    ]
    for ordered in (steps, steps[::-1]):
        region = [(0, size) for size in full.shape]
        for dim, num_shards, index in ordered:
            start, stop = region[dim]
            size = -(-(stop - start) // num_shards)
            region[dim] = (min(start + index * size, stop), min(start + (index + 1) * size, stop))
        own = full[tuple(slice(*bounds) for bounds in region)]
        if own.shape == local.shape and torch.equal(own, local):
            return tuple(region)
    return None


def _strip(tensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor that not all ranks have."""
    local: torch.Tensor = tensor
    if isinstance(tensor, DTensor):
        local = tensor.to_local().detach()
    return local


def share(outcome: Outcome, first: dict[Any, torch.Tensor]) -> Outcome:
    """The outcome with equal tensors of earlier ranks in place of its own, to save memory."""
    groups = (outcome.gradients, outcome.buffers, outcome.parameters, outcome.seen)
    for index, group in enumerate(groups):
        for name, tensor in group.items():
            known = first.setdefault((index, name), tensor)
            if known is not tensor and _is_same(known, tensor):
                group[name] = known
    return outcome


def _is_same(own: torch.Tensor, other: torch.Tensor) -> bool:
    return own.dtype == other.dtype and own.shape == other.shape and torch.equal(own, other)
