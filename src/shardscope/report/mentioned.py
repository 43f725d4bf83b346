"""Modules of a recording that lists none: those that its instruments name.

Coverage, parity, programs and graphs say which module they speak of. With a tree made of these
names their views can be linked as those of a trace are.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

from msgspec.structs import replace

from shardscope.record import (
    Axis,
    Module,
    Parallelization,
    Parameter,
    Placed,
    PlacedKind,
    Recording,
)

__all__ = ["add_mentioned_modules"]

_MAX_MODULES = 20_000
_HELD = (PlacedKind.PARAMETER, PlacedKind.BUFFER, PlacedKind.CONSTANT)
_NUMBER = re.compile(r"[0-9]{1,9}")
_SPELLINGS = {"R": "Replicate", "S": "Shard", "P": "Partial"}


def add_mentioned_modules(recording: Recording) -> Recording:
    """The recording as it is if it has modules, else one that has those it names."""
    if recording.modules:
        return recording
    parameters = _gather_placed(recording)
    types = {one.module: one.type for found in recording.parity for one in found.divergences}
    names = _order(dict.fromkeys([*parameters, *_list_names(recording)]))
    modules = tuple(
        Module(
            name=name,
            type=types.get(name, ""),
            ranks=recording.run.ranks,
            parameters=tuple(parameters.get(name, ())),
        )
        for name in names
    )
    return replace(recording, modules=modules, run=replace(recording.run, axes=_axes(recording)))


def _order(names: Iterable[str]) -> list[str]:
    """In the order in which they are named first, but layers by their numbers."""
    chosen = list(islice(names, _MAX_MODULES))
    labels = dict.fromkeys(label for name in chosen for label in name.split("."))
    places = {label: place for place, label in enumerate(labels)}

    def key(name: str) -> list[tuple[int, int]]:
        return [
            (0, int(label)) if _NUMBER.fullmatch(label) else (1, places[label])
            for label in name.split(".")
        ]

    return sorted(chosen, key=key)


def _axes(recording: Recording) -> tuple[Axis, ...]:
    programs = [one.axes for one in recording.parallel]
    others = [*(one.axes for one in recording.parity), *(one.axes for one in recording.coverage)]
    return recording.run.axes or next(iter([*programs, *others]), ())


def _list_names(recording: Recording) -> Iterator[str]:
    for covered in recording.coverage:
        yield from (name for one in covered.ops for name in one.modules)
    for profile in recording.memory:
        yield from (use.module for use in profile.at_peak if use.module is not None)
    for compared in recording.parity:
        yield from (one.module for one in compared.divergences)
    for found in recording.parallel:
        yield from (one.module for one in found.inserted)
        yield from (one.module for one in found.fallbacks)
    for explained in recording.explanations:
        yield from (op.module for graph in explained.graphs for op in graph.ops if op.module)
    for diagnosis in recording.diagnoses:
        yield from (one.module for one in diagnosis.suspects if one.module)


def _gather_placed(recording: Recording) -> dict[str, list[Parameter]]:
    """What programs that were cut hold, by module; of several programs, the first one's."""
    found: defaultdict[str, list[Parameter]] = defaultdict(list)
    for program in recording.parallel[:1]:
        for placed in program.placed:
            if placed.kind in _HELD:
                module, _, name = placed.name.rpartition(".")
                found[module].append(_make_parameter(name, placed, program))
    return found


def _make_parameter(name: str, placed: Placed, program: Parallelization) -> Parameter:
    num_held = math.prod(placed.local_shape)
    itemsize = placed.local_bytes // num_held if num_held else 0
    return Parameter(
        name=name,
        shape=placed.shape,
        local_shape=placed.local_shape,
        dtype=placed.dtype,
        placements=tuple(map(_spell, placed.placements)),
        axes=tuple(axis.name for axis in program.axes),
        is_buffer=placed.kind is not PlacedKind.PARAMETER,
        rule=", ".join(placed.rules) or None,
        global_bytes=math.prod(placed.shape) * itemsize,
        local_bytes=placed.local_bytes,
    )


def _spell(placement: str) -> str:
    """`Shard(0)` of `S(0)`."""
    name, bracket, rest = placement.partition("(")
    return _SPELLINGS.get(name, name) + bracket + rest
