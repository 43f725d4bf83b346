"""The result of `parallelize`: each rank's program on request, and the record of how it was made.

The record lists the collectives that were inserted, the ops that fell back to replicated inputs,
the placement of every parameter, input and output, the memory of the ranks, and whether their
results equal those of a single device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from msgspec.structs import replace
from torch import fx, nn
from torch.export import ExportedProgram

from shardscope._torch.collectives.functional import is_collective
from shardscope.attribution.call_sites import user_source
from shardscope.attribution.program_records import describe_run, find_torch_gaps, read_identity
from shardscope.errors import ParallelError
from shardscope.parallel.ir.graph import (
    OpNode,
    Origin,
    Reshard,
    Role,
    RoleKind,
    ShardingGraph,
    Value,
)
from shardscope.parallel.ir.mesh import Mesh, describe_axes
from shardscope.parallel.ir.shard_spec import MeshCoordinate
from shardscope.parallel.passes import (
    Fallback,
    Gradients,
    JointGraph,
    RankProgram,
    ScheduledCollective,
    group_ranks_by_shapes,
    trace_collectives,
)
from shardscope.parallel.passes.cost_model import GradientNames, shorten_op, size_hint
from shardscope.parallel.passes.memory_use import local_bytes
from shardscope.parallel.plan import ResolvedPlan
from shardscope.parallel.runtime import RankPrograms
from shardscope.parallel.verify import (
    Trial,
    find_first_divergence,
    flatten_arguments,
    make_trial,
    unverifiable_reason,
    verify_ranks,
)
from shardscope.record import (
    FINE,
    FallbackKind,
    Finding,
    Inserted,
    Parallelization,
    Phase,
    Placed,
    PlacedKind,
    RankMemory,
    Recording,
    Severity,
    Source,
    TensorVerdict,
    compress_ranks,
)
from shardscope.record import Fallback as FallbackRecord

_MAX_REASON = 80  # characters of `not_verified` in the repr


@final
@dataclass(eq=False)
class ParallelProgram:
    """A program that was partitioned for a mesh; each rank's program is made on request.

    Examples:
        >>> program = parallelize(model, "tp=4", plan, args=(tokens,))
        >>> program.exported(3)
    """

    source: ExportedProgram
    graph: ShardingGraph
    mesh: Mesh
    plan: ResolvedPlan
    fallbacks: list[Fallback]
    is_training: bool = False
    original: Callable[[], nn.Module] | None = None  # a copy of the model itself
    verdicts: list[TensorVerdict] | None = None
    not_verified: str = ""

    def __repr__(self) -> str:
        kinds = Counter(
            str(collective.kind)
            for collective in trace_collectives(self.graph, self.mesh.coordinates[0])
        )
        collectives = (
            ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no collectives"
        )
        name = name_program(self.graph) or "program"
        proof = self.not_verified[:_MAX_REASON] or (
            "not verified" if self.verdicts is None else "verified"
        )
        return (
            f"<ParallelProgram {name} on {describe_axes(self.mesh.axes)}: {collectives}, "
            f"{len(self.fallbacks)} fallbacks, {proof}>"
        )

    @cached_property
    def _programs(self) -> RankPrograms:
        return RankPrograms(self.source, self.graph, self.mesh, self.is_training)

    def _or_own(self, rank: int | None) -> int:
        return self.mesh.own_rank() if rank is None else rank

    def exported(self, rank: int | None = None) -> ExportedProgram:
        """The program of a rank (default: this process's) with its shards of the state."""
        return self._programs.exported(self._or_own(rank))

    def module(self, rank: int | None = None) -> nn.Module:
        """The rank's program as a module; trainable if it was partitioned for training."""
        return self._programs.module(self._or_own(rank))

    def joint(self, rank: int | None = None) -> JointGraph:
        """The rank's forward and backward program."""
        return self._programs.joint(self._or_own(rank))

    def write(self, rank: int) -> RankProgram:
        """The rank's graph, without state."""
        return self._programs.forward(rank)

    def forward(self, rank: int | None = None) -> fx.GraphModule:
        """The rank's forward graph, which takes its state before its inputs."""
        return fx.GraphModule(nn.Module(), self.write(self._or_own(rank)).graph)

    @property
    def moves(self) -> list[Reshard]:
        """Every reshard, in order."""
        return [op_node for op_node in self.graph.op_nodes if isinstance(op_node, Reshard)]

    @cached_property
    def collectives(self) -> list[Inserted]:
        """Every collective of this process's rank, in order, with its cause; backward ones too."""
        rank = self.mesh.own_rank()
        schedule = trace_collectives(
            self.graph, self.mesh.coordinate_of(rank), gradients=self.gradients
        )
        return list_inserted(schedule, self.graph, self.mesh, self.write(rank))

    @cached_property
    def placements(self) -> dict[str, tuple[str, ...]]:
        """The placements of every tensor, by the names of nodes in the ranks' programs."""
        placements_by_node: dict[str, tuple[str, ...]] = {}
        for value, node in self.write(self.mesh.own_rank()).nodes.items():
            if value.is_tensor and isinstance(node, fx.Node):
                placements_by_node.setdefault(node.name, tuple(map(str, value.placements)))
        return placements_by_node

    @cached_property
    def gradients(self) -> Gradients | None:
        """The values that the backward pass differentiates; None without a backward pass."""
        return Gradients(self.graph) if self.is_training else None

    def memory(self, rank: int | None = None) -> RankMemory:
        """The memory of a rank (default: this process's) at the sizes of the example inputs."""
        return self._programs.measure((self._or_own(rank),))

    def measure_ranks(self) -> list[RankMemory]:
        """The memory of all ranks, those with equal shapes in one record."""
        groups = group_ranks_by_shapes(self.graph, self.mesh)
        return [self._programs.measure(ranks) for ranks in groups]

    def _repr_html_(self) -> str:
        """The page of the recording, for notebooks."""
        return self.recording()._repr_html_()

    def recording(self) -> Recording:
        """The program as a recording, for `show` and `save`."""
        not_requested = (
            "" if self.verdicts is not None else "verification was turned off (verify=False)"
        )
        parallelization = Parallelization(
            program=name_program(self.graph),
            axes=self.mesh.records,
            is_training=self.is_training,
            num_ops=sum(isinstance(op_node, OpNode) for op_node in self.graph.op_nodes),
            inserted=tuple(self.collectives),
            fallbacks=tuple(list_fallbacks(self.fallbacks, self.mesh)),
            placed=tuple(list_placed(self.graph, self.plan, self.mesh.coordinates[0])),
            rank_memory=tuple(self.measure_ranks()),
            verdicts=tuple(self.verdicts or ()),
            unverified=self.not_verified or not_requested,
        )
        return make_recording(parallelization, self.mesh)

    def verify(self, *args: Any, **kwargs: Any) -> list[TensorVerdict]:
        """Run all ranks in this process, compare with the single device, raise if they differ.

        Without arguments, on the inputs that the program was exported with. If that is impossible,
        `not_verified` has the reason.
        """
        example = (args, kwargs) if args or kwargs else self.source.example_inputs
        self.not_verified = unverifiable_reason(self.source, self.mesh, example)
        if self.not_verified:
            return []
        values = flatten_arguments(self._programs, example)
        self.verdicts = verify_ranks(self._programs, example, values, self.original)
        wrong = [verdict for verdict in self.verdicts if verdict.agreement not in FINE]
        if wrong:
            raise _divergence_error(wrong, self.find_first_divergence(values))
        return self.verdicts

    def find_first_divergence(self, values: Sequence[Any]) -> Origin | None:
        """The origin of the first value of the forward pass that differs on the ranks."""
        return find_first_divergence(self._programs, values)

    def make_trial(
        self, names: Sequence[str | None] | None = None, *, is_run: bool = True
    ) -> Trial:
        """The programs to run (none unless `is_run`) and compare; `names` are for the outputs."""
        return make_trial(self._programs, names, is_run=is_run)


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


def list_fallbacks(fallbacks: Sequence[Fallback], mesh: Mesh) -> list[FallbackRecord]:
    """Records of the ops that had no strategy for the placements of their inputs."""
    axes = list(mesh.axes)
    return [
        FallbackRecord(
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


def _remedy(fallback: Fallback, axis: str) -> str:
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


def _divergence_error(
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
