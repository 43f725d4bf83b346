"""A recording reduced to selected modules, and modules inferred where a recording lists none."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import final

from msgspec.structs import replace

from shardscope.record import (
    Axis,
    Coverage,
    Finding,
    InferredTypes,
    MemoryProfile,
    Module,
    Parallelization,
    Parameter,
    Parity,
    Placed,
    PlacedKind,
    Recording,
)
from shardscope.record.layer_names import fold_layers, is_layer_number
from shardscope.record.patterns import matches_inside

_MAX_DEPTH = 64  # as deep as trees are drawn


def list_paths(recording: Recording) -> tuple[str, ...]:
    """List all modules that the recording names, in order of appearance."""
    named = [module.name for module in recording.modules]
    named += [call.owner for call in recording.collectives if call.owner is not None]
    named += [name for level in recording.coverage for op in level.ops for name in op.modules]
    named += [
        use.module
        for profile in recording.memory
        for use in profile.at_peak
        if use.module is not None
    ]
    return tuple(dict.fromkeys(named))


def keep_modules(recording: Recording, pattern: str) -> Recording | None:
    """Reduce a recording to modules that match or are inside one that does; None if none matches.

    What belongs to the entire run stays: gaps, phases, and data of the compiler.
    """
    chosen = _Selection(list_paths(recording), pattern)
    if not chosen.paths:
        return None
    return replace(
        recording,
        modules=tuple(chosen.keep_modules(recording.modules)),
        collectives=tuple(call for call in recording.collectives if chosen.holds(call.owner)),
        findings=tuple(finding for finding in recording.findings if chosen.is_about(finding)),
        coverage=tuple(
            coverage for coverage in map(chosen.select_coverage, recording.coverage) if coverage.ops
        ),
        memory=tuple(chosen.select_memory(profile) for profile in recording.memory),
        layouts=tuple(layout for layout in recording.layouts if chosen.holds_tensor(layout.name)),
        parity=tuple(
            parity for parity in map(chosen.select_parity, recording.parity) if parity.tensors
        ),
        types=tuple(types for types in map(chosen.select_types, recording.types) if types.tensors),
        parallel=tuple(chosen.select_parallel(program) for program in recording.parallel),
    )


@final
class _Selection:
    """The modules that match a pattern."""

    def __init__(self, paths: Iterable[str], pattern: str) -> None:
        self._pattern = pattern
        self._known: dict[str, bool] = {}
        self.paths = {path for path in paths if self.holds(path)}
        self._folded = {fold_layers(path) for path in self.paths}

    def holds(self, path: str | None) -> bool:
        """Whether the module or one that contains it matches."""
        if path is None:
            return False
        if path not in self._known:
            self._known[path] = matches_inside(self._pattern, path)
        return self._known[path]

    def holds_tensor(self, name: str) -> bool:
        """Whether the tensor belongs to a selected module."""
        return self.holds(name.rpartition(".")[0])

    def is_about(self, finding: Finding) -> bool:
        """Whether a finding names a selected module, or a pattern: `layers.*.wq.weight (×32)`."""
        names = finding.subject.partition(" (×")[0].split(", ")
        return any(self._names(name) for name in names)

    def _names(self, name: str) -> bool:
        return self.holds(name) or not self._folded.isdisjoint((*_list_above(name)[1:], name))

    def keep_modules(self, modules: Iterable[Module]) -> Iterable[Module]:
        """Yield selected modules, and their ancestors without parameters."""
        above = {name for path in self.paths for name in _list_above(path)}
        for module in modules:
            if module.name in self.paths:
                yield module
            elif module.name in above:
                yield replace(module, parameters=(), marks=(), aliases=())

    def select_coverage(self, coverage: Coverage) -> Coverage:
        """Keep ops that a selected module calls."""
        ops = tuple(op for op in coverage.ops if any(map(self.holds, op.modules)))
        return replace(coverage, ops=ops)

    def select_memory(self, profile: MemoryProfile) -> MemoryProfile:
        """Keep what selected modules hold at the peak; the peak itself is the rank's."""
        at_peak = tuple(use for use in profile.at_peak if self.holds(use.module))
        return replace(profile, at_peak=at_peak)

    def select_parity(self, parity: Parity) -> Parity:
        """Keep tensors and divergences of selected modules."""
        tensors = tuple(tensor for tensor in parity.tensors if self.holds(tensor.module or ""))
        divergences = tuple(
            divergence for divergence in parity.divergences if self.holds(divergence.module)
        )
        return replace(parity, tensors=tensors, divergences=divergences)

    def select_types(self, types: InferredTypes) -> InferredTypes:
        """Keep tensors of selected modules."""
        tensors = tuple(tensor for tensor in types.tensors if self.holds(tensor.module))
        return replace(types, tensors=tensors)

    def select_parallel(self, program: Parallelization) -> Parallelization:
        """Keep collectives, fallbacks and tensors of selected modules, and all verdicts."""
        return replace(
            program,
            inserted=tuple(
                collective for collective in program.inserted if self.holds(collective.module)
            ),
            fallbacks=tuple(
                fallback for fallback in program.fallbacks if self.holds(fallback.module)
            ),
            placed=tuple(tensor for tensor in program.placed if self.holds_tensor(tensor.name)),
        )


def _list_above(path: str) -> list[str]:
    """List all ancestors of a module, from the root."""
    ends = [end for end, char in enumerate(path) if char == "."][:_MAX_DEPTH]
    return ["", *(path[:end] for end in ends)]


_MAX_MODULES = 20_000
_PARAMETER_KINDS = (PlacedKind.PARAMETER, PlacedKind.BUFFER, PlacedKind.CONSTANT)
_PLACEMENT_NAMES = {"R": "Replicate", "S": "Shard", "P": "Partial"}


def infer_modules(recording: Recording) -> Recording:
    """Return the recording, with modules inferred from other records if it lists none."""
    if recording.modules:
        return recording
    parameters = _gather_parameters(recording)
    types = {
        divergence.module: divergence.type
        for parity in recording.parity
        for divergence in parity.divergences
    }
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
    """Order names by first appearance, but layers by their numbers."""
    chosen = list(islice(names, _MAX_MODULES))
    labels = dict.fromkeys(label for name in chosen for label in name.split("."))
    positions = {label: position for position, label in enumerate(labels)}

    def key(name: str) -> list[tuple[int, int]]:
        return [
            (0, int(label)) if is_layer_number(label) else (1, positions[label])
            for label in name.split(".")
        ]

    return sorted(chosen, key=key)


def _axes(recording: Recording) -> tuple[Axis, ...]:
    programs = [program.axes for program in recording.parallel]
    tables = [
        *(parity.axes for parity in recording.parity),
        *(coverage.axes for coverage in recording.coverage),
        *(types.axes for types in recording.types),
    ]
    return recording.run.axes or next(iter([*programs, *tables]), ())


def _list_names(recording: Recording) -> Iterator[str]:
    for covered in recording.coverage:
        yield from (name for op in covered.ops for name in op.modules)
    for profile in recording.memory:
        yield from (use.module for use in profile.at_peak if use.module is not None)
    for compared in recording.parity:
        yield from (divergence.module for divergence in compared.divergences)
    for types in recording.types:
        yield from (tensor.module for tensor in types.tensors)
    for program in recording.parallel:
        yield from (collective.module for collective in program.inserted)
        yield from (fallback.module for fallback in program.fallbacks)
    for explained in recording.explanations:
        yield from (op.module for graph in explained.graphs for op in graph.ops if op.module)
    for diagnosis in recording.diagnoses:
        yield from (suspect.module for suspect in diagnosis.suspects if suspect.module)


def _gather_parameters(recording: Recording) -> dict[str, list[Parameter]]:
    """Return the parameters of the first parallel program, by module."""
    by_module: defaultdict[str, list[Parameter]] = defaultdict(list)
    for program in recording.parallel[:1]:
        for placed in program.placed:
            if placed.kind in _PARAMETER_KINDS:
                module, _, name = placed.name.rpartition(".")
                by_module[module].append(_make_parameter(name, placed, program))
    return by_module


def _make_parameter(name: str, placed: Placed, program: Parallelization) -> Parameter:
    num_elements = math.prod(placed.local_shape)
    itemsize = placed.local_bytes // num_elements if num_elements else 0
    return Parameter(
        name=name,
        shape=placed.shape,
        local_shape=placed.local_shape,
        dtype=placed.dtype,
        placements=tuple(map(_expand_placement, placed.placements)),
        axes=tuple(axis.name for axis in program.axes),
        is_buffer=placed.kind is not PlacedKind.PARAMETER,
        rule=", ".join(placed.rules) or None,
        global_bytes=math.prod(placed.shape) * itemsize,
        local_bytes=placed.local_bytes,
    )


def _expand_placement(placement: str) -> str:
    """Expand `S(0)` to `Shard(0)`."""
    name, bracket, rest = placement.partition("(")
    return _PLACEMENT_NAMES.get(name, name) + bracket + rest
