"""The eager parallel version: runs a step on every rank, each with a copy of the original."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from shardscope._torch.dtensor import quiet_collectives
from shardscope._torch.process_groups.threaded import OWN
from shardscope._torch.snapshot import seed_generators
from shardscope.errors import ParityError
from shardscope.parallel.equivalence import (
    AS_IT_IS,
    Key,
    OriginalNames,
    Region,
    StepResult,
    Task,
    Variant,
    copy_model,
    execute,
    named_parameters,
    shard_batch,
    tie_names,
)
from shardscope.parallel.parity.probe import ProbeSpec
from shardscope.record import TensorKind
from shardscope.world.threaded_ranks import run_ranks_in_threads

Parallelize = Callable[[nn.Module, DeviceMesh], object]
"""The user's function that shards a model on a mesh, in place or by returning another model."""


@final
@dataclass(frozen=True, eq=False)
class EagerVersion:
    """A model that the user's `parallelize` shards on a mesh of these axes, on each rank.

    Along `batch_axes` each rank has a shard of the batch; along other axes it is replicated.
    """

    model: nn.Module
    axes: Mapping[str, int]
    parallelize: Parallelize
    task: Task
    batch_axes: Sequence[str] = ()
    batch_dim: int = 0
    device: str = "cpu"

    def run_as_rank(
        self, mesh: DeviceMesh, variant: Variant = AS_IT_IS, probe_spec: ProbeSpec | None = None
    ) -> StepResult:
        """Run a step as one rank."""
        return run_rank(self, mesh, variant, probe_spec)

    def run(
        self, variant: Variant = AS_IT_IS, probe_spec: ProbeSpec | None = None
    ) -> list[StepResult]:
        """The result of each rank; all ranks run in this process."""
        first: dict[tuple[int, str], torch.Tensor] = {}

        def run(_: int, mesh: DeviceMesh) -> StepResult:
            return share_equal_tensors(run_rank(self, mesh, variant, probe_spec), first)

        return run_ranks_in_threads(self.axes, run, device=self.device)


def run_rank(
    version: EagerVersion, mesh: DeviceMesh, variant: Variant, probe_spec: ProbeSpec | None = None
) -> StepResult:
    """Run a step as one rank: copy the model, shard the copy, call it."""
    model_copy = copy_model(version.model)
    task = _own_task(version, mesh)
    gather = _Gatherer()
    seed_generators(task.seed)
    with variant.applied(model_copy, task) as applied:
        names = OriginalNames(
            model_copy, {} if probe_spec is None else probe_spec.renamed.get(dist.get_rank(), {})
        )
        sharded = version.parallelize(model_copy, mesh)
        model = sharded if isinstance(sharded, nn.Module) else model_copy
        _check_supported(model)
        variant.adapt(model)
        named = {name: tensor for name, tensor in names.parameters(model) if not tensor.is_meta}
        ties = tie_names(named)
        frozen = frozenset(name for name, tensor in named.items() if not tensor.requires_grad)
        parameters = {name: tensor.detach() for name, tensor in named.items()}
        full = gather(TensorKind.PARAMETER, parameters)
        originals = dict(named_parameters(version.model))
        changed = {} if variant.is_marked else dict(_find_changed(full, originals))
        if variant.is_marked:
            return StepResult([], {}, {}, parameters=full, ties=ties)
        if torch.initial_seed() == task.seed:  # unless the program has set a seed for this rank
            seed_generators(task.seed)
        probe = None if probe_spec is None else probe_spec.make_probe()
        step_result = execute(model, applied, names=names, gather=gather, probe=probe)
        tensors = {name for name, _ in (*names.parameters(model), *names.buffers(model))}
    return replace(
        step_result,
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


def _own_task(version: EagerVersion, mesh: DeviceMesh) -> Task:
    num_shards, index = 1, 0
    for axis in version.batch_axes:
        num_shards *= version.axes[axis]
        index = index * version.axes[axis] + mesh.get_local_rank(axis)
    if num_shards == 1:
        return version.task
    inputs = shard_batch(
        version.task.inputs, dim=version.batch_dim, num_shards=num_shards, index=index
    )
    # Gradients are averaged over ranks; the default loss is a sum.
    is_summed = version.task.loss is None and version.task.step is None
    return version.task.with_inputs(inputs, loss_scale=float(num_shards) if is_summed else 1.0)


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
    """Gathers DTensors into full tensors; every rank calls it, perhaps with different names.

    It has its own process group, so that a collective that the program left unfinished is not
    matched with one of these.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(group_desc=f"{OWN}the end of its step")
        self.regions: dict[Key, Region] = {}  # the part of gathered tensors that this rank stores

    def __call__(self, kind: TensorKind, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        dtensors = {name: tensor for name, tensor in named.items() if isinstance(tensor, DTensor)}
        names_by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(names_by_rank, list(dtensors), group=self._group)
        common = set(dtensors).intersection(*names_by_rank)
        full: dict[int, torch.Tensor] = {}  # one entry per tensor object: tied tensors stay tied
        with quiet_collectives(), torch.no_grad():
            for name in names_by_rank[0]:
                if name in common and id(dtensors[name]) not in full:
                    full[id(dtensors[name])] = _make_full(dtensors[name])
            for name in common:
                region = _find_region(dtensors[name], full[id(dtensors[name])])
                if region is not None:
                    self.regions[kind, name] = region
        return {
            name: full[id(tensor)] if id(tensor) in full else _to_local(tensor)
            for name, tensor in named.items()
        }


def _make_full(tensor: DTensor) -> torch.Tensor:
    full = tensor.full_tensor().detach()
    return full.wait() if hasattr(full, "wait") else full


def _find_region(tensor: DTensor, full: torch.Tensor) -> Region | None:
    """The part of a DTensor that this rank stores; None if unknown, as for partial sums.

    Where two mesh axes shard one dim, either may come first, so the values decide.
    """
    coordinate, local = tensor.device_mesh.get_coordinate(), tensor.to_local()
    if coordinate is None:
        return None
    steps = [
        (placement.dim, tensor.device_mesh.size(axis), coordinate[axis])
        for axis, placement in enumerate(tensor.placements)
        if hasattr(placement, "dim")  # Shard and _StridedShard
    ]
    for ordered in (steps, steps[::-1]):
        region = [(0, size) for size in full.shape]
        for dim, num_shards, index in ordered:
            start, stop = region[dim]
            size = -(-(stop - start) // num_shards)
            region[dim] = (min(start + index * size, stop), min(start + (index + 1) * size, stop))
        expected = full[tuple(slice(*bounds) for bounds in region)]
        if expected.shape == local.shape and torch.equal(expected, local):
            return tuple(region)
    return None


def _to_local(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor that not all ranks have; other tensors unchanged."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def share_equal_tensors(
    step_result: StepResult, first: dict[tuple[int, str], torch.Tensor]
) -> StepResult:
    """The result with tensors equal to an earlier rank's replaced by those, to save memory."""
    groups = (
        step_result.gradients,
        step_result.buffers,
        step_result.parameters,
        step_result.snapshots,
    )
    for index, group in enumerate(groups):
        for name, tensor in group.items():
            known = first.setdefault((index, name), tensor)
            if known is not tensor and _is_same(known, tensor):
                group[name] = known
    return step_result


def _is_same(tensor: torch.Tensor, reference: torch.Tensor) -> bool:
    return (
        tensor.dtype == reference.dtype
        and tensor.shape == reference.shape
        and torch.equal(tensor, reference)
    )
