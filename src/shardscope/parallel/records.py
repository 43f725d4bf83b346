"""A parallel program as records: inserted collectives, fallbacks, and placements of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace
from torch import fx

from shardscope._torch.collectives.functional import is_collective
from shardscope.attribution.call_sites import user_source
from shardscope.attribution.program_records import describe_run, find_torch_gaps, read_identity
from shardscope.parallel.ir.graph import Origin, Reshard, Role, RoleKind, ShardingGraph, Value
from shardscope.parallel.ir.mesh import Mesh
from shardscope.parallel.ir.shard_spec import MeshCoordinate
from shardscope.parallel.passes import RankProgram, ScheduledCollective, propagate
from shardscope.parallel.passes.cost_model import GradientNames, shorten_op, size_hint
from shardscope.parallel.passes.memory_use import local_bytes
from shardscope.parallel.plan import ResolvedPlan
from shardscope.record import (
    FINE,
    Fallback,
    FallbackKind,
    Finding,
    Inserted,
    Parallelization,
    Phase,
    Placed,
    PlacedKind,
    Recording,
    Severity,
    Source,
    TensorVerdict,
    compress_ranks,
)

_KINDS: Mapping[RoleKind, PlacedKind] = {
    "parameter": PlacedKind.PARAMETER,
    "buffer": PlacedKind.BUFFER,
    "constant": PlacedKind.CONSTANT,
    "input": PlacedKind.INPUT,
    "output": PlacedKind.OUTPUT,
    "mutation": PlacedKind.MUTATION,
    "input mutation": PlacedKind.MUTATION,
}


def list_inserted(
    schedule: Sequence[ScheduledCollective], graph: ShardingGraph, mesh: Mesh, rank: RankProgram
) -> list[Inserted]:
    """Records of a rank's collectives, with the names of their nodes in its program."""
    collective_nodes = iter([node for node in rank.graph.nodes if is_collective(node.target)])
    names = GradientNames(graph)
    records = []
    for collective in schedule:
        is_forward = collective.phase is Phase.FORWARD
        node = next(collective_nodes) if is_forward else rank.nodes[collective.value]
        op_node = collective.op_nodes[0]
        cause = (
            op_node.cause
            if is_forward and isinstance(op_node, Reshard)
            else _describe_gradient(names, collective)
        )
        records.append(
            Inserted(
                kind=collective.kind,
                axis=list(mesh.axes)[collective.axis],
                num_ranks=mesh.sizes[collective.axis],
                size_bytes=collective.size_bytes,
                phase=collective.phase,
                node=node.name if isinstance(node, fx.Node) else "",
                module=op_node.origin.module,
                cause=cause,
                source=_source(op_node.origin),
            )
        )
    return records


def _describe_gradient(names: GradientNames, collective: ScheduledCollective) -> str:
    return names.describe(
        collective.value, collective.op_nodes, is_grad_reduction=collective.is_grad_reduction
    )


def list_fallbacks(fallbacks: Sequence[propagate.Fallback], mesh: Mesh) -> list[Fallback]:
    """Records of the ops that had no strategy for the placements of their inputs."""
    axes = list(mesh.axes)
    return [
        Fallback(
            axis=axes[fallback.axis],
            kind=fallback.kind,
            op=fallback.origin.op,
            node=fallback.origin.node,
            module=fallback.origin.module,
            placements=tuple(map(str, fallback.placements)),
            size_bytes=fallback.size_bytes,
            remedy=_remedy(fallback, axes[fallback.axis]),
            source=_source(fallback.origin),
        )
        for fallback in fallbacks
    ]


def list_placed(
    graph: ShardingGraph, plan: ResolvedPlan, coordinate: MeshCoordinate
) -> list[Placed]:
    """Records of parameters, buffers, inputs and outputs, with the local shapes at `coordinate`."""
    tensors = [
        (value, role)
        for value, role in (*graph.inputs, *graph.outputs)
        if role.kind in _KINDS and isinstance(value, Value) and value.is_tensor
    ]
    return [_record_tensor(value, role, graph, plan, coordinate) for value, role in tensors]


def make_recording(parallelization: Parallelization, mesh: Mesh) -> Recording:
    """A recording of all ranks, or of this process's rank if the mesh has a process group."""
    is_real = mesh.device_mesh is not None
    rank, world_size = read_identity()
    ranks = [rank] if is_real else [mesh.rank_at(coordinate) for coordinate in mesh.coordinates]
    run = describe_run(
        rank, world_size if is_real else max(ranks) + 1, mesh.records, instrument="parallelize"
    )
    return Recording(
        run=replace(run, ranks=compress_ranks(ranks), is_simulated=not is_real),
        findings=tuple(_list_findings(parallelization)),
        gaps=find_torch_gaps(),
        parallel=(parallelization,),
    )


def _list_findings(parallelization: Parallelization) -> Iterator[Finding]:
    for verdict in parallelization.verdicts:
        if verdict.agreement not in FINE:
            yield Finding(
                rule="parallel-differs",
                severity=Severity.ERROR,
                subject=verdict.name,
                fact=(
                    f"{verdict.kind} {verdict.name} of the parallel program "
                    f"{_describe_difference(verdict)}"
                ),
                remedy=(
                    "Do not use the program: remove what it depends on from the plan, and "
                    "report the bug."
                ),
            )


def _describe_difference(verdict: TensorVerdict) -> str:
    agreement = verdict.agreement.replace("_", " ")
    if verdict.error is None or verdict.noise is None:
        return agreement
    return f"{agreement} by {verdict.error:.1e}, where rounding explains {verdict.noise:.1e}"


def name_program(graph: ShardingGraph) -> str:
    """The class that the program was exported from; "" if unknown."""
    for op_node in graph.op_nodes:
        stack = op_node.origin.meta.get("nn_module_stack") or {}
        for name, kind in stack.values():
            if not name:
                return str(getattr(kind, "__name__", kind)).rpartition(".")[2]
    return ""


def _record_tensor(
    value: Value, role: Role, graph: ShardingGraph, plan: ResolvedPlan, coordinate: MeshCoordinate
) -> Placed:
    shape, local = value.shape, value.spec.local_shape(coordinate)
    return Placed(
        name=role.name,
        kind=_KINDS[role.kind],
        shape=tuple(size_hint(size, graph.sizes.hints) for size in shape),
        local_shape=tuple(size_hint(size, graph.sizes.hints) for size in local),
        dtype=str(value.dtype).removeprefix("torch."),
        placements=tuple(map(str, value.placements)),
        local_bytes=local_bytes(value, graph, coordinate),
        rules=tuple(_rules(role, plan)),
        is_open=any(not isinstance(size, int) for size in shape),
    )


def _rules(role: Role, plan: ResolvedPlan) -> Iterator[str]:
    values_by_kind: Mapping[RoleKind, Mapping[str, object]] = {
        "input": plan.inputs,
        "output": plan.outputs,
    }
    if role.name in values_by_kind.get(role.kind, ()):
        yield f"{role.kind}s"
    elif role.kind not in values_by_kind:
        yield from plan.patterns.get(role.name, ())


def _source(origin: Origin) -> Source | None:
    return user_source(origin.meta.get("stack_trace") or "")


def _remedy(fallback: propagate.Fallback, axis: str) -> str:
    op = shorten_op(fallback.origin.op)
    if fallback.kind == FallbackKind.DECOMPOSITION:
        return (
            f"No action needed: decomposed as torch does, {op} runs sharded along {axis}. If it "
            "moves too many bytes, keep its inputs replicated."
        )
    return (
        f"Change the plan so that {op} gets replicated inputs along {axis}, or inputs sharded "
        "along a dim that it supports: now they are gathered, and every rank computes all of "
        "it."
    )
