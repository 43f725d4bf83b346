"""Checks that on every rank a step's results depend on the same of its arguments.

Forward, only moves talk. Backward, a gradient comes to a value if something that was made of it is
used: a rank that left out an argument of which it holds nothing would not take part in summing the
argument's gradient, and the others would wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from shardscope._torch.dispatch import is_overload
from shardscope.errors import ParallelError
from shardscope.parallel.flow import Flow, Role, Step, Value, map_nest, values_in
from shardscope.parallel.gradients import Gradients
from shardscope.parallel.layouts import Seat
from shardscope.parallel.mesh import Mesh
from shardscope.parallel.partition import write_rank
from shardscope.parallel.rules.lookup import find_speller
from shardscope.parallel.wires import FunctionalWire

__all__ = ["check_dependence"]

_aten = torch.ops.aten
# They take a tensor for its shape or type, and no gradient comes back through them.
_BLIND = (
    *(_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default),
    *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    *(_aten.new_empty.default, _aten.empty_like.default),
)


def check_dependence(flow: Flow, mesh: Mesh, gradients: Gradients, seats: list[Seat]) -> None:
    """Raise ParallelError for the first step of which the ranks on these seats differ."""
    for step in _distinct_steps(flow):
        asked = {at for at in range(len(step.inputs)) if gradients.passes(step, at)}
        if not asked:
            continue
        found = [(seat, asked & _find_used(step, flow, mesh, seat)) for seat in seats]
        for seat, used in found[1:]:
            if used != found[0][1]:
                raise _refuse(step, mesh, (found[0][0], seat), used ^ found[0][1])


def _distinct_steps(flow: Flow) -> Iterator[Step]:
    """One for all that are written alike: those that ranks write as they are need no look."""
    known: set[str] = set()
    for step in flow.steps:
        if isinstance(step, Step) and _is_spelled(step) and not _has_open_sizes(step):
            key = f"{step.op} {map_nest(step.arguments, _describe)}"
            if key not in known:
                known.add(key)
                yield step


def _is_spelled(step: Step) -> bool:
    is_whole = all(one.layout.is_replicated for one in (*step.inputs, *step.outputs))
    return not is_whole and is_overload(step.op) and find_speller(step.op) is not None


def _has_open_sizes(step: Step) -> bool:
    values = [*values_in(step.arguments), *step.outputs]
    sizes = [size for one in values for size in (*one.shape, one.scalar)]
    return any(not isinstance(size, (int, float, type(None))) for size in sizes)


def _describe(item: Any) -> Any:
    if isinstance(item, Value):
        return (item.layout, item.dtype) if item.is_tensor else item.scalar
    return item


def _find_used(step: Step, flow: Flow, mesh: Mesh, seat: Seat) -> set[int]:
    """The positions of the inputs that a rank's results depend on."""
    inputs = list(dict.fromkeys(values_in(step.arguments)))
    alone = Flow(
        inputs=[(one, Role("input", one.name)) for one in inputs],
        steps=[step],
        outputs=[(one, Role("output", one.name)) for one in step.outputs],
        sizes=flow.sizes,
    )
    rank = write_rank(alone, seat, lambda pen: FunctionalWire(pen, mesh, seat))
    (output,) = rank.graph.find_nodes(op="output")
    reached = _ancestors(output)
    return {at for at, one in enumerate(step.inputs) if rank.nodes[one] in reached}


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        for one in waiting.pop().all_input_nodes:
            if one not in found and one.target not in _BLIND:
                found.add(one)
                waiting.append(one)
    return found


def _refuse(step: Step, mesh: Mesh, seats: tuple[Seat, Seat], differing: set[int]) -> ParallelError:
    one, other = (mesh.rank_at(seat) for seat in seats)
    where = step.origin
    value = step.inputs[min(differing)].name
    place = f"{where.module or 'the program'}{', ' if where.line else ''}{where.line}"
    return ParallelError(
        f"ranks {one} and {other} would issue different collectives in the backward pass: of "
        f"{where.op} ({where.node}, in {place}), only one of them uses {value}. This is a bug "
        "in shardscope; please report the program."
    )
