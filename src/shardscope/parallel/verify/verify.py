"""Runs all ranks of a parallel program in this process and compares them with the single
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from shardscope._torch.dispatch import has_fake_tensors
from shardscope._torch.export import flatten
from shardscope._torch.snapshot import preserved_random_state
from shardscope.errors import ParallelError
from shardscope.numerics.fp64 import fp64_mode, perturb_ulp, to_fp64
from shardscope.parallel.equivalence.compare import compare
from shardscope.parallel.equivalence.result import StepResult
from shardscope.parallel.ir.graph import Origin, ShardingGraph, Value, explained
from shardscope.parallel.ir.mesh import Mesh
from shardscope.parallel.ir.reference_sharding import Coordinates, local_shard, unshard_tensor
from shardscope.parallel.ir.shard_spec import MeshCoordinate, ShardSpec
from shardscope.parallel.verify.lockstep import run_in_lockstep
from shardscope.plan.placements import Replicate, Shard
from shardscope.record import TensorVerdict


@final
@dataclass(frozen=True, eq=False)
class Trial:
    """The programs to compare: the single device's and each rank's, with the same arguments.

    `gradients` names the parameters whose gradients come after the graph's outputs.
    """

    graph: ShardingGraph
    mesh: Mesh
    single: Callable[..., Sequence[Any]]
    ranks: Mapping[int, fx.GraphModule]
    gradients: tuple[str, ...] = ()
    names: tuple[str | None, ...] | None = None  # of the outputs; those without one are left out

    def outcome(self, results: Sequence[Any]) -> StepResult:
        """The results of a run, by name."""
        outputs, buffers = [], {}
        names = None if self.names is None else iter(self.names)
        for item, (_, role) in zip(results, self.graph.outputs, strict=False):
            if role.kind == "output":
                name = f"[{role.name}]" if names is None else next(names)
                if isinstance(item, Tensor) and name is not None:
                    outputs.append((name, item))
            elif isinstance(item, Tensor):
                buffers[role.name] = item
        gradient_values = results[len(self.graph.outputs) :]
        gradients = dict(zip(self.gradients, gradient_values, strict=True))
        return StepResult(outputs, gradients, buffers, frozenset(buffers))


def compare_ranks_with_single(trial: Trial, values: Sequence[Any]) -> list[TensorVerdict]:
    """Compare each output, gradient and changed buffer; `values` are the program's arguments."""
    with preserved_random_state(), torch.no_grad():
        reference = _run_original(trial, values)
        fp64 = _run_fp64(trial, values)
        jittered_values = perturb_ulp(values)
        perturbed_runs = [(_run_single(trial, jittered_values), _run_fp64(trial, jittered_values))]
        ranks = run_ranks(trial, values)
    return compare(reference, fp64, ranks, perturbed_runs=perturbed_runs, sizes=trial.mesh.sizes)


def run_captured(trial: Trial, values: Sequence[Any]) -> StepResult:
    """Run the exported program, before it is partitioned."""
    with torch.no_grad():
        return _run_original(trial, values)


def _run_original(trial: Trial, values: Sequence[Any]) -> StepResult:
    with explained(
        "torch.export's program of the model fails on these inputs, before it is partitioned",
        "Check that torch.export.export(model, args).module()(*args) works, or pass verify=False.",
    ):
        return _run_single(trial, values)


def _run_fp64(trial: Trial, values: Sequence[Any]) -> StepResult | None:
    """Run the single-device program in double precision; None if a kernel does not support it."""
    try:
        return _run_single(trial, values, is_fp64=True)
    except Exception:  # noqa: BLE001 - whatever it is, the run in the model's own dtype goes on
        return None


def _run_single(trial: Trial, values: Sequence[Any], *, is_fp64: bool = False) -> StepResult:
    torch.manual_seed(0)
    arguments = [_copy(value, is_fp64) for value in values]
    with fp64_mode(torch.get_default_dtype()) if is_fp64 else nullcontext():
        return trial.outcome(trial.single(*arguments))


def run_ranks(trial: Trial, values: Sequence[Any], *, seed: int = 0) -> list[StepResult]:
    """Run all ranks; the results of each, with shards joined to full tensors."""
    mesh = trial.mesh
    torch.manual_seed(seed)
    arguments = shard_values(trial.graph, mesh, values)
    results = run_in_lockstep(trial.ranks, arguments, ranks_by_group(mesh))
    full_results = join_results(trial, results)
    return [
        trial.outcome(full_results[mesh.rank_at(coordinate)]) for coordinate in mesh.coordinates
    ]


def shard_values(graph: ShardingGraph, mesh: Mesh, values: Sequence[Any]) -> dict[int, list[Any]]:
    """By rank, its shards of the program's arguments."""
    return {
        mesh.rank_at(coordinate): [
            _shard_value(argument, value.spec, coordinate)
            for argument, (value, _) in zip(values, graph.inputs, strict=True)
        ]
        for coordinate in mesh.coordinates
    }


def _copy(value: Any, is_fp64: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return to_fp64(value.detach()) if is_fp64 else value.detach().clone()


def _shard_value(value: Any, spec: ShardSpec, coordinate: MeshCoordinate) -> Any:
    if not isinstance(value, Tensor):
        return value
    return local_shard(value.detach(), spec=spec, coordinate=coordinate).clone()


def ranks_by_group(mesh: Mesh) -> dict[str, Sequence[int]]:
    """By group name, as in the programs, the ranks of the group."""
    return {
        mesh.group_name(axis, coordinate): mesh.group_ranks(axis, coordinate)
        for coordinate in mesh.coordinates
        for axis in range(len(mesh.sizes))
    }


def join_results(trial: Trial, results: Mapping[int, Sequence[Any]]) -> dict[int, list[Any]]:
    """By rank, its results as full tensors, joined with the shards of its peers."""
    specs = list(_result_specs(trial))
    joined: dict[int, list[Any]] = {rank: [] for rank in results}
    for index, spec in enumerate(specs):
        column = {rank: outputs[index] for rank, outputs in results.items()}
        full = column if spec is None else _join_shards(column, spec, trial.mesh)
        for rank, tensor in full.items():
            joined[rank].append(tensor)
    return joined


def _result_specs(trial: Trial) -> Iterator[ShardSpec | None]:
    for item, _ in trial.graph.outputs:
        yield item.spec if isinstance(item, Value) and item.is_tensor else None
    by_name = {role.name: value.spec for value, role in trial.graph.inputs}
    yield from (by_name[name] for name in trial.gradients)


def _join_shards(shards: dict[int, Any], spec: ShardSpec, mesh: Mesh) -> dict[int, Any]:
    for axis in reversed(range(len(mesh.sizes))):
        placement = spec.placements[axis]
        if isinstance(placement, Replicate):
            continue
        assert isinstance(placement, Shard), "a program hands out no addends"
        joined: dict[int, Any] = {}
        for coordinate in mesh.coordinates:
            if mesh.rank_at(coordinate) not in joined:
                peers = mesh.group_ranks(axis, coordinate)
                parts: dict[Coordinates, Tensor] = {
                    (i,): shards[rank] for i, rank in enumerate(peers)
                }
                full = unshard_tensor(parts, placements=[placement], sizes=[len(peers)])
                joined.update(dict.fromkeys(peers, full))
        shards = joined
    return shards


_MAX_RANKS = 64
_MAX_BYTES = 8 * 2**30  # of all ranks' state and the single device's, in double precision too
_MAX_GENERATED_BYTES = 256 * 2**20


def unverifiable_reason(program: ExportedProgram, mesh: Mesh, example: Any) -> str:
    """Why all ranks cannot be run in this process; "" if they can."""
    if example is None:
        return "the program was saved without example inputs; call verify(*inputs)"
    if mesh.num_ranks > _MAX_RANKS:
        return (
            f"{mesh.num_ranks} ranks are too many for one process; verify the same plan on a mesh "
            f"of at most {_MAX_RANKS}"
        )
    tensors = [*_tensors(program), *(leaf for leaf in flatten(example)[0] if _is_tensor(leaf))]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    is_generated = any(is_without_data(tensor) for tensor in tensors)
    if is_generated and num_bytes > _MAX_GENERATED_BYTES:
        return (
            f"its {num_bytes / 2**30:.1f} GiB of tensors have no data; verify the same plan on a "
            "smaller configuration of the model"
        )
    if (3 + mesh.num_ranks) * num_bytes > _MAX_BYTES:
        return (
            f"{mesh.num_ranks} ranks of {num_bytes / 2**30:.1f} GiB do not fit in one process; "
            "verify the same plan on a smaller configuration of the model"
        )
    return ""


def materialize_inputs(values: Sequence[Any]) -> list[Any]:
    """The values, with generated data for meta and fake tensors."""
    generator = torch.Generator().manual_seed(0)
    return [
        _generate_data(value, generator) if is_without_data(value) else value for value in values
    ]


def divergence_error(
    wrong: Sequence[TensorVerdict], first_divergence: Origin | None
) -> ParallelError:
    """The error for a program whose results differ, first at the op `first_divergence`."""
    first = wrong[0]
    more = f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
    difference = (
        ""
        if first.error is None
        else f" by {first.error:.1e}, where rounding explains {first.noise:.1e}"
    )
    location = "its forward agrees, its gradients do not"
    if first_divergence is not None:
        module = f" in {first_divergence.module}" if first_divergence.module else ""
        line = f" ({first_divergence.line})" if first_divergence.line else ""
        location = (
            f"the first value that differs is {first_divergence.node}, "
            f"{first_divergence.op}{module}{line}"
        )
    return ParallelError(
        f"the parallel program does not compute what the original does: {first.kind} {first.name} "
        f"{first.agreement.replace('_', ' ')}{difference}{more}; {location}. Leave that module "
        "out of the "
        "plan, and please report it: this is a bug in shardscope."
    )


def _tensors(program: ExportedProgram) -> Iterator[Tensor]:
    by_id = {
        id(tensor): tensor for tensor in (*program.state_dict.values(), *program.constants.values())
    }
    yield from (tensor for tensor in by_id.values() if _is_tensor(tensor))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def is_without_data(value: Any) -> bool:
    """Whether it is a meta or fake tensor."""
    return isinstance(value, Tensor) and (value.is_meta or has_fake_tensors(value))


def _generate_data(tensor: Tensor, generator: torch.Generator) -> Tensor:
    shape, dtype = tuple(int(size) for size in tensor.shape), tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        sampled = torch.randn(shape, generator=generator, dtype=wide)
        scaled: Tensor = sampled / max(1, *shape[-1:]) ** 0.5
        return scaled.to(dtype).requires_grad_(tensor.requires_grad)
    return torch.zeros(shape, dtype=dtype)
