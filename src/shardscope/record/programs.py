"""Whether recordings are of one program: the same target, root module and modules."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set

from msgspec import Struct

from shardscope.errors import MergeError
from shardscope.record.base import CollectiveKind
from shardscope.record.ranks import format_ranks, intersect_ranks
from shardscope.record.recording import Recording, RunInfo
from shardscope.record.text import excerpt

_P2P = (CollectiveKind.SEND, CollectiveKind.RECV)
_PIPELINE_AXES = ("pp", "pipe", "pipeline", "stage")


class Part(Struct, frozen=True):
    """A recording to merge, and the file it came from, if any."""

    recording: Recording
    file: str = ""

    @property
    def run(self) -> RunInfo:
        """The run of the recording."""
        return self.recording.run

    def name(self) -> str:
        """`rank 3`, or `'run-3.json' (rank 3)`."""
        ranks = f"rank {format_ranks(self.run.ranks)}" if self.run.ranks else ""
        if not self.file:
            return ranks or "a recording without ranks"
        return f"'{self.file}' ({ranks})" if ranks else f"'{self.file}'"


class _Program(Struct, frozen=True):
    """What is known of the program of a recording: its target or script, and its modules."""

    part: Part
    target: str  # of a verb of ours, such as train for train.py; empty if it was none
    script: str  # that was run, if it was no verb of ours
    roots: frozenset[str]  # classes of the outermost modules
    types: dict[str, set[str]]  # classes by name, below a root that has the empty name
    has_collectives: bool
    is_pipeline: bool

    @property
    def name(self) -> str:
        return self.part.name()


def check_same_program(parts: Sequence[Part]) -> None:
    """Raise MergeError if the parts are of different programs.

    Ranks of one run may hold different modules, as the stages of a pipeline do, and parameters of
    different shapes. Instruments of the same rank record the same modules.
    """
    programs = [_read_program(part) for part in parts]
    by_target = [program for program in programs if program.target or program.script]
    by_modules = [program for program in programs if program.roots]
    for comparable, find_conflict in (
        (by_target, _compare_targets),
        (by_modules, _compare_modules),
    ):
        for program in comparable[1:]:
            conflict = find_conflict(comparable[0], program)
            if conflict is not None:
                raise MergeError(
                    f"these recordings are of different programs: {conflict}. Join only "
                    "recordings of one program; `shardscope diff` compares two."
                )


def _read_program(part: Part) -> _Program:
    recording = part.recording
    target, script = _read_command(recording.run.command)
    types: defaultdict[str, set[str]] = defaultdict(set)
    for module in recording.modules:
        types[module.name].add(module.type)
    roots = types.pop("", None)
    outermost = {kind for name, kinds in types.items() if "." not in name for kind in kinds}
    calls = recording.collectives
    axes = {axis.name for axis in recording.run.axes}
    return _Program(
        part=part,
        target=target,
        script=script,
        roots=frozenset(outermost if roots is None else roots),
        types={} if roots is None else dict(types),
        has_collectives=bool(calls),
        is_pipeline=not axes.isdisjoint(_PIPELINE_AXES) or any(call.kind in _P2P for call in calls),
    )


def _read_command(command: str) -> tuple[str, str]:
    """`train` of `shardscope trace train.py`, or the script that was run; empty if not known."""
    try:
        words = shlex.split(command)
    except ValueError:
        return "", ""
    if words[:1] != ["shardscope"]:
        return "", words[0] if words else ""
    if words[1:2] == ["demo"]:
        return "demo", ""
    files = [word for word in words[2:] if word.endswith(".py")]
    if not files and len(words) > 2 and not words[2].startswith("-"):
        files = [words[2]]  # a module
    return files[0].rpartition("/")[2].removesuffix(".py").rpartition(".")[2] if files else "", ""


def _compare_targets(first: _Program, second: _Program) -> str | None:
    if first.target and second.target:
        sources = first.target, second.target
    elif first.roots and second.roots:
        return None  # two scripts may import one program: its modules decide
    elif intersect_ranks(first.part.run.ranks, second.part.run.ranks):
        return None  # a recording of an instrument that records no modules
    else:
        sources = first.script, second.script
    if not all(sources) or sources[0] == sources[1]:
        return None
    return f"{first.name} is of {excerpt(sources[0])}, {second.name} of {excerpt(sources[1])}"


def _compare_modules(first: _Program, second: _Program) -> str | None:
    is_same_rank = bool(intersect_ranks(first.part.run.ranks, second.part.run.ranks))
    if not is_same_rank and (first.is_pipeline or second.is_pipeline):
        return None
    if first.roots.isdisjoint(second.roots):
        return (
            f"the root module of {first.name} is a {_list(first.roots)}, that of {second.name} "
            f"a {_list(second.roots)}"
        )
    common = first.types.keys() & second.types.keys()
    differing = [name for name in common if first.types[name].isdisjoint(second.types[name])]
    if 2 * len(differing) > len(common):
        name = min(differing)
        return (
            f"'{excerpt(name)}' is a {_list(first.types[name])} in {first.name} and a "
            f"{_list(second.types[name])} in {second.name}"
        )
    return _find_missing_module(first, second, common, is_same_rank=is_same_rank)


def _find_missing_module(
    first: _Program, second: _Program, common: Set[str], *, is_same_rank: bool
) -> str | None:
    """A sentence on a module that only one program has, where both should have it.

    Instruments record all modules of a model, and some add modules that were found later.
    """
    if not first.types or not second.types:
        return None
    has_none_in_common = not common and (
        is_same_rank or (first.has_collectives and second.has_collectives)
    )
    for owner, lacking in ((first, second), (second, first)):
        for name in sorted(owner.types.keys() - common):
            parent = name.rpartition(".")[0]
            if has_none_in_common or (is_same_rank and parent in common):
                return f"{owner.name} has the module '{excerpt(name)}', {lacking.name} does not"
    return None


def _list(types: Iterable[str]) -> str:
    return excerpt(" or ".join(sorted(types)))
