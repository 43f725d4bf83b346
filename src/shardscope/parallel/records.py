"""A parallel program as records: what was put in, what fell back, and how everything lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from torch import fx

from shardscope._torch.functional_collectives import is_collective
from shardscope.comm.lines import user_source
from shardscope.comm.run import describe_run, find_torch_gaps, read_identity
from shardscope.parallel import propagate
from shardscope.parallel.causes import GradientNames, shorten_op
from shardscope.parallel.costs import size_hint
from shardscope.parallel.flow import Flow, Move, Origin, Role, Value
from shardscope.parallel.holdings import local_bytes
from shardscope.parallel.layouts import Seat
from shardscope.parallel.mesh import Mesh
from shardscope.parallel.partition import RankProgram
from shardscope.parallel.plan.resolved import Resolved
from shardscope.parallel.talk import Said
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

__all__ = ["list_fallbacks", "list_inserted", "list_placed", "make_recording", "name_program"]

_KINDS = {**{str(one): one for one in PlacedKind}, "input mutation": PlacedKind.MUTATION}


def list_inserted(
    said: Sequence[Said], flow: Flow, mesh: Mesh, rank: RankProgram
) -> list[Inserted]:
    """The collectives of a rank, with their nodes in its program."""
    talking = iter([node for node in rank.graph.nodes if is_collective(node.target)])
    names = GradientNames(flow)
    found = []
    for one in said:
        is_forward = one.phase is Phase.FORWARD
        node = next(talking) if is_forward else rank.nodes[one.value]
        step = one.steps[0]
        cause = step.cause if is_forward and isinstance(step, Move) else _tell(names, one)
        found.append(
            Inserted(
                kind=one.kind,
                axis=list(mesh.axes)[one.axis],
                num_ranks=mesh.sizes[one.axis],
                size_bytes=one.size_bytes,
                phase=one.phase,
                node=node.name if isinstance(node, fx.Node) else "",
                module=step.origin.module,
                cause=cause,
                source=_source(step.origin),
            )
        )
    return found


def _tell(names: GradientNames, one: Said) -> str:
    return names.tell(one.value, one.steps, has_entered=one.has_entered)


def list_fallbacks(fallbacks: Sequence[propagate.Fallback], mesh: Mesh) -> list[Fallback]:
    """The ops that could not run on what they were given."""
    axes = list(mesh.axes)
    return [
        Fallback(
            axis=axes[one.axis],
            kind=FallbackKind(one.kind),
            op=one.origin.op,
            node=one.origin.node,
            module=one.origin.module,
            placements=tuple(map(str, one.placements)),
            size_bytes=one.size_bytes,
            remedy=_remedy(one, axes[one.axis]),
            source=_source(one.origin),
        )
        for one in fallbacks
    ]


def list_placed(flow: Flow, plan: Resolved, seat: Seat) -> list[Placed]:
    """Parameters, buffers, inputs and outputs; `seat` is the rank whose shapes are told."""
    tensors = [
        (value, role)
        for value, role in (*flow.inputs, *flow.outputs)
        if role.kind in _KINDS and isinstance(value, Value) and value.is_tensor
    ]
    return [_place(value, role, flow, plan, seat) for value, role in tensors]


def make_recording(found: Parallelization, mesh: Mesh) -> Recording:
    """A recording of all ranks, or of this process's where a process group stands behind them."""
    is_real = mesh.device_mesh is not None
    rank, world_size = read_identity()
    ranks = [rank] if is_real else [mesh.rank_at(seat) for seat in mesh.seats]
    run = describe_run(
        rank, world_size if is_real else max(ranks) + 1, mesh.records, instrument="parallelize"
    )
    return Recording(
        run=replace(run, ranks=compress_ranks(ranks), is_simulated=not is_real),
        findings=tuple(_find_wrong(found)),
        gaps=find_torch_gaps(),
        parallel=(found,),
    )


def _find_wrong(found: Parallelization) -> Iterator[Finding]:
    for one in found.verdicts:
        if one.agreement not in FINE:
            yield Finding(
                rule="parallel-differs",
                severity=Severity.ERROR,
                subject=one.name,
                fact=f"{one.kind} {one.name} of the parallel program {_off(one)}",
                remedy=(
                    "Do not use the program: remove what it depends on from the plan, and "
                    "report the bug."
                ),
            )


def _off(one: TensorVerdict) -> str:
    how = one.agreement.replace("_", " ")
    if one.error is None or one.noise is None:
        return how
    return f"{how} by {one.error:.1e}, where rounding explains {one.noise:.1e}"


def name_program(flow: Flow) -> str:
    """The class that the program was exported from; "" where nothing says it."""
    for step in flow.steps:
        stack = (step.origin.meta or {}).get("nn_module_stack") or {}
        for name, kind in stack.values():
            if not name:
                return str(getattr(kind, "__name__", kind)).rpartition(".")[2]
    return ""


def _place(value: Value, role: Role, flow: Flow, plan: Resolved, seat: Seat) -> Placed:
    shape, local = value.shape, value.layout.local_shape(seat)
    return Placed(
        name=role.name,
        kind=_KINDS[role.kind],
        shape=tuple(size_hint(one, flow.sizes.hints) for one in shape),
        local_shape=tuple(size_hint(one, flow.sizes.hints) for one in local),
        dtype=str(value.dtype).removeprefix("torch."),
        placements=tuple(map(str, value.placements)),
        local_bytes=local_bytes(value, flow, seat),
        rules=tuple(_rules(role, plan)),
        is_open=any(not isinstance(one, int) for one in shape),
    )


def _rules(role: Role, plan: Resolved) -> Iterator[str]:
    sides: Mapping[str, Mapping[str, Any]] = {"input": plan.inputs, "output": plan.outputs}
    if role.name in sides.get(role.kind, ()):
        yield f"{role.kind}s"
    elif role.kind not in sides:
        yield from plan.rules.get(role.name, ())


def _source(origin: Origin) -> Source | None:
    return user_source((origin.meta or {}).get("stack_trace") or "")


def _remedy(one: propagate.Fallback, axis: str) -> str:
    op = shorten_op(one.origin.op)
    if one.kind == FallbackKind.DECOMPOSITION:
        return (
            f"No action needed: decomposed as torch does, {op} runs sharded along {axis}. If it "
            "moves too many bytes, keep its inputs replicated."
        )
    return (
        f"Change the plan so that {op} gets replicated inputs along {axis}, or inputs sharded "
        "along a dim that it supports: now they are gathered, and every rank computes all of "
        "it."
    )
