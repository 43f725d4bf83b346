"""A recording cut down to some of its modules and what lies below them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import final

from msgspec.structs import replace

from shardscope.record import (
    Coverage,
    Finding,
    MemoryProfile,
    Module,
    Parallelization,
    Parity,
    Recording,
)
from shardscope.report.numbered import fold_path

__all__ = ["keep_modules", "list_paths"]

_MAX_DEPTH = 64  # as deep as a tree is drawn


def list_paths(recording: Recording) -> tuple[str, ...]:
    """All modules that the recording names, in the order in which it does."""
    named = [module.name for module in recording.modules]
    named += [call.owner for call in recording.collectives if call.owner is not None]
    named += [name for level in recording.coverage for op in level.ops for name in op.modules]
    named += [
        use.module for one in recording.memory for use in one.at_peak if use.module is not None
    ]
    return tuple(dict.fromkeys(named))


def keep_modules(recording: Recording, pattern: str) -> Recording | None:
    """What belongs to modules that match, or lie below one that does; None if no module matches.

    What is of the run as a whole stays: gaps, phases, the compiler's own figures.
    """
    chosen = _Chosen(list_paths(recording), pattern)
    if not chosen.paths:
        return None
    return replace(
        recording,
        modules=tuple(chosen.keep_modules(recording.modules)),
        collectives=tuple(call for call in recording.collectives if chosen.holds(call.owner)),
        findings=tuple(one for one in recording.findings if chosen.is_about(one)),
        coverage=tuple(one for one in map(chosen.cut_coverage, recording.coverage) if one.ops),
        memory=tuple(chosen.cut_memory(one) for one in recording.memory),
        layouts=tuple(one for one in recording.layouts if chosen.holds_tensor(one.name)),
        parity=tuple(one for one in map(chosen.cut_parity, recording.parity) if one.tensors),
        parallel=tuple(chosen.cut_parallel(one) for one in recording.parallel),
    )


@final
class _Chosen:
    """The modules that were asked for."""

    def __init__(self, paths: Iterable[str], pattern: str) -> None:
        self._pattern = pattern
        self._known: dict[str, bool] = {}
        self.paths = {path for path in paths if self.holds(path)}
        self._folded = {fold_path(path) for path in self.paths}

    def holds(self, path: str | None) -> bool:
        """Whether a module, or one above it, matches."""
        if path is None:
            return False
        if path not in self._known:
            names = (*_list_above(path), path)
            self._known[path] = any(fnmatchcase(name, self._pattern) for name in names)
        return self._known[path]

    def holds_tensor(self, name: str) -> bool:
        """Whether a tensor is one of theirs."""
        return self.holds(name.rpartition(".")[0])

    def is_about(self, finding: Finding) -> bool:
        """Whether a finding names one of them, or all of a kind: `layers.*.wq.weight (×32)`."""
        names = finding.subject.partition(" (×")[0].split(", ")
        return any(self._names(name) for name in names)

    def _names(self, name: str) -> bool:
        return self.holds(name) or not self._folded.isdisjoint((*_list_above(name)[1:], name))

    def keep_modules(self, modules: Iterable[Module]) -> Iterable[Module]:
        """Theirs, and, without what they hold, the ones above, which say what they are."""
        above = {name for path in self.paths for name in _list_above(path)}
        for module in modules:
            if module.name in self.paths:
                yield module
            elif module.name in above:
                yield replace(module, parameters=(), marks=(), aliases=())

    def cut_coverage(self, coverage: Coverage) -> Coverage:
        """Ops that one of them calls."""
        ops = tuple(op for op in coverage.ops if any(map(self.holds, op.modules)))
        return replace(coverage, ops=ops)

    def cut_memory(self, profile: MemoryProfile) -> MemoryProfile:
        """What they hold at the peak, which stays the rank's."""
        held = tuple(use for use in profile.at_peak if self.holds(use.module))
        return replace(profile, at_peak=held)

    def cut_parity(self, parity: Parity) -> Parity:
        """Their tensors, and where they part from the original."""
        tensors = tuple(one for one in parity.tensors if self.holds_tensor(one.name))
        parted = tuple(one for one in parity.divergences if self.holds(one.module))
        return replace(parity, tensors=tensors, divergences=parted)

    def cut_parallel(self, found: Parallelization) -> Parallelization:
        """What was put into them, and what they hold; the proof is of the whole."""
        return replace(
            found,
            inserted=tuple(one for one in found.inserted if self.holds(one.module)),
            fallbacks=tuple(one for one in found.fallbacks if self.holds(one.module)),
            placed=tuple(one for one in found.placed if self.holds_tensor(one.name)),
        )


def _list_above(path: str) -> list[str]:
    """The root, and every module between it and this one."""
    ends = [end for end, char in enumerate(path) if char == "."][:_MAX_DEPTH]
    return ["", *(path[:end] for end in ends)]
