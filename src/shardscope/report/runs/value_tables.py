"""Samples of a run, sorted by step, tensor and call."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from shardscope.errors import DiffError
from shardscope.record import Recording, ValueKind, ValueSample, compress_ranks, format_ranks

Key = tuple[ValueKind, str, str]
"""Kind, name and path of a tensor that steps have."""
Table = dict[int, dict[Key, dict[int, list[ValueSample]]]]
"""Samples of all ranks by step, tensor and call."""


def make_table(recording: Recording, title: str) -> Table:
    if not recording.values:
        raise DiffError(
            f"{title} has no sampled values. Record the run with trace(model, values=True), or "
            "values=range(1, 11) for some steps."
        )
    table: Table = {}
    for sample in sorted(recording.values, key=lambda sample: (sample.rank, sample.order)):
        keys = table.setdefault(sample.step, {})
        calls = keys.setdefault((sample.kind, sample.name, sample.path), {})
        calls.setdefault(sample.call, []).append(sample)
    return table


def format_steps(table: Table) -> str:
    return f"step {format_ranks(compress_ranks(sorted(table)))}"


def read_layout(recording: Recording) -> object:
    """What two runs of the same layout have in common: ranks and shapes of their tensors."""
    steps = {sample.step for sample in recording.values}
    shapes = {
        (sample.rank, sample.name, sample.local_shape, sample.placements)
        for sample in recording.values
        if sample.step == min(steps) and sample.kind in (ValueKind.UPDATED, ValueKind.INPUT)
    }
    axes = tuple((axis.name, axis.size) for axis in recording.run.axes)
    return recording.run.world_size, axes, frozenset(shapes)


def find_renumbered(a: Table, b: Table) -> frozenset[str]:
    """Containers whose numbered children are fewer in one run, as experts of one rank are."""
    children: list[dict[str, set[str]]] = []
    for table in (a, b):
        own: dict[str, set[str]] = defaultdict(set)
        for keys in table.values():
            for _, name, _ in keys:
                parts = name.split(".")
                for index, part in enumerate(parts):
                    if part.isdecimal():
                        own[".".join(parts[:index])].add(part)
        children.append(own)
    common = children[0].keys() & children[1].keys()
    return frozenset(name for name in common if children[0][name] != children[1][name])


def is_within(name: str, containers: frozenset[str]) -> bool:
    return any(
        (not container or name.startswith(f"{container}."))
        and name.removeprefix(container).lstrip(".").split(".")[0].isdecimal()
        for container in containers
    )


def find_order(calls: Mapping[int, Sequence[ValueSample]]) -> int:
    return min(sample.order for samples in calls.values() for sample in samples)


def flatten(calls: Mapping[int, Iterable[ValueSample]]) -> list[ValueSample]:
    return [sample for samples in calls.values() for sample in samples]


def format_key(kind: ValueKind, name: str, path: str) -> str:
    where = f"{name or 'the model'}{f'[{path}]' if path else ''}"
    if kind is ValueKind.SETTING:
        return f"setting {where}"
    return "loss" if kind is ValueKind.LOSS else f"{kind.value.replace('_', ' ')} of {where}"


def find_usual_rms(keys: Mapping[Key, Mapping[int, Sequence[ValueSample]]]) -> float:
    """The median root mean square of the gradients of parameters in a step, on any rank."""
    sizes = sorted(
        math.sqrt(sample.sum_squares / math.prod(sample.local_shape))
        for (kind, _, _), calls in keys.items()
        if kind is ValueKind.GRADIENT
        for sample in flatten(calls)
        if sample.sum_squares and math.prod(sample.local_shape)
    )
    return sizes[len(sizes) // 2] if sizes else 0.0
