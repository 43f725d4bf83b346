"""The parallel version: every rank of it, each with a copy of the original of its own."""

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
from shardscope.parallel.parity.outcome import Outcome
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

    Along `batch_axes` each rank has a shard of the batch, along other axes the whole batch.
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
        """Be one rank."""
        return run_rank(self, mesh, variant, look)

    def run(self, variant: Variant = AS_IT_IS, look: Look | None = None) -> list[Outcome]:
        """What each rank gave; all run in this process."""
        first: dict[Any, torch.Tensor] = {}

        def live(_: int, mesh: DeviceMesh) -> Outcome:
            return share(run_rank(self, mesh, variant, look), first)

        return play(self.axes, live, device=self.device)


def run_rank(eager: Eager, mesh: DeviceMesh, variant: Variant, look: Look | None = None) -> Outcome:
    """Be one rank: copy the model, shard the copy, run a step of it."""
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
        parameters = {n: p.detach() for n, p in names.parameters(model) if not p.is_meta}
        full = gather(TensorKind.PARAMETER, parameters)
        if variant.is_marked:
            return Outcome([], {}, {}, parameters=full)
        if torch.initial_seed() == task.seed:  # unless the program gave this rank one of its own
            seed_generators(task.seed)
        probe = None if look is None else look.make_probe()
        outcome = execute(model, applied, names=names, gather=gather, probe=probe)
        tensors = {name for name, _ in (*names.parameters(model), *names.buffers(model))}
    originals = dict(named_parameters(eager.model))
    return replace(
        outcome,
        parameters=dict(_find_changed(full, originals)),
        absent=frozenset(originals.keys() - parameters.keys()),
        added=frozenset(tensors - names.known),
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
    """The parameters that are not as they were, and those that the original does not have."""
    for name, tensor in parameters.items():
        original = originals.get(name)
        if original is None or not _is_same(tensor, original.detach().to(tensor.dtype)):
            yield name, tensor.clone()


@final
class _Gatherer:
    """Makes full tensors of DTensors. Every rank must call it, if with other names than the rest.

    It has a group of its own: a collective that the program did not finish does not meet ours.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(group_desc=f"{OWN}the end of its step")

    def __call__(self, _: TensorKind, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = [name for name, one in named.items() if isinstance(one, DTensor)]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own, group=self._group)
        common = set(own).intersection(*everyone)
        full: dict[int, torch.Tensor] = {}  # tied tensors stay one
        with quiet_collectives(), torch.no_grad():
            for name in everyone[0]:
                if name in common and id(named[name]) not in full:
                    full[id(named[name])] = _make_full(named[name])
        return {
            name: full[id(one)] if id(one) in full else _strip(one) for name, one in named.items()
        }


def _make_full(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.detach().full_tensor()
    return full.wait() if hasattr(full, "wait") else full


def _strip(tensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor that not all ranks have."""
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
