"""Runs a program as several ranks, again and again, and reads what they decided and issued."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import msgspec
from msgspec.structs import replace

from shardscope._torch.process_groups.collective_inputs import GroupInputs
from shardscope.hang import match_ranks
from shardscope.launch.api import RunResult, join_jobs
from shardscope.launch.calls import CALLS
from shardscope.launch.decisions import DECISIONS, Change, Decisions
from shardscope.launch.lockstep import OUTCOME, Outcome
from shardscope.launch.request import MAIL, Job, JobEnded, Lanes, Reason, Request
from shardscope.launch.warm_process import OnEvent, WarmProcess
from shardscope.record import Recording
from shardscope.world.objects import SENT


@final
@dataclass(frozen=True)
class RanksRun:
    """What came of running ranks: what they issued and decided by, and how they ended.

    `last_change` is the index of the change after which the ranks have diverged or one of them has
    failed; otherwise that of the last change that was made. `is_settled` is False if simulated
    ranks were run as often as allowed, and still gave others something new.
    """

    recording: Recording | None
    decisions: Mapping[int, Decisions]
    has_diverged: bool
    last_change: int | None
    failure: str | None = None
    is_settled: bool = True

    @property
    def num_steps(self) -> int:
        """The number of steps that all ranks have taken."""
        return min((rank.num_steps for rank in self.decisions.values()), default=0)


def _ignore_others(folder: str, names: list[str]) -> list[str]:
    """The files of a mail folder that are no messages."""
    return [name for name in names if not name.endswith(SENT)]


@final
class JobRunner:
    """Runs jobs of a program, each batch of them in a scratch folder of its own."""

    def __init__(
        self, process: WarmProcess, request: Request, folder: str, on_event: OnEvent
    ) -> None:
        self._process = process
        self._request = request
        self._folder = Path(folder)
        self._on_event = on_event
        self._numbers = itertools.count()
        self._mail: Path | None = None  # of the last run

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the program's world."""
        return self._request.num_nodes * self._request.num_per_node

    def run(
        self,
        ranks: Iterable[int],
        changes: Sequence[Change],
        *,
        in_lockstep: bool = False,
        group_inputs: Mapping[int, tuple[GroupInputs, ...]] | None = None,
        num_steps: int | None = None,
        max_ops: int = 0,
        lanes: Lanes | None = None,
    ) -> tuple[Path, list[JobEnded]]:
        """Run the program as these ranks; returns the scratch folder, and how each has ended."""
        number = next(self._numbers)
        scratch = self._folder / f"run{number}"
        scratch.mkdir()
        jobs = tuple(Job(rank=rank, instrument=CALLS) for rank in ranks)
        address = f"\0{self._folder.name}-{number}"
        request = replace(
            self._request,
            scratch=str(scratch),
            jobs=jobs,
            num_parallel=len(jobs) if in_lockstep else self._request.num_parallel,
            has_data=in_lockstep,
            lockstep=address if in_lockstep else "",
            changes=tuple(changes),
            group_inputs=dict(group_inputs or {}),
            num_steps=num_steps or self._request.num_steps,
            max_ops=max_ops,
            lanes=lanes,
            is_shown=number == 0,
        )
        return scratch, self._run_with_mail(request)

    def _run_with_mail(self, request: Request) -> list[JobEnded]:
        """Run a request; with lanes, ranks find what these have sent in the last run."""
        mail = Path(request.scratch, MAIL)
        if request.lanes is not None and self._mail is not None:
            shutil.copytree(self._mail, mail, ignore=_ignore_others)
        ended = self._process.run(request, self._on_event)
        self._mail = mail
        return ended


def read_decisions(scratch: Path, ended: Iterable[JobEnded]) -> dict[int, Decisions]:
    """The decisions of each rank whose process could save them."""
    decisions = {}
    for job_ended in ended:
        path = scratch / f"{job_ended.job.stem}.{DECISIONS}"
        if path.exists():
            decisions[job_ended.job.rank] = msgspec.json.decode(path.read_bytes(), type=Decisions)
    return decisions


def explain_failures(ended: Sequence[JobEnded]) -> str | None:
    """Why ranks have failed, in a sentence for each way; None if none has."""
    return " ".join(RunResult(None, ended).failures) or None


@final
class LockstepRanks:
    """All ranks of a program, with data, each of which waits for the others at each collective."""

    def __init__(self, runner: JobRunner) -> None:
        self._runner = runner

    def run(self, changes: Sequence[Change] = ()) -> RanksRun:
        """Run all ranks."""
        ranks = range(self._runner.num_ranks)
        scratch, ended = self._runner.run(ranks, changes, in_lockstep=True)
        path = scratch / OUTCOME
        outcome = Outcome("failed")
        if path.exists():
            outcome = msgspec.json.decode(path.read_bytes(), type=Outcome)
        decisions = read_decisions(scratch, ended)
        has_diverged = outcome.reason in ("mismatch", "stuck")
        recording = join_jobs(str(scratch), ended)
        failure = None
        if any(job.reason is Reason.WAITED for job in ended) and recording is not None:
            has_diverged = bool(match_ranks(recording))
        if outcome.reason == "failed" and not has_diverged:
            failure = explain_failures(ended) or outcome.failure or "a process died"
        return RanksRun(
            recording,
            decisions,
            has_diverged,
            max((index for rank in decisions.values() for index in rank.changed), default=None),
            failure,
        )
