"""Runs all ranks of a parallel program in this process and compares them with the single
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeGuard, final

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from shardscope._torch.snapshot import preserved_random_state
from shardscope._torch.tree import flatten
from shardscope.errors import ParallelError
from shardscope.numerics import fp64_mode, perturb_ulp, to_fp64
from shardscope.parallel.equivalence import (
    Runs,
    StepResult,
    compare,
)
from shardscope.parallel.ir.graph import OpNode, Origin, ShardingGraph, Value, explained
from shardscope.parallel.ir.mesh import Mesh
from shardscope.parallel.ir.shard_spec import (
    Coordinates,
    MeshCoordinate,
    ShardSpec,
    local_shard,
    unshard_tensor,
)
from shardscope.parallel.passes import RankProgram
from shardscope.parallel.passes.backward import differentiate, trained_parameters
from shardscope.parallel.passes.exported import CallArguments
from shardscope.parallel.runtime import RankPrograms, is_without_data
from shardscope.parallel.verify.fidelity import check_export_fidelity
from shardscope.parallel.verify.lockstep import run_in_lockstep
from shardscope.plan.placements import Replicate, Shard
from shardscope.record import FINE, TensorVerdict

RunSingle = Callable[[Sequence[object]], StepResult]
"""Runs the single-device program on its arguments."""


@final
@dataclass(frozen=True, eq=False)
class Trial:
    """The programs to compare: the single device's and each rank's, with the same arguments.

    `gradients` names the parameters whose gradients come after the graph's outputs.
    """

    graph: ShardingGraph
    mesh: Mesh
    single: Callable[..., Sequence[object]]
    ranks: Mapping[int, fx.GraphModule]
    gradients: tuple[str, ...] = ()
    names: tuple[str | None, ...] | None = None  # of the outputs; those without one are left out

    def run_single(self, values: Sequence[object]) -> StepResult:
        """The results of the single-device program, by name."""
        return self.outcome(self.single(*values))

    def outcome(self, results: Sequence[object]) -> StepResult:
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
        pairs = zip(self.gradients, gradient_values, strict=True)
        gradients = {name: value for name, value in pairs if isinstance(value, Tensor)}
        return StepResult(outputs, gradients, buffers, frozenset(buffers))


def make_trial(
    programs: RankPrograms, names: Sequence[str | None] | None = None, *, is_run: bool = True
) -> Trial:
    """The programs to compare; without ranks if they are not to be run.

    `names` are names for the program's outputs; outputs whose name is None are not compared.
    """
    output_names = None if names is None else tuple(names)
    ranks = programs.ranks if is_run else []
    single = fx.Interpreter(programs.single_device).run
    if not programs.is_training:
        graphs = {rank: programs.runnable_forward(rank).as_module() for rank in ranks}
        return Trial(programs.graph, programs.mesh, single, graphs, names=output_names)
    return Trial(
        programs.graph,
        programs.mesh,
        differentiate(programs.graph, single),
        {rank: programs.runnable_joint(rank) for rank in ranks},
        tuple(trained_parameters(programs.graph)),
        output_names,
    )


def verify_ranks(
    programs: RankPrograms,
    example: CallArguments,
    values: Sequence[object],
    original: Callable[[], nn.Module] | None,
) -> list[TensorVerdict]:
    """Compare the exported program with the model itself, then all ranks with the program.

    `example` are the model's inputs, `values` the program's arguments; `original` returns a copy of
    the model. The first comparison needs the model and data. Raises ParallelError if it fails.
    """
    trial = make_trial(programs)
    tensors = [*flatten(example)[0], *programs.source.state_dict.values()]
    if original is not None and not any(is_without_data(tensor) for tensor in tensors):
        with preserved_random_state():
            check_export_fidelity(
                original,
                programs.graph,
                example,
                trial.gradients,
                lambda: run_captured(trial, values),
            )
    return compare_ranks_with_single(trial, values)


def flatten_arguments(programs: RankPrograms, example: CallArguments) -> list[object]:
    """The arguments of the program, state and inputs, with generated data for fake tensors."""
    graph, source = programs.graph, programs.source
    inputs = flatten(example)[0]
    num_wanted = sum(role.kind == "input" for _, role in graph.inputs)
    if len(inputs) != num_wanted:
        raise ParallelError(
            f"the program takes {num_wanted} inputs, and {len(inputs)} were given. Give those "
            "that it was exported with: the model's, then the targets of the loss."
        )
    leaves = iter(inputs)
    state = {**source.constants, **source.state_dict}
    values = [
        next(leaves) if role.kind == "input" else state[role.name] for _, role in graph.inputs
    ]
    generator = torch.Generator().manual_seed(0)
    return [
        _generate_data(value, generator) if is_without_data(value) else value for value in values
    ]


def compare_ranks_with_single(trial: Trial, values: Sequence[object]) -> list[TensorVerdict]:
    """Compare each output, gradient and changed buffer; `values` are the program's arguments."""
    with preserved_random_state(), torch.no_grad():
        runs = run_single_device(trial.run_single, values)
        ranks = run_ranks(trial, values)
    return compare(
        runs.reference,
        runs.fp64,
        ranks,
        perturbed_runs=runs.perturbed_runs,
        sizes=trial.mesh.sizes,
    )


def run_captured(trial: Trial, values: Sequence[object]) -> StepResult:
    """Run the exported program, before it is partitioned."""
    with torch.no_grad():
        return _run_original(trial.run_single, values)


def run_single_device(run: RunSingle, values: Sequence[object]) -> Runs:
    """The single device's runs that noise floors are measured with.

    `run` gets a copy of the program's arguments `values`: as they are, and changed by one unit in
    the last place, both also in double precision.
    """
    reference = _run_original(run, values)
    fp64 = _run_fp64(run, values)
    perturbed = perturb_ulp(values)
    return Runs(reference, fp64, ((_run(run, perturbed), _run_fp64(run, perturbed)),))


def _run_original(run: RunSingle, values: Sequence[object]) -> StepResult:
    with explained(
        "torch.export's program of the model fails on these inputs, before it is partitioned",
        "Check that torch.export.export(model, args).module()(*args) works, or pass verify=False.",
    ):
        return _run(run, values)


def _run_fp64(run: RunSingle, values: Sequence[object]) -> StepResult | None:
    """Run the single-device program in double precision; None if a kernel does not support it."""
    try:
        return _run(run, values, is_fp64=True)
    except Exception:  # noqa: BLE001 - whatever it is, the run in the model's own dtype goes on
        return None


def _run(run: RunSingle, values: Sequence[object], *, is_fp64: bool = False) -> StepResult:
    torch.manual_seed(0)
    arguments = [_copy(value, is_fp64) for value in values]
    with fp64_mode(torch.get_default_dtype()) if is_fp64 else nullcontext():
        return run(arguments)


def run_ranks(trial: Trial, values: Sequence[object], *, seed: int = 0) -> list[StepResult]:
    """Run all ranks; the results of each, with shards joined to full tensors."""
    mesh = trial.mesh
    torch.manual_seed(seed)
    arguments = shard_values(trial.graph, mesh, values)
    results = run_in_lockstep(trial.ranks, arguments, ranks_by_group(mesh))
    full_results = join_results(trial, results)
    return [
        trial.outcome(full_results[mesh.rank_at(coordinate)]) for coordinate in mesh.coordinates
    ]


def shard_values(
    graph: ShardingGraph, mesh: Mesh, values: Sequence[object]
) -> dict[int, list[object]]:
    """By rank, its shards of the program's arguments."""
    return {
        mesh.rank_at(coordinate): [
            _shard_value(argument, value.spec, coordinate)
            for argument, (value, _) in zip(values, graph.inputs, strict=True)
        ]
        for coordinate in mesh.coordinates
    }


def _copy(value: object, is_fp64: bool) -> object:
    if not isinstance(value, Tensor):
        return value
    return to_fp64(value.detach()) if is_fp64 else value.detach().clone()


def _shard_value(value: object, spec: ShardSpec, coordinate: MeshCoordinate) -> object:
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


def join_results(trial: Trial, results: Mapping[int, Sequence[object]]) -> dict[int, list[object]]:
    """By rank, its results as full tensors, joined with the shards of its peers."""
    specs = list(_result_specs(trial))
    joined: dict[int, list[object]] = {rank: [] for rank in results}
    for index, spec in enumerate(specs):
        column = {rank: outputs[index] for rank, outputs in results.items()}
        if spec is not None:
            shards = {rank: shard for rank, shard in column.items() if isinstance(shard, Tensor)}
            column = dict(_join_shards(shards, spec, trial.mesh))
        for rank, result in column.items():
            joined[rank].append(result)
    return joined


def _result_specs(trial: Trial) -> Iterator[ShardSpec | None]:
    for item, _ in trial.graph.outputs:
        yield item.spec if isinstance(item, Value) and item.is_tensor else None
    by_name = {role.name: value.spec for value, role in trial.graph.inputs}
    yield from (by_name[name] for name in trial.gradients)


def _join_shards(shards: dict[int, Tensor], spec: ShardSpec, mesh: Mesh) -> dict[int, Tensor]:
    for axis in reversed(range(len(mesh.sizes))):
        placement = spec.placements[axis]
        if isinstance(placement, Replicate):
            continue
        assert isinstance(placement, Shard), "a program returns no partial values"
        joined: dict[int, Tensor] = {}
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


def find_first_divergence(programs: RankPrograms, values: Sequence[object]) -> Origin | None:
    """The origin of the first op of the forward pass whose result differs; None if none does.

    `values` are the program's arguments. Every value is compared as results are: within the noise
    of the single device, measured for that value.
    """
    graph, mesh, single = programs.graph, programs.mesh, programs.single_device
    with preserved_random_state(), torch.no_grad():
        runs = run_single_device(lambda arguments: _run_every_node(single, arguments), values)
        runs_by_value = _split_by_value(runs)
        ranks = {rank: programs.runnable_forward(rank) for rank in programs.ranks}
        actual = _observe_ranks(ranks, shard_values(graph, mesh, values), ranks_by_group(mesh))
        for op_node in graph.op_nodes:
            for value in op_node.outputs if isinstance(op_node, OpNode) else ():
                is_compared = value.name in runs_by_value and value in actual
                if is_compared and not _agrees(
                    runs_by_value[value.name], actual[value], value, mesh
                ):
                    return op_node.origin
    return None


def _run_every_node(graph: fx.GraphModule, values: Sequence[object]) -> StepResult:
    """Every tensor that the program computes, by the name of its value, as an output."""
    interpreter = fx.Interpreter(graph, garbage_collect_values=False)
    interpreter.run(*values)
    outputs: list[tuple[str, Tensor]] = []
    for node, result in interpreter.env.items():
        items = result if isinstance(result, list | tuple) else ()
        named = [(node.name, result), *((f"{node.name}_{i}", item) for i, item in enumerate(items))]
        outputs += [(name, item) for name, item in named if isinstance(item, Tensor)]
    return StepResult(outputs, {}, {})


def _split_by_value(runs: Runs) -> dict[str, Runs]:
    """By the name of a value, the runs with that value as their only result."""
    all_results = [
        runs.reference,
        runs.fp64,
        *(result for pair in runs.perturbed_runs for result in pair),
    ]
    tensors = [None if result is None else dict(result.outputs) for result in all_results]

    def choose(name: str) -> Runs:
        reference, fp64, *perturbed = (
            StepResult([(name, named[name])] if named and name in named else [], {}, {})
            for named in tensors
        )
        return Runs(reference, fp64, tuple(zip(perturbed[::2], perturbed[1::2], strict=True)))

    return {name: choose(name) for name, _ in runs.reference.outputs}


def _observe_ranks(
    ranks: Mapping[int, RankProgram],
    shards: Mapping[int, Sequence[object]],
    groups: Mapping[str, Sequence[int]],
) -> dict[Value, dict[int, Tensor]]:
    """The shard that each rank has of every value of the graph."""
    value_of_node = {
        rank: {node: value for value, node in program.nodes.items() if isinstance(node, fx.Node)}
        for rank, program in ranks.items()
    }
    results: dict[Value, dict[int, Tensor]] = {}

    def observe(rank: int, node: fx.Node, result: object) -> None:
        value = value_of_node[rank].get(node)
        if value is not None and value.origin is None and isinstance(result, Tensor):
            results.setdefault(value, {})[rank] = result

    graphs = {rank: program.as_module() for rank, program in ranks.items()}
    torch.manual_seed(0)
    run_in_lockstep(graphs, shards, groups, observe=observe)
    return results


def _agrees(runs: Runs, actual: Mapping[int, Tensor], value: Value, mesh: Mesh) -> bool:
    """Whether the shards of a value make up what the single device computes."""
    shards = {
        coordinate.coordinates: actual[mesh.rank_at(coordinate)] for coordinate in mesh.coordinates
    }
    try:
        full = unshard_tensor(shards, placements=value.placements, sizes=mesh.sizes)
    except (ValueError, RuntimeError):  # replicas differ, or shards do not fit
        return False
    candidate = StepResult([(value.name, full)], {}, {})
    verdicts = compare(runs.reference, runs.fp64, candidate, perturbed_runs=runs.perturbed_runs)
    return all(verdict.agreement in FINE for verdict in verdicts)


_MAX_RANKS = 64
_MAX_BYTES = 8 * 2**30  # of all ranks' state and the single device's, in double precision too
_MAX_GENERATED_BYTES = 256 * 2**20


def unverifiable_reason(program: ExportedProgram, mesh: Mesh, example: CallArguments | None) -> str:
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


def _is_tensor(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor)


def _generate_data(tensor: Tensor, generator: torch.Generator) -> Tensor:
    shape, dtype = tuple(int(size) for size in tensor.shape), tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        sampled = torch.randn(shape, generator=generator, dtype=wide)
        scaled: Tensor = sampled / max(1, *shape[-1:]) ** 0.5
        return scaled.to(dtype).requires_grad_(tensor.requires_grad)
    return torch.zeros(shape, dtype=dtype)
