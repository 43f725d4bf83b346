"""The parallel versions that `parity` runs. Every rank of a version returns a `StepResult`.

`EagerVersion` calls the user's function, which shards a copy of the model on each rank.
`PartitionedVersion` partitions the model by a plan, as `parallelize` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.export import ExportedProgram

from shardscope._torch.dtensor import quiet_collectives
from shardscope._torch.process_groups.threaded import OWN
from shardscope._torch.random_state import preserved_random_state, seed_generators, seed_torch
from shardscope._torch.training_hooks import unwatched
from shardscope._torch.tree import pytree_flatten, pytree_unflatten
from shardscope.errors import ParityError
from shardscope.parallel.equivalence import (
    AS_IT_IS,
    Declared,
    Key,
    OriginalNames,
    Region,
    StepResult,
    Task,
    Variant,
    call_model,
    copy_model,
    default_loss,
    execute,
    named_buffers,
    named_parameters,
    named_tensors,
    read_declared,
    shard_batch,
    tie_names,
)
from shardscope.parallel.parity.causes import explain
from shardscope.parallel.parity.probe import ProbeSpec, copy_local
from shardscope.parallel.parity.problem import Problem
from shardscope.parallel.parity.result import ParityResult
from shardscope.parallel.partition import partition_by_plan
from shardscope.parallel.passes.capture import export_with_loss
from shardscope.parallel.program import ParallelProgram
from shardscope.parallel.verify import Trial, join_results, run_ranks, shard_values
from shardscope.record import TOLERABLE, Phase, TensorKind
from shardscope.world.threaded_ranks import run_ranks_in_threads

Parallelize = Callable[[nn.Module, DeviceMesh], object]
"""The user's function that shards a model on a mesh, in place or by returning another model.

It may return its optimizer, too: a model and an optimizer.
"""


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
    ) -> list[StepResult]:
        """Run as one rank: copy the model, shard the copy, call it. The result of each step."""
        model_copy = copy_model(self.model)
        task = self._shard_task(mesh)
        is_local = probe_spec is not None and probe_spec.is_local
        gather: Gatherer | _LocalReader = _LocalReader() if is_local else Gatherer()
        seed_generators(task.seed)
        with variant.applied(model_copy, task) as applied:
            names = OriginalNames(
                model_copy,
                {} if probe_spec is None else probe_spec.renamed.get(dist.get_rank(), {}),
            )
            model, optimizer = self._parallelize(model_copy, mesh)
            _check_supported(model)
            variant.adapt(model)
            named = {name: tensor for name, tensor in names.parameters(model) if not tensor.is_meta}
            ties = tie_names(named)
            frozen = frozenset(name for name, tensor in named.items() if not tensor.requires_grad)
            parameters = {
                (TensorKind.PARAMETER, name): tensor if is_local else tensor.detach()
                for name, tensor in named.items()
            }
            full = {name: tensor for (_, name), tensor in gather(parameters).items()}
            if variant.is_marked:
                return [StepResult([], {}, {}, parameters=full, ties=ties)]
            originals = dict(named_parameters(self.model))
            changed = full if is_local else dict(_find_changed(full, originals))
            if torch.initial_seed() == task.seed:  # unless the program has set a seed for this rank
                seed_generators(task.seed)
            probed = None if probe_spec is None else probe_spec.make_probe()
            steps = execute(
                model,
                applied,
                names=names,
                gather=gather,
                probed=probed,
                optimizer=optimizer,
                mesh=mesh,
                has_observer=variant.is_observed and probed is None,
            )
            tensors = {name for name, _ in (*names.parameters(model), *names.buffers(model))}
        return [
            replace(
                result,
                parameters=changed if index == 0 else {},
                absent=frozenset(originals.keys() - named.keys()),
                added=frozenset(tensors - names.known),
                ties=ties,
                frozen=frozen,
                regions=gather.regions[index + 1] | (gather.regions[0] if index == 0 else {}),
                declared=result.declared | gather.declared[0] | gather.declared[index + 1],
            )
            for index, result in enumerate(steps)
        ]

    def _parallelize(self, model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, object]:
        """The sharded model, and its optimizer if the user's function has made that, too."""
        sharded = self.parallelize(model, mesh)
        if isinstance(sharded, tuple) and len(sharded) == 2 and isinstance(sharded[0], nn.Module):
            return sharded
        return (sharded if isinstance(sharded, nn.Module) else model), None

    def run(
        self, variant: Variant = AS_IT_IS, probe_spec: ProbeSpec | None = None
    ) -> list[list[StepResult]]:
        """The results of each rank, a list over steps; all ranks run in this process."""
        first: dict[tuple[int, int, str], torch.Tensor] = {}

        def run(_: int, mesh: DeviceMesh) -> list[StepResult]:
            return share_equal_tensors(self.run_as_rank(mesh, variant, probe_spec), first)

        return run_ranks_in_threads(self.axes, run, device=self.device)

    def _shard_task(self, mesh: DeviceMesh) -> Task:
        """The task with this rank's shard of the batch."""
        num_shards, index = 1, 0
        for axis in self.batch_axes:
            num_shards *= self.axes[axis]
            index = index * self.axes[axis] + mesh.get_local_rank(axis)
        if num_shards == 1:
            return self.task

        def shard(batch: object) -> object:
            return shard_batch(batch, dim=self.batch_dim, num_shards=num_shards, index=index)

        if self.task.training is not None:
            return self.task.with_inputs([shard(batch) for batch in self.task.inputs])
        # Gradients are averaged over ranks; the default loss is a sum.
        is_summed = self.task.loss is None and self.task.step is None
        scale = float(num_shards) if is_summed else 1.0
        return self.task.with_inputs(shard(self.task.inputs), loss_scale=scale)


def _check_supported(model: nn.Module) -> None:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ParityError(
            "the parallel model is wrapped in FullyShardedDataParallel (FSDP1), whose gradients "
            "are flat shards that parity cannot assign to parameters. Use fully_shard (FSDP2)."
        )


def _find_changed(
    parameters: Mapping[str, torch.Tensor], originals: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that sharding changed, and those that the original does not have."""
    for name, tensor in parameters.items():
        original = originals.get(name)
        if original is None or not _is_same(tensor, original.detach().to(tensor.dtype)):
            yield name, tensor.clone()


@final
class Gatherer:
    """Gathers DTensors into full tensors; every rank calls it, perhaps with different names.

    It has its own process group, so that a collective that the program left unfinished is not
    matched with one of these.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(group_desc=f"{OWN}the end of its step")
        # Of each call: the part of gathered tensors that this rank stores.
        self.regions: list[dict[Key, Region]] = []
        # Nothing: what full tensors declare says nothing about them.
        self.declared: defaultdict[int, dict[str | Key, Declared]] = defaultdict(dict)

    def __call__(self, named: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        dtensors = {name: tensor for name, tensor in named.items() if isinstance(tensor, DTensor)}
        # Each name with the first name of the same tensor: tied tensors stay tied. An entry that
        # clipping left as it was on some ranks only is tied to no other.
        ties_by_rank: list[dict[Key, Key]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ties_by_rank, _tie_keys(dtensors), group=self._group)
        common = set(dtensors).intersection(*ties_by_rank)
        full: dict[Key, torch.Tensor] = {}
        regions: dict[Key, Region] = {}
        with quiet_collectives(), unwatched(), torch.no_grad():
            for name in ties_by_rank[0]:
                if name not in common:
                    continue
                firsts = {ties[name] for ties in ties_by_rank}
                first = firsts.pop() if len(firsts) == 1 else name
                full[name] = full[first] if first in full else _make_full(dtensors[name])
                region = _find_region(dtensors[name], full[name])
                if region is not None:
                    regions[name] = region
        self.regions.append(regions)
        known = {id(dtensors[name]): tensor for name, tensor in full.items()}
        return {
            name: full[name] if name in full else known.get(id(tensor), _to_local(tensor))
            for name, tensor in named.items()
        }


def _tie_keys(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, Key]:
    """For each key the first key with the same tensor."""
    first: dict[int, Key] = {}
    return {key: first.setdefault(id(tensor), key) for key, tensor in tensors.items()}


@final
class _LocalReader:
    """Reads what this rank has of each tensor, in place of a `Gatherer`."""

    def __init__(self) -> None:
        self.regions: defaultdict[int, dict[Key, Region]] = defaultdict(dict)
        # Of each call: the types that placements and annotations give.
        self.declared: list[dict[str | Key, Declared]] = []

    def __call__(self, named: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        self.declared.append({name: read_declared(tensor) for name, tensor in named.items()})
        local: dict[int, torch.Tensor] = {}  # one entry per tensor object: tied tensors stay tied
        for tensor in named.values():
            local.setdefault(id(tensor), copy_local(tensor))
        return {name: local[id(tensor)] for name, tensor in named.items()}


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
    steps: list[StepResult], first: dict[tuple[int, int, str], torch.Tensor]
) -> list[StepResult]:
    """The results with tensors equal to an earlier rank's replaced by those, to save memory."""
    for step, result in enumerate(steps):
        groups = (
            result.gradients,
            result.raw_gradients,
            result.reduced_gradients,
            result.buffers,
            result.parameters,
            result.snapshots,
            *result.training.tables.values(),
        )
        for index, group in enumerate(groups):
            for name, tensor in group.items():
                known = first.setdefault((step, index, name), tensor)
                if known is not tensor and _is_same(known, tensor):
                    group[name] = known
    return steps


def _is_same(tensor: torch.Tensor, reference: torch.Tensor) -> bool:
    return (
        tensor.dtype == reference.dtype
        and tensor.shape == reference.shape
        and torch.equal(tensor, reference)
    )


T = TypeVar("T")


@final
@dataclass(frozen=True, eq=False)
class PartitionedVersion:
    """A model that `parallelize` partitions by a plan, for a mesh of these axes."""

    model: nn.Module
    axes: Mapping[str, int]
    plan: object  # in any form that `parallelize` takes
    task: Task
    user_model: nn.Module | ExportedProgram  # as the user passed it

    @cached_property
    def program(self) -> ParallelProgram:
        """The partitioned model with its loss; it returns the loss, then the model's outputs."""
        return self._partition(self.axes)

    def _partition(self, mesh: DeviceMesh | Mapping[str, int]) -> ParallelProgram:
        """Partition the model with its loss, or an exported program, which has only a forward."""
        if isinstance(self.user_model, ExportedProgram):
            return partition_by_plan(self.user_model, mesh, self.plan)
        args, kwargs = _arguments(self.task.inputs)
        is_training = self._has_loss()
        loss_fn: Callable[..., Any] = self._loss_and_output if is_training else _no_loss
        program = export_with_loss(self.user_model, loss_fn, args, kwargs, ())
        return partition_by_plan(program, mesh, self.plan, is_training=is_training)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Empty: the plan determines how inputs are sharded, and results are full tensors."""
        return ()

    @property
    def batch_dim(self) -> int:
        """Unused without batch axes."""
        return 0

    def run(
        self, variant: Variant = AS_IT_IS, probe_spec: ProbeSpec | None = None
    ) -> list[list[StepResult]]:
        """The result of each rank; `probe_spec` is unused, as `find_problem` compares every op."""
        model_copy = copy_model(self.model)
        with variant.applied(model_copy, self.task) as applied:
            values = self._values(model_copy, applied.inputs, variant)
            with torch.no_grad():
                ranks = run_ranks(self._trial, values, seed=self.task.seed)
        return [[result] for result in ranks]

    def run_as_rank(
        self, mesh: DeviceMesh, variant: Variant = AS_IT_IS, probe_spec: ProbeSpec | None = None
    ) -> list[StepResult]:
        """Run a step as one rank of a real process group."""
        program, model_copy, rank = self._partition(mesh), copy_model(self.model), dist.get_rank()
        graph = program.joint().graph_module if program.is_training else program.forward()
        with variant.applied(model_copy, self.task) as applied, torch.no_grad():
            values = self._values(model_copy, applied.inputs, variant)
            local_values = shard_values(program.graph, program.mesh, values)[rank]
            seed_torch(self.task.seed)
            results = graph(*local_values)
        results_by_rank: list[list[object]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(results_by_rank, list(results))
        trial = program.make_trial(self._output_names(), is_run=False)
        joined = join_results(dict(enumerate(results_by_rank)), trial.result_specs, trial.mesh)
        return [trial.outcome(joined[rank])]

    def find_problem(self, parity_result: ParityResult) -> list[Problem]:
        """The problem with the first op that the ranks compute wrongly; empty if all agree."""
        wrong = [
            result
            for result in parity_result.comparisons
            if result.verdict.agreement not in TOLERABLE
        ]
        if not wrong:
            return []
        divergence = self.program.find_first_divergence(self._values(self.model, self.task.inputs))
        cause = explain(wrong[0], self.axes)
        name = wrong[0].case.name or "the output"
        kind = "The gradient of " if wrong[0].case.kind is TensorKind.GRADIENT else ""
        fact = f"{kind}{name} of the partitioned program differs. {cause.to_sentence()}".strip()
        remedy = "Leave this module out of the plan, and please report the bug."
        if divergence is None:
            remedy = "Please report the bug; until it is fixed, shard fewer modules."
            return [Problem(cause, name, fact, remedy, phase=Phase.BACKWARD)]
        location = f"The first op to differ is {divergence.op}."
        return [
            Problem(
                cause,
                divergence.module or "the model itself",
                f"{fact} {location}",
                remedy,
                module=divergence.module,
                op=divergence.op,
            )
        ]

    def _has_loss(self) -> bool:
        """Whether there are parameters to differentiate, and an output that a loss can be of."""
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            return False
        if self.task.loss is not None:
            return True
        with preserved_random_state():
            output = call_model(copy_model(self.model), self.task.copy_inputs())
        return any(tensor.requires_grad for _, tensor in named_tensors(output))

    def _loss_and_output(self, output: T) -> tuple[object, T]:
        if self.task.loss is None:
            return sum(default_loss(output)), output
        return self.task.loss(output), output

    @cached_property
    def _trial(self) -> Trial:
        return self.program.make_trial(self._output_names())

    def _output_names(self) -> list[str | None]:
        """The paths of the program's outputs in the model's output; None for the loss."""
        spec = self.program.source.module_call_graph[0].signature.out_spec
        placeholders = [torch.empty(0) for _ in range(spec.num_leaves)]
        output = pytree_unflatten(placeholders, spec)
        if not isinstance(self.user_model, ExportedProgram):
            output = output[1]
        names = {id(tensor): name for name, tensor in named_tensors(output)}
        return [names.get(id(tensor)) for tensor in placeholders]

    def _values(
        self, model: nn.Module, inputs: object, variant: Variant = AS_IT_IS
    ) -> list[object]:
        """The arguments of the program: constants, parameters and buffers, and inputs."""
        constants = self.program.source.constants.items()
        state = {name: variant.convert(value) for name, value in constants}
        state |= dict(named_buffers(model)) | dict(named_parameters(model))
        inputs_in_order = iter(pytree_flatten(_arguments(inputs))[0])
        return [
            next(inputs_in_order) if role.kind == "input" else state[role.name]
            for _, role in self.program.graph.inputs
        ]


def _no_loss(output: T) -> tuple[None, T]:
    return None, output


def _arguments(inputs: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """The inputs as arguments and keyword arguments, as `call_model` passes them."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})
