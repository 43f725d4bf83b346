"""A partitioned program: each rank's program on request, its collectives, memory and parity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from torch import fx, nn
from torch.export import ExportedProgram

from shardscope.parallel.ir.graph import OpNode, Origin, Reshard, ShardingGraph
from shardscope.parallel.ir.mesh import Mesh, describe_axes
from shardscope.parallel.passes import (
    Fallback,
    Gradients,
    JointGraph,
    RankProgram,
    group_ranks_by_shapes,
    trace_collectives,
)
from shardscope.parallel.plan import ResolvedPlan
from shardscope.parallel.records import (
    list_fallbacks,
    list_inserted,
    list_placed,
    make_recording,
    name_program,
)
from shardscope.parallel.runtime import RankPrograms
from shardscope.parallel.verify import (
    Trial,
    divergence_error,
    find_first_divergence,
    flatten_arguments,
    make_trial,
    unverifiable_reason,
    verify_ranks,
)
from shardscope.record import FINE, Inserted, Parallelization, RankMemory, Recording, TensorVerdict

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
            raise divergence_error(wrong, self.find_first_divergence(values))
        return self.verdicts

    def find_first_divergence(self, values: Sequence[Any]) -> Origin | None:
        """The origin of the first value of the forward pass that differs on the ranks."""
        return find_first_divergence(self._programs, values)

    def make_trial(
        self, names: Sequence[str | None] | None = None, *, is_run: bool = True
    ) -> Trial:
        """The programs to run (none unless `is_run`) and compare; `names` are for the outputs."""
        return make_trial(self._programs, names, is_run=is_run)
