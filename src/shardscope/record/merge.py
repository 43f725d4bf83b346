"""Joins recordings of one program into one: of a run's ranks, and of several instruments."""

from __future__ import annotations

import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import chain
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shardscope.errors import MergeError, RecordingError
from shardscope.record.base import CollectiveKind
from shardscope.record.codec import load
from shardscope.record.ranks import (
    RankSpan,
    compress_ranks,
    expand_ranks,
    format_ranks,
    intersect_ranks,
)
from shardscope.record.recording import Gap, Group, Module, Recording, RunInfo
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
    target: str  # `train` if a command of shardscope ran train.py; empty if none did
    script: str  # the script that was run, if it was not a command of shardscope
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

    Instruments record all modules of a model. Of other models, which get the names of their classes
    when they are called, an instrument may record the modules that it has seen.
    """
    if not first.types or not second.types:
        return None
    has_none_in_common = not common and (
        is_same_rank or (first.has_collectives and second.has_collectives)
    )
    for owner, lacking in ((first, second), (second, first)):
        for name in sorted(owner.types.keys() - common):
            parent, model = name.rpartition(".")[0], name.partition(".")[0]
            is_in_other = model.partition("#")[0] in owner.types.get(model, ())
            if has_none_in_common or (is_same_rank and parent in common and not is_in_other):
                return f"{owner.name} has the module '{excerpt(name)}', {lacking.name} does not"
    return None


def _list(types: Iterable[str]) -> str:
    return excerpt(" or ".join(sorted(types)))


# Fields whose records name their own ranks or mesh, and so may be of a smaller world.
_OWN_WORLD_FIELDS = (
    "coverage",
    "parity",
    "types",
    "parallel",
    "diagnoses",
    "explanations",
    "comparisons",
    "checks",
    "hangs",
)
_WORLD_FIELDS = (
    "findings",
    "gaps",
    "stops",
    "spans",
    "memory",
    "layouts",
    "values",
    "processes",
    "dropped",
)


def combine(recordings: Sequence[Recording]) -> Recording:
    """Join recordings of different instruments; `run` is that of the first with collectives."""
    in_world = [recording for recording in recordings if _has_world_records(recording)] or list(
        recordings[:1]
    )
    _check_world(in_world)
    main = next((recording for recording in in_world if recording.collectives), in_world[0])
    joined_fields: dict[str, Any] = {
        field: tuple(
            dict.fromkeys(
                chain.from_iterable(getattr(recording, field) for recording in recordings)
            )
        )
        for field in (*_WORLD_FIELDS, *_OWN_WORLD_FIELDS)
    }
    return replace(
        main,
        run=_join_runs(main.run, recordings, in_world),
        groups=_join_groups(recordings),
        modules=_choose_modules(main, in_world),
        **joined_fields,
    )


def _has_world_records(recording: Recording) -> bool:
    """Whether it has records of the ranks of its world."""
    return bool(recording.collectives or recording.memory or recording.modules)


def _check_world(recordings: Sequence[Recording]) -> None:
    sizes = {recording.run.world_size: recording for recording in recordings}
    if len(sizes) > 1:
        (small, first), (large, second) = sorted(sizes.items())[:2]
        raise MergeError(
            f"these recordings are of different runs: {_name(first)} is of a world of {small} "
            f"ranks, {_name(second)} of {large}. Record both with the same mesh."
        )
    if len([recording for recording in recordings if recording.collectives]) > 1:
        raise MergeError(
            "more than one of these recordings has collectives of the same rank. Merge one trace "
            "with the recordings of other instruments; `shardscope diff` compares two traces."
        )


def _name(recording: Recording) -> str:
    return " and ".join(recording.run.instruments) or "one"


def _join_runs(run: RunInfo, all_: Sequence[Recording], in_world: Sequence[Recording]) -> RunInfo:
    instruments = dict.fromkeys(
        chain.from_iterable(recording.run.instruments for recording in all_)
    )
    ranks = sorted({rank for recording in in_world for rank in expand_ranks(recording.run.ranks)})
    skipped = dict.fromkeys(chain.from_iterable(recording.run.skipped_checks for recording in all_))
    return replace(
        run,
        instruments=tuple(instruments),
        ranks=compress_ranks(ranks),
        skipped_checks=tuple(skipped),
    )


def _join_groups(recordings: Iterable[Recording]) -> tuple[Group, ...]:
    groups: dict[str, Group] = {}
    for group in chain.from_iterable(recording.groups for recording in recordings):
        groups.setdefault(group.name, group)
    return tuple(groups.values())


def _choose_modules(main: Recording, recordings: Sequence[Recording]) -> tuple[Module, ...]:
    """The modules of the most complete recording, and others that issued collectives."""
    known = max((recording.modules for recording in recordings), key=_count_known)
    names = {module.name for module in known}
    owners = {call.owner for call in main.collectives}
    added = (
        module for module in main.modules if module.name in owners and module.name not in names
    )
    return (*known, *added)


def _count_known(modules: tuple[Module, ...]) -> tuple[int, int]:
    parameters = [parameter for module in modules for parameter in module.parameters]
    return sum(parameter.live_name is not None for parameter in parameters), len(parameters)


MISSING = "world"


def merge_files(
    paths: Iterable[str | os.PathLike[str]], *, report: Callable[[str], None] = lambda _: None
) -> Recording:
    """Load and merge files; one that cannot be read is a gap, unless none can be read.

    Args:
        paths: Recordings or streams.
        report: Called with a description of the current activity.

    Examples:
        >>> run = merge_files(["run-0.jsonl", "run-1.jsonl"])
    """
    names = sorted(os.fspath(path) for path in paths)
    parts: list[Part] = []
    errors: list[RecordingError] = []
    gaps: list[Gap] = []
    for number, path in enumerate(names, start=1):
        report(f"reading {path} ({number:,} of {len(names):,})")
        try:
            parts.append(Part(load(path), path))
        except RecordingError as error:
            errors.append(error)
            gaps.append(Gap(place=path, fact=str(error)))
    if not parts:
        raise _explain_none(errors)
    report("joining them")
    merged = _merge(parts)
    return replace(merged, gaps=(*gaps, *merged.gaps))


def _explain_none(errors: list[RecordingError]) -> RecordingError:
    if len(errors) == 1:
        return errors[0]
    if not errors:
        return RecordingError("there is nothing to merge. Name the recordings of a run's ranks.")
    return RecordingError(f"none of the {len(errors)} files can be read; the first: {errors[0]}")


def merge(recordings: Iterable[Recording]) -> Recording:
    """Join recordings of the ranks of one run, and of several instruments of one program.

    Ranks are matched collective by collective, and disagreements become findings. The result does
    not depend on the order of the recordings.

    Args:
        recordings: The recordings.

    Examples:
        >>> run = merge([load("run-0.json.gz"), load("run-1.json.gz")])
        >>> run.findings
    """
    return _merge([Part(recording) for recording in recordings])


def _merge(parts: Sequence[Part]) -> Recording:
    if not parts:
        raise MergeError("there is nothing to merge. Name the recordings of a run's ranks.")
    check_same_program(parts)
    by_instrument: dict[tuple[str, ...], list[Part]] = {}
    for part in parts:
        by_instrument.setdefault(part.run.instruments, []).append(part)
    if len(by_instrument) == 1:
        return _merge_ranks(parts)
    # A single file of an instrument is complete: no rank is missing.
    return combine(
        [
            instrument_parts[0].recording
            if len(instrument_parts) == 1
            else _merge_ranks(instrument_parts)
            for _, instrument_parts in sorted(by_instrument.items())
        ]
    )


def _merge_ranks(unsorted: Sequence[Part]) -> Recording:
    sources = sorted(unsorted, key=_sort_key)
    _check_same_world(sources)
    _check_no_rank_twice(sources)
    parts = [source.recording for source in sources]
    groups, group_gaps = _merge_groups(parts)
    run = _merge_runs([part.run for part in parts])
    recorded = (gap for part in parts for gap in part.gaps if gap.place != MISSING)
    gaps = [*_find_missing(run), *_find_disagreements(parts), *group_gaps, *recorded]
    collectives = (collective for part in parts for collective in part.collectives)
    return Recording(
        run=run,
        groups=groups,
        modules=_merge_modules(parts),
        collectives=tuple(
            sorted(collectives, key=lambda collective: (collective.rank, collective.order))
        ),
        findings=tuple(dict.fromkeys(finding for part in parts for finding in part.findings)),
        gaps=tuple(dict.fromkeys(gaps)),
        stops=tuple(stop for part in parts for stop in part.stops),
        spans=tuple(span for part in parts for span in part.spans),
        coverage=tuple(coverage for part in parts for coverage in part.coverage),
        memory=tuple(profile for part in parts for profile in part.memory),
        layouts=tuple(dict.fromkeys(layout for part in parts for layout in part.layouts)),
        parity=tuple(dict.fromkeys(parity for part in parts for parity in part.parity)),
        types=tuple(dict.fromkeys(types for part in parts for types in part.types)),
        parallel=tuple(dict.fromkeys(program for part in parts for program in part.parallel)),
        diagnoses=tuple(dict.fromkeys(diagnosis for part in parts for diagnosis in part.diagnoses)),
        explanations=tuple(explanation for part in parts for explanation in part.explanations),
        values=tuple(value for part in parts for value in part.values),
        comparisons=tuple(dict.fromkeys(run for part in parts for run in part.comparisons)),
        processes=tuple(process for part in parts for process in part.processes),
        dropped=tuple(record for part in parts for record in part.dropped),
        checks=tuple(dict.fromkeys(check for part in parts for check in part.checks)),
        hangs=tuple(dict.fromkeys(hang for part in parts for hang in part.hangs)),
    )


def _sort_key(part: Part) -> tuple[list[int], bytes]:
    ranks = sorted(expand_ranks(part.run.ranks))
    # Ranks differ between parts that can be merged; only parts without any need a second key.
    return ranks, b"" if ranks else msgspec.json.encode(part.recording)


def _check_same_world(parts: Sequence[Part]) -> None:
    first = parts[0]
    for part in parts:
        if part.run.world_size != first.run.world_size:
            raise MergeError(
                f"these recordings are of different runs: {first.name()} is of a world of "
                f"{first.run.world_size} ranks, {part.name()} of {part.run.world_size}. "
                f"Merge only the files of one run."
            )
        if part.run.is_simulated != first.run.is_simulated:
            real, simulated = (part, first) if first.run.is_simulated else (first, part)
            raise MergeError(
                f"these recordings are of different runs: {simulated.name()} was simulated, "
                f"{real.name()} was real. Merge only the files of one run."
            )


def _check_no_rank_twice(parts: Sequence[Part]) -> None:
    holders: dict[int, Part] = {}
    for part in parts:
        ranks = sorted(set(expand_ranks(part.run.ranks)))
        if twice := [rank for rank in ranks if rank in holders]:
            files = (holders[twice[0]].file, part.file)
            where = f", '{files[0]}' and '{files[1]}'" if all(files) else ""
            raise MergeError(
                f"rank {format_ranks(compress_ranks(twice))} is in more than one recording{where}. "
                f"Merge one file per rank; a file left by an earlier run may be among them."
            )
        holders.update(dict.fromkeys(ranks, part))


def _merge_runs(runs: Sequence[RunInfo]) -> RunInfo:
    axes = next((run.axes for run in runs if run.axes), ())
    instruments = dict.fromkeys(name for run in runs for name in run.instruments)
    ranks = _unite(run.ranks for run in runs)
    counts = [run.num_forwards for run in runs if run.num_forwards is not None]
    node_sizes = {run.ranks_per_node for run in runs if run.ranks_per_node}
    return replace(
        runs[0],
        ranks=ranks,
        axes=axes,
        instruments=tuple(instruments),
        num_forwards=max(counts, default=None),
        device_type=next((run.device_type for run in runs if run.device_type), None),
        skipped_checks=tuple(dict.fromkeys(name for run in runs for name in run.skipped_checks)),
        ranks_per_node=node_sizes.pop() if len(node_sizes) == 1 else None,
    )


def _find_missing(run: RunInfo) -> list[Gap]:
    missing = sorted(set(range(run.world_size)) - set(expand_ranks(run.ranks)))
    if not missing:
        return []
    ranks = format_ranks(compress_ranks(missing))
    fact = f"no recording of {len(missing)} of {run.world_size} ranks: {ranks}"
    return [Gap(place=MISSING, fact=fact)]


def _find_disagreements(parts: Sequence[Recording]) -> list[Gap]:
    """Gaps for facts that differ between ranks, but should be the same in a run."""
    facts: dict[str, Callable[[RunInfo], str]] = {
        "torch version": lambda run: run.torch_version,
        "shardscope version": lambda run: run.shardscope_version,
        "mesh axes": lambda run: ", ".join(f"{axis.name}={axis.size}" for axis in run.axes),
    }
    gaps = []
    for subject, read in facts.items():
        holders: dict[str, list[tuple[RankSpan, ...]]] = {}
        for part in parts:
            holders.setdefault(read(part.run), []).append(part.run.ranks)
        if len(holders) > 1:
            sides = (
                f"{value or 'none'} on rank {format_ranks(_unite(ranks))}"
                for value, ranks in holders.items()
            )
            gaps.append(Gap(place=subject, fact="ranks disagree: " + "; ".join(sides)))
    return gaps


def _merge_groups(parts: Sequence[Recording]) -> tuple[tuple[Group, ...], list[Gap]]:
    groups: dict[str, Group] = {}
    gaps: list[Gap] = []
    for part in parts:
        rank = next(iter(expand_ranks(part.run.ranks)), None)
        for group in part.groups:
            first = groups.setdefault(group.name, group)
            # Torch's name and the backend may differ; its ranks and its axis may not.
            if (group.ranks, group.axis) != (first.ranks, first.axis):
                fact = f"{_describe(group)} here, {_describe(first)} on an earlier rank, kept"
                gaps.append(Gap(place=f"group {group.name}", fact=fact, rank=rank))
    return tuple(groups.values()), gaps


def _describe(group: Group) -> str:
    axis = f" on axis {group.axis}" if group.axis is not None else ""
    return f"ranks {format_ranks(group.ranks)}{axis}"


def _merge_modules(parts: Sequence[Recording]) -> tuple[Module, ...]:
    holders: dict[Module, list[tuple[RankSpan, ...]]] = {}
    for part in parts:
        for module in part.modules:
            holders.setdefault(replace(module, ranks=()), []).append(module.ranks)
    return tuple(replace(module, ranks=_unite(ranks)) for module, ranks in holders.items())


def _unite(spans: Iterable[tuple[RankSpan, ...]]) -> tuple[RankSpan, ...]:
    return compress_ranks(sorted({rank for part in spans for rank in expand_ranks(part)}))
