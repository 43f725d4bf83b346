"""What several instruments found out about one program, in one recording."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from msgspec.structs import replace

from shardscope.errors import MergeError
from shardscope.record.ranks import compress_ranks, expand_ranks
from shardscope.record.recording import Group, Module, Recording, RunInfo

__all__ = ["combine"]

# What each names the ranks or the mesh of by itself, and so may be of a smaller world.
_OWN_WORLD = ("coverage", "parity", "parallel", "diagnoses", "explanations")
_OF_THE_WORLD = ("findings", "gaps", "stops", "spans", "memory", "layouts")


def combine(recordings: Sequence[Recording]) -> Recording:
    """Join recordings of different instruments; the first that heard collectives says what ran."""
    bound = [one for one in recordings if _is_of_its_world(one)] or list(recordings[:1])
    _check_world(bound)
    speaker = next((one for one in bound if one.collectives), bound[0])
    joined: dict[str, Any] = {
        field: tuple(dict.fromkeys(chain.from_iterable(getattr(one, field) for one in recordings)))
        for field in (*_OF_THE_WORLD, *_OWN_WORLD)
    }
    return replace(
        speaker,
        run=_join_runs(speaker.run, recordings, bound),
        groups=_join_groups(recordings),
        modules=_choose_modules(speaker, bound),
        **joined,
    )


def _is_of_its_world(recording: Recording) -> bool:
    """Whether it says what ranks of a world did or hold."""
    return bool(recording.collectives or recording.memory or recording.modules)


def _check_world(bound: Sequence[Recording]) -> None:
    sizes = {one.run.world_size: one for one in bound}
    if len(sizes) > 1:
        (small, first), (large, second) = sorted(sizes.items())[:2]
        raise MergeError(
            f"these recordings are of different runs: {_name(first)} is of a world of {small} "
            f"ranks, {_name(second)} of {large}. Record both with the same mesh."
        )
    if len([one for one in bound if one.collectives]) > 1:
        raise MergeError(
            "more than one of these recordings has collectives of the same rank. Merge one trace "
            "with the recordings of other instruments; `shardscope diff` compares two traces."
        )


def _name(recording: Recording) -> str:
    return " and ".join(recording.run.instruments) or "one"


def _join_runs(run: RunInfo, all_: Sequence[Recording], bound: Sequence[Recording]) -> RunInfo:
    instruments = dict.fromkeys(chain.from_iterable(one.run.instruments for one in all_))
    ranks = sorted({rank for one in bound for rank in expand_ranks(one.run.ranks)})
    skipped = dict.fromkeys(chain.from_iterable(one.run.skipped_checks for one in all_))
    return replace(
        run,
        instruments=tuple(instruments),
        ranks=compress_ranks(ranks),
        skipped_checks=tuple(skipped),
    )


def _join_groups(recordings: Iterable[Recording]) -> tuple[Group, ...]:
    groups: dict[str, Group] = {}
    for group in chain.from_iterable(one.groups for one in recordings):
        groups.setdefault(group.name, group)
    return tuple(groups.values())


def _choose_modules(speaker: Recording, bound: Sequence[Recording]) -> tuple[Module, ...]:
    """An audit knows most of them; a trace knows those that spoke, too."""
    known = max((one.modules for one in bound), key=_count_known)
    names = {module.name for module in known}
    heard = {call.owner for call in speaker.collectives}
    others = (one for one in speaker.modules if one.name in heard and one.name not in names)
    return (*known, *others)


def _count_known(modules: tuple[Module, ...]) -> tuple[int, int]:
    parameters = [one for module in modules for one in module.parameters]
    return sum(one.live_name is not None for one in parameters), len(parameters)
