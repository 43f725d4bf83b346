"""Runs all ranks of a program in lockstep, with data, and reads what they decided and issued."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import msgspec
from msgspec.structs import replace

from shardscope.launch.api import join_jobs
from shardscope.launch.calls import CALLS
from shardscope.launch.decisions import DECISIONS, Change, Decisions
from shardscope.launch.lockstep import OUTCOME, Outcome
from shardscope.launch.request import Job, JobEnded, Request
from shardscope.launch.warm_process import OnEvent, WarmProcess
from shardscope.record import Recording


@final
@dataclass(frozen=True)
class LockstepRun:
    """What came of running all ranks: how they ended, what they issued and what they decided by."""

    outcome: Outcome
    recording: Recording | None
    decisions: Mapping[int, Decisions]
    ended: Sequence[JobEnded]

    def find_last_change(self) -> int | None:
        """The index of the change that was made last; None if none was."""
        changed = [index for rank in self.decisions.values() for index in rank.changed]
        return max(changed, default=None)

    @property
    def has_diverged(self) -> bool:
        """Whether the ranks did not issue the same."""
        return self.outcome.reason in ("mismatch", "stuck")

    @property
    def num_steps(self) -> int:
        """The number of steps that all ranks have taken."""
        return min((rank.num_steps for rank in self.decisions.values()), default=0)


@final
class LockstepRanks:
    """A program whose ranks can be run in lockstep, again and again, in a folder of their own."""

    def __init__(
        self, process: WarmProcess, request: Request, folder: str, on_event: OnEvent
    ) -> None:
        self._process = process
        self._request = request
        self._folder = folder
        self._on_event = on_event
        self._numbers = itertools.count()

    def run(self, changes: Sequence[Change] = ()) -> LockstepRun:
        """Run all ranks, with these changes of what they see."""
        number = next(self._numbers)
        scratch = Path(self._folder, f"run{number}")
        scratch.mkdir()
        ranks = range(self._request.num_nodes * self._request.num_per_node)
        request = replace(
            self._request,
            scratch=str(scratch),
            jobs=tuple(Job(rank=rank, instrument=CALLS) for rank in ranks),
            num_parallel=len(ranks),
            has_data=True,
            lockstep=f"\0shardscope-{Path(self._folder).name}-{number}",
            changes=tuple(changes),
            is_shown=number == 0,
        )
        ended = self._process.run(request, self._on_event)
        path = scratch / OUTCOME
        outcome = Outcome("failed")
        if path.exists():
            outcome = msgspec.json.decode(path.read_bytes(), type=Outcome)
        return LockstepRun(
            outcome,
            join_jobs(str(scratch), ended),
            {job.job.rank: d for job in ended if (d := _read_decisions(scratch, job.job))},
            ended,
        )


def _read_decisions(scratch: Path, job: Job) -> Decisions | None:
    path = scratch / f"{job.stem}.{DECISIONS}"
    if not path.exists():
        return None
    return msgspec.json.decode(path.read_bytes(), type=Decisions)
