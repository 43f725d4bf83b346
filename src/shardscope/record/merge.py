"""Joins recordings into one: of a run's ranks, and of several instruments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec.structs import replace

from shardscope.errors import MergeError, RecordingError
from shardscope.record.codec import load
from shardscope.record.programs import Part, check_same_program
from shardscope.record.ranks import RankSpan, compress_ranks, expand_ranks, format_ranks
from shardscope.record.recording import Gap, Group, Module, Recording, RunInfo

# Fields whose records name their own ranks or mesh, and so may be of a smaller world.
_OWN_WORLD_FIELDS = ("coverage", "parity", "parallel", "diagnoses", "explanations")
_WORLD_FIELDS = ("findings", "gaps", "stops", "spans", "memory", "layouts")


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


_MISSING = "world"


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
    recorded = (gap for part in parts for gap in part.gaps if gap.place != _MISSING)
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
        parallel=tuple(dict.fromkeys(program for part in parts for program in part.parallel)),
        diagnoses=tuple(dict.fromkeys(diagnosis for part in parts for diagnosis in part.diagnoses)),
        explanations=tuple(explanation for part in parts for explanation in part.explanations),
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
    return replace(
        runs[0],
        ranks=ranks,
        axes=axes,
        instruments=tuple(instruments),
        num_forwards=max(counts, default=None),
        device_type=next((run.device_type for run in runs if run.device_type), None),
        skipped_checks=tuple(dict.fromkeys(name for run in runs for name in run.skipped_checks)),
    )


def _find_missing(run: RunInfo) -> list[Gap]:
    missing = sorted(set(range(run.world_size)) - set(expand_ranks(run.ranks)))
    if not missing:
        return []
    ranks = format_ranks(compress_ranks(missing))
    fact = f"no recording of {len(missing)} of {run.world_size} ranks: {ranks}"
    return [Gap(place=_MISSING, fact=fact)]


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
