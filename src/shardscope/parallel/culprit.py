"""The first value of a program that its ranks do not compute as the single device does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardscope.numerics.noise import epsilon
from shardscope.parallel.flow import Flow, Origin, Step, Value
from shardscope.parallel.lockstep import run_in_lockstep
from shardscope.parallel.mesh import Mesh
from shardscope.parallel.partition import RankProgram
from shardscope.parallel.rules.dealing import join

__all__ = ["find_culprit"]

_MUCH = 1e3  # units in the last place: what adding in another order does not explain


def find_culprit(
    flow: Flow,
    mesh: Mesh,
    single: fx.GraphModule,
    ranks: Mapping[int, RankProgram],
    values: Sequence[Any],
    pieces: Mapping[int, Sequence[Any]],
    groups: Mapping[str, Sequence[int]],
) -> Origin | None:
    """Where in the program the ranks first go wrong, forward; None where they do not."""
    right = _run_single(single, values)
    found = _run_ranks(ranks, pieces, groups)
    for step in flow.steps:
        if not isinstance(step, Step):
            continue
        for value in step.outputs:
            expected = right.get(value.name)
            if expected is None or not value.is_tensor or value not in found:
                continue
            if not _agrees(found[value], expected, value, mesh):
                return step.origin
    return None


def _run_single(graph: fx.GraphModule, values: Sequence[Any]) -> dict[str, Any]:
    interpreter = fx.Interpreter(graph, garbage_collect_values=False)
    torch.manual_seed(0)
    interpreter.run(*values)
    seen: dict[str, Any] = {}
    for node, value in interpreter.env.items():
        if isinstance(value, (list, tuple)):
            seen.update({f"{node.name}_{i}": one for i, one in enumerate(value)})
        seen[node.name] = value
    return seen


def _run_ranks(
    ranks: Mapping[int, RankProgram],
    pieces: Mapping[int, Sequence[Any]],
    groups: Mapping[str, Sequence[int]],
) -> dict[Value, dict[int, Any]]:
    stand_for = {
        rank: {node: value for value, node in program.nodes.items() if isinstance(node, fx.Node)}
        for rank, program in ranks.items()
    }
    seen: dict[Value, dict[int, Any]] = {}

    def watch(rank: int, node: fx.Node, result: Any) -> None:
        value = stand_for[rank].get(node)
        if value is not None and value.origin is None:
            seen.setdefault(value, {})[rank] = result

    graphs = {rank: one.as_module() for rank, one in ranks.items()}
    torch.manual_seed(0)
    run_in_lockstep(graphs, pieces, groups, watch=watch)
    return seen


def _agrees(found: Mapping[int, Any], expected: Any, value: Value, mesh: Mesh) -> bool:
    if not isinstance(expected, Tensor):
        return True
    at = {seat.coordinates: found[mesh.rank_at(seat)] for seat in mesh.seats}
    try:
        whole = join(at, placements=value.placements, sizes=mesh.sizes)
    except (ValueError, RuntimeError):  # ranks disagree, or pieces do not fit
        return False
    if not expected.is_floating_point() and not expected.is_complex():
        return torch.equal(whole, expected)
    # Equal infinities, such as those of a mask, have no difference, and NaN none to NaN.
    is_same = (whole == expected) | (whole.isnan() & expected.isnan())
    off = (whole - expected).abs().masked_fill(is_same, 0.0)
    sizes = expected.abs().masked_fill(~expected.isfinite(), 0.0)
    return (
        bool((off <= _MUCH * epsilon(expected.dtype) * sizes.amax()).all()) if off.numel() else True
    )
