"""Whether what a plan cuts is taken apart in whole pieces later: heads, above all."""

from __future__ import annotations

from collections import defaultdict
from math import prod

import torch

from shardscope.errors import PlanError
from shardscope.parallel.boundaries import Borders
from shardscope.parallel.flow import Flow, Step, Value
from shardscope.parallel.mesh import Mesh
from shardscope.parallel.placements import Shard
from shardscope.parallel.plan.resolved import Pin

__all__ = ["check_heads"]

_VIEWS = (
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.unflatten.int,
)


def check_heads(flow: Flow, borders: Borders, mesh: Mesh) -> None:
    """Refuse a plan that cuts a module's output across the heads that it is made of."""
    users: dict[Value, list[Step]] = defaultdict(list)
    for step in flow.steps:
        if isinstance(step, Step) and step.op in _VIEWS:
            users[step.inputs[0]].append(step)
    for value, pin in borders.leaving.items():
        for step in users[value]:
            _check(value, pin, step, mesh, borders.left.get(value) or value.name)


def _check(value: Value, pin: Pin, step: Step, mesh: Mesh, module: str) -> None:
    last = len(value.shape) - 1
    cuts = [
        (axis, size)
        for (axis, size), one in zip(mesh.axes.items(), pin, strict=True)
        if isinstance(one, Shard) and one.dim == last and one.is_plain
    ]
    num_heads = _first_part(value, step.outputs[0])
    if not cuts or num_heads is None or num_heads % prod(size for _, size in cuts) == 0:
        return
    axes = " × ".join(f"{axis}={size}" for axis, size in cuts)
    line = f" ({step.origin.line})" if step.origin.line else ""
    place = step.origin.module or "the program"
    size = value.shape[-1] // num_heads
    raise PlanError(
        f"the plan shards the output of {module} over {axes}, but {place} views its "
        f"{value.shape[-1]} features as {num_heads} heads of {size}{line}, and {num_heads} is not "
        f"divisible. Use a mesh whose size divides {num_heads}, or leave {module} out of the plan."
    )


def _first_part(before: Value, after: Value) -> int | None:
    """The number of parts into which a view takes the last dim; None where it leaves it whole."""
    whole, size = before.shape[-1], 1
    for part in reversed(after.shape):
        size = size * part
        if size == whole:
            return part if part != whole and isinstance(part, int) else None
    return None
