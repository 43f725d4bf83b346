"""Ranks that run one after the other, without data, each as if the others did what it does.

A rank of each role is run once without changes. With changes, only the ranks that see them are run
again, and compared with what the others have issued before. What ranks give to collectives is
passed on where it is known: if it differs, the ranks that receive it are run again, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from shardscope._torch.process_groups.collective_inputs import (
    GroupInputs,
    GroupKey,
    ObjectInput,
    ValueInput,
)
from shardscope.checks.exchanges import find_exchange_mismatch
from shardscope.checks.group_order import find_waiting
from shardscope.checks.roles import Roles, read_roles
from shardscope.checks.runs import JobRunner, RanksRun, explain_failures, read_decisions
from shardscope.errors import LaunchError
from shardscope.hang import P2P_KINDS, Divergence, find_divergences, match_ranks, sort_by_group
from shardscope.launch.api import load_job
from shardscope.launch.decisions import Change, Decisions
from shardscope.record import Recording, merge

MAX_OPS = 20_000
"""After how many ops a program is ended, at the end of its third step or, if large, second."""
_MAX_ROUNDS = 5  # of running ranks again with what they receive
_MAX_MEMBERS = 64  # of a group whose members' values are passed on


@final
class SimulatedRanks:
    """A rank of each role of a program, run without data."""

    def __init__(self, runner: JobRunner) -> None:
        self._runner = runner
        self._recordings: dict[int, Recording] = {}
        self._decisions: dict[int, Decisions] = {}
        self._group_inputs: dict[int, tuple[GroupInputs, ...]] = {}
        self._num_steps: int | None = None  # that each rank takes, if not to the program's end
        self.roles: Roles | None = None

    def probe(self) -> Decisions | str:
        """Run rank 0, whose mesh tells the roles: what it decided by, or why it has failed."""
        failure = self._update({0}, (), {}, self._recordings, self._decisions, max_ops=MAX_OPS)
        if failure is not None or 0 not in self._recordings:
            return failure or "The program has left no recording."
        self.roles = read_roles(self._recordings[0])
        if self._recordings[0].stops:  # it was ended, and all others have to take as many steps
            self._num_steps = self._decisions[0].num_steps
        return self._decisions[0]

    def run(self, changes: Sequence[Change] = ()) -> RanksRun:
        """Run the ranks; with changes, those that see them."""
        if self.roles is None:
            probed = self.probe()
            if isinstance(probed, str):
                raise LaunchError(probed)
        assert self.roles is not None
        if len(self._decisions) < len(self.roles.ranks):
            return self._run_all(self.roles)
        chosen = {
            self.roles.find_representative(rank) for change in changes for rank in change.ranks
        }
        recordings, decisions = dict(self._recordings), dict(self._decisions)
        group_inputs = dict(self._group_inputs)
        for _ in range(_MAX_ROUNDS):
            failure = self._update(chosen, changes, group_inputs, recordings, decisions)
            if failure is not None:
                return self._make_run(recordings, decisions, failure)
            inputs = self._find_group_inputs(decisions)
            chosen = {rank for rank, own in inputs.items() if own != group_inputs.get(rank, ())}
            group_inputs |= inputs
            if not chosen:
                return self._make_run(recordings, decisions, None)
        return replace(self._make_run(recordings, decisions, None), is_settled=False)

    def _run_all(self, roles: Roles) -> RanksRun:
        """Run the ranks that have not run yet, and again those that receive what others give."""
        chosen = {*roles.ranks} - {*self._decisions}
        for _ in range(_MAX_ROUNDS):
            failure = self._update(
                chosen, (), self._group_inputs, self._recordings, self._decisions
            )
            inputs = self._find_group_inputs(self._decisions)
            chosen = {
                rank for rank, own in inputs.items() if own != self._group_inputs.get(rank, ())
            }
            self._group_inputs |= inputs
            if not chosen or failure is not None:
                break
        return self._make_run(self._recordings, self._decisions, failure)

    def _update(
        self,
        ranks: Iterable[int],
        changes: Sequence[Change],
        group_inputs: Mapping[int, tuple[GroupInputs, ...]],
        recordings: dict[int, Recording],
        decisions: dict[int, Decisions],
        *,
        max_ops: int = 0,
    ) -> str | None:
        """Run ranks and put their results in the place of earlier ones; returns why any failed."""
        chosen = sorted(ranks)
        if not chosen:
            return None
        scratch, ended = self._runner.run(
            chosen,
            changes,
            group_inputs=group_inputs,
            num_steps=self._num_steps,
            max_ops=max_ops,
            lanes=None if self.roles is None else self.roles.lanes,
        )
        decisions |= read_decisions(scratch, ended)
        for job_ended in ended:
            recording = load_job(str(scratch), job_ended)
            if recording is not None:
                recordings[job_ended.job.rank] = recording
        return explain_failures(ended)

    def _make_run(
        self,
        recordings: Mapping[int, Recording],
        decisions: Mapping[int, Decisions],
        failure: str | None,
    ) -> RanksRun:
        if not recordings:
            raise LaunchError(failure or "No rank has left a recording.")
        recording = _join(recordings)
        divergences = list(find_divergences(sort_by_group(recording)).values())
        has_diverged = bool(
            divergences
            or find_exchange_mismatch(recording, decisions)
            or find_waiting(recording, decisions)
            or match_ranks(recording)  # sends and receives, too
        )
        changed = {index for rank in decisions.values() for index in rank.changed}
        last = max(changed, default=None)
        if divergences and changed:
            last = _find_cause(recording, divergences, decisions)
        return RanksRun(recording, decisions, has_diverged, last, failure)

    def _find_group_inputs(
        self, decisions: Mapping[int, Decisions]
    ) -> dict[int, tuple[GroupInputs, ...]]:
        """What the members of groups give, where it is not what the rank gives itself."""
        assert self.roles is not None
        values = {rank: _by_place(own.inputs) for rank, own in decisions.items()}
        objects = {rank: _by_place(own.object_inputs) for rank, own in decisions.items()}
        inputs: dict[int, tuple[GroupInputs, ...]] = {}
        for rank in decisions:
            own = [
                *_list_group_inputs(rank, values, self.roles, _join_values),
                *_list_group_inputs(rank, objects, self.roles, _join_objects),
            ]
            inputs[rank] = tuple(own)
        return inputs


_ByPlace = Mapping[tuple[GroupKey, int], Any]


def _by_place(inputs: Iterable[ValueInput | ObjectInput]) -> _ByPlace:
    return {(own.group, own.number): own for own in inputs}


def _list_group_inputs(
    rank: int,
    inputs: Mapping[int, _ByPlace],
    roles: Roles,
    join: Callable[[GroupKey, int, Sequence[Any]], GroupInputs | None],
) -> Iterator[GroupInputs]:
    """The inputs of each collective of a rank to which not all members give the same."""
    for (group, number), own in inputs[rank].items():
        if group.size > _MAX_MEMBERS:
            continue
        first = rank - rank // group.stride % group.size * group.stride
        members = (first + index * group.stride for index in range(group.size))
        given = [
            inputs.get(roles.find_representative(member), {}).get((group, number))
            for member in members
        ]
        if any(there is None for there in given) or all(there == own for there in given):
            continue
        joined = join(group, number, given)
        if joined is not None:
            yield joined


def _join_values(group: GroupKey, number: int, given: Sequence[ValueInput]) -> GroupInputs | None:
    if len({(own.kind, own.reduction, own.root) for own in given}) > 1:
        return None  # the ranks do not issue the same
    return GroupInputs(group, number, values=tuple(own.values for own in given))


def _join_objects(group: GroupKey, number: int, given: Sequence[ObjectInput]) -> GroupInputs:
    return GroupInputs(group, number, objects=tuple(own.content for own in given))


def _join(recordings: Mapping[int, Recording]) -> Recording:
    parts = [recordings[rank] for rank in sorted(recordings)]
    return merge(parts) if len(parts) > 1 else parts[0]


def _find_cause(
    recording: Recording, divergences: Sequence[Divergence], decisions: Mapping[int, Decisions]
) -> int | None:
    """The last change that a rank saw before it issued something else than the others."""
    causes = []
    for divergence in divergences:
        for rank, own in decisions.items():
            if not own.changed:
                continue
            order = _find_order(recording, divergence, rank)
            before = [index for index, start in own.changed.items() if start <= order]
            if before:
                causes.append((order, max(before)))
    return min(causes)[1] if causes else None


def _find_order(recording: Recording, divergence: Divergence, rank: int) -> int:
    """The position, among all collectives of a rank, of that in which it diverges."""
    calls = [
        call
        for call in recording.collectives
        if call.rank == rank and call.group == divergence.group and call.kind not in P2P_KINDS
    ]
    calls.sort(key=lambda call: call.group_order)
    if divergence.position < len(calls):
        return calls[divergence.position].order
    return sum(call.rank == rank for call in recording.collectives)
