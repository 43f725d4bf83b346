"""`check(script)`: whether the ranks of a program would hang, before it is launched."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from msgspec.structs import replace

from shardscope.checks.findings import differ_in_size_only, explain_divergence, explain_shift
from shardscope.checks.roles import FEW_RANKS
from shardscope.checks.runs import JobRunner, LockstepRanks, RanksRun
from shardscope.checks.shifts import find_shift
from shardscope.checks.simulated import SimulatedRanks
from shardscope.checks.variations import Plan, PlannedVariation, schedule
from shardscope.errors import LaunchError
from shardscope.launch.api import MAX_DATA_RANKS, check_cluster
from shardscope.launch.cluster import Cluster
from shardscope.launch.decisions import Change
from shardscope.launch.program import Program
from shardscope.launch.request import Request
from shardscope.launch.warm_process import Interruption, OnEvent, WarmProcess
from shardscope.record import (
    Check,
    CheckOutcome,
    Finding,
    Recording,
    Role,
    Variation,
    compress_ranks,
)
from shardscope.record.merge import MISSING

_PREFIX = "shardscope-check-"
_MAX_STEPS = 50
_MAX_FLOPS, _MAX_BYTES = 4e9, 4e9  # of a step of all ranks that are run with data
_MAX_RUNS = 24
_MAX_FINDINGS = 5


@final
class CheckResult:
    """What `check` returns: a `recording` with its findings and with what was tried.

    Examples:
        >>> result = check("train.py", num_per_node=4)
        >>> [finding.rule for finding in result.findings]
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def __repr__(self) -> str:
        return f"CheckResult({self.recording!r})"

    def _repr_html_(self) -> str:
        """The page of the recording, for notebooks."""
        return self.recording._repr_html_()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Where ranks diverge, or may: empty if nothing was found."""
        return self.recording.findings


def check(
    script: str | Path,
    *args: str,
    num_nodes: int = 1,
    num_per_node: int = 8,
    steps: int | None = None,
    gpu: str = "h200",
    is_module: bool = False,
    data: bool | None = None,
    variations: bool = True,
    on_event: OnEvent = lambda event: None,
) -> CheckResult:
    """Find out before launch whether the ranks of a program would wait for each other forever.

    Runs an unmodified training program as several ranks, without GPUs, and compares the collectives
    that they issue in each group. Then it runs them again as if some ranks saw something else where
    the program decides: another batch, NaN in a loss, an exception, a later clock.

    Args:
        script: The program that torchrun would start; with `is_module` a module's name.
        *args: The program's arguments.
        num_nodes: The number of nodes.
        num_per_node: The number of processes, each with a GPU, per node.
        steps: Training steps after which the program is ended; by default small programs run to
            their end.
        gpu: The GPU of the nodes: h200, h100, a100 or b200.
        is_module: Whether `script` is a module's name, as for `python -m`.
        data: Whether all ranks run with data on this machine, in lockstep, or one of each role
            without; by default with data if there are few ranks that compute little.
        variations: Whether to run the program again as if some ranks saw something else.
        on_event: Called when a rank has finished a step and when its process has ended.

    Examples:
        >>> result = check("train.py", "--lr", "3e-4", num_nodes=2)
        >>> [finding.fact for finding in result.findings]
    """
    program = Program(os.fspath(script), args, is_module)
    program.check()
    cluster = Cluster(num_nodes, num_per_node)
    check_cluster(cluster, gpu=gpu, steps=steps or 1, data=bool(data), real=False)
    interruption = Interruption()
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder,
        interruption.watched(),
        WarmProcess(interruption) as process,
    ):
        request = Request(
            script=program.script,
            args=args,
            is_module=is_module,
            num_nodes=num_nodes,
            num_per_node=num_per_node,
            num_steps=steps or _MAX_STEPS,
            gpu=gpu,
            scratch=folder,
            jobs=(),
            num_parallel=os.cpu_count() or 1,
        )
        runner = JobRunner(process, request, folder, on_event)
        ranks = LockstepRanks(runner) if data else _choose_ranks(runner, data)
        recording = _Check(ranks, cluster).run(is_varied=variations)
    if interruption.signal is not None:
        raise KeyboardInterrupt
    return CheckResult(replace(recording, run=replace(recording.run, command=program.command)))


def _choose_ranks(runner: JobRunner, data: bool | None) -> LockstepRanks | SimulatedRanks:
    """Ranks with data if there are few and they compute little, or if they need it; else without.

    With `data` False, always without.
    """
    simulated = SimulatedRanks(runner)
    probed = simulated.probe()
    if data is False or runner.num_ranks > MAX_DATA_RANKS:
        if isinstance(probed, str):
            raise LaunchError(probed)
        return simulated
    if isinstance(probed, str):
        return LockstepRanks(runner)
    work = max(probed.num_flops / _MAX_FLOPS, probed.num_bytes / _MAX_BYTES)
    is_small = work * runner.num_ranks <= max(1, probed.num_steps)
    return LockstepRanks(runner) if is_small and runner.num_ranks <= FEW_RANKS else simulated


def _list_made(run: RanksRun) -> dict[int, int]:
    """The changes that were made, with how many collectives had been issued before, at least."""
    made: dict[int, int] = {}
    for rank in run.decisions.values():
        for index, num_calls in rank.changed.items():
            made[index] = min(num_calls, made.get(index, num_calls))
    return made


@final
class _Check:
    def __init__(self, ranks: LockstepRanks | SimulatedRanks, cluster: Cluster) -> None:
        self._ranks = ranks
        self._cluster = cluster
        self._findings: list[Finding] = []
        self._tried: list[Variation] = []

    def run(self, *, is_varied: bool) -> Recording:
        first = self._ranks.run()
        recording = first.recording
        if first.failure is not None or recording is None:
            raise LaunchError(first.failure or "The program has left no recording.")
        if first.has_diverged:
            self._add(explain_divergence(first, None))
        elif is_varied:
            self._vary(first)
        check_record = Check(
            world_size=self._cluster.size,
            roles=tuple(self._list_roles(first)),
            num_steps=first.num_steps,
            is_complete=not recording.stops,
            has_data=isinstance(self._ranks, LockstepRanks),
            is_varied=is_varied and not first.has_diverged,
            variations=tuple(self._tried),
        )
        run = replace(recording.run, instruments=("check",))
        gaps = tuple(gap for gap in recording.gaps if gap.place not in ("step", MISSING))
        return Recording(run=run, gaps=gaps, findings=tuple(self._findings), checks=(check_record,))

    def _list_roles(self, first: RanksRun) -> Iterator[Role]:
        """The ranks that were run, each with those that it stands for."""
        represented = {rank: [rank] for rank in first.decisions}
        if isinstance(self._ranks, SimulatedRanks) and self._ranks.roles is not None:
            represented = self._ranks.roles.list_represented(self._cluster.size)
        for rank in sorted(first.decisions):
            yield Role(rank=rank, ranks=compress_ranks(represented.get(rank, [rank])))

    def _add(self, finding: Finding | None) -> None:
        """Add a finding if there is one, unless another names the same line and remedy."""
        known = {(f.source, f.remedy) for f in self._findings}
        if finding is not None and (finding.source, finding.remedy) not in known:
            self._findings.append(finding)

    def _vary(self, first: RanksRun) -> None:
        """Run the ranks again with variations, several in each run, until all are tried."""
        plan = Plan(first.decisions)
        waiting = list(plan.list_variations())
        for _ in range(_MAX_RUNS):
            chosen, changes = schedule(waiting, plan)
            if not chosen or len(self._findings) >= _MAX_FINDINGS:
                break
            tried = self._try(first, chosen, changes)
            waiting = [variation for variation in waiting if variation not in tried]
        for variation in waiting:
            self._note(variation, CheckOutcome.NOT_TRIED, "")

    def _try(
        self, first: RanksRun, chosen: Sequence[PlannedVariation], changes: Sequence[Change]
    ) -> list[PlannedVariation]:
        """Run the ranks with changes; returns the variations of which the outcome is known."""
        run = self._ranks.run(changes)
        if not run.is_settled:
            return self._try_alone(first, chosen, changes)
        made = sorted(_list_made(run), key=lambda index: (_list_made(run)[index], index))
        if not made:
            for variation in chosen:
                self._note(variation, CheckOutcome.NOT_TRIED, run.failure or "not reached")
            return list(chosen)
        cause = self._find_cause(first, run, changes, made)
        tried = made if cause is None else made[: made.index(cause[0]) + 1]
        for index in tried:
            variation = chosen[index]
            if cause is not None and index == cause[0]:
                finding = self._explain(cause[1], first, variation, changes[index])
                outcome = CheckOutcome.SAME if finding is None else CheckOutcome.DIVERGED
                self._note(variation, outcome, "" if finding else "sizes differ")
                self._add(finding)
            elif run.failure is not None and index == made[-1]:
                self._note(variation, CheckOutcome.RAISED, run.failure)
            else:
                self._note(variation, CheckOutcome.SAME, "")
        return [chosen[index] for index in tried]

    def _try_alone(
        self, first: RanksRun, chosen: Sequence[PlannedVariation], changes: Sequence[Change]
    ) -> list[PlannedVariation]:
        """Try the first change only; if ranks do not settle then either, nothing is known of it."""
        if len(chosen) > 1:
            return self._try(first, chosen[:1], changes[:1])
        self._note(chosen[0], CheckOutcome.NOT_TRIED, "what ranks send each other does not settle")
        return list(chosen)

    def _find_cause(
        self, first: RanksRun, run: RanksRun, changes: Sequence[Change], made: Sequence[int]
    ) -> tuple[int, RanksRun] | None:
        """The change after which ranks have diverged, and a run that shows it; None if none did."""
        shifting = (
            index
            for index in made
            if find_shift(first.decisions, run.decisions, run.recording, changes[index])
        )
        shifted = next(shifting, None)
        if shifted is None and not run.has_diverged:
            return None
        if len(made) == 1:
            return made[0], run
        # Each by itself: what was changed later may be the cause, or what was changed before.
        for index in reversed(made) if shifted is None else [shifted]:
            single = self._ranks.run([changes[index]])
            shift = find_shift(first.decisions, single.decisions, single.recording, changes[index])
            if single.is_settled and (single.has_diverged or shift is not None):
                return index, single
        return None

    def _explain(
        self, run: RanksRun, first: RanksRun, variation: PlannedVariation, change: Change
    ) -> Finding | None:
        """The finding about ranks that have diverged; None if only sizes differ, as they may."""
        shift = find_shift(first.decisions, run.decisions, run.recording, change)
        if shift is not None:
            return explain_shift(shift, run, variation)
        if variation.is_of_lengths and differ_in_size_only(run, first):
            return None
        return explain_divergence(run, variation)

    def _note(self, variation: PlannedVariation, outcome: CheckOutcome, detail: str) -> None:
        self._tried.append(
            Variation(
                condition=variation.condition,
                ranks=compress_ranks(variation.ranks),
                outcome=outcome,
                source=variation.source,
                detail=detail,
            )
        )
