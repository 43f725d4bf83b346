"""`check(script)`: whether the ranks of a program would hang, before it is launched."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import final

from msgspec.structs import replace

from shardscope.check.findings import explain_divergence, explain_shift
from shardscope.check.runs import LockstepRanks, LockstepRun
from shardscope.check.shifts import find_shift
from shardscope.check.variations import Plan, PlannedVariation, schedule
from shardscope.errors import LaunchError
from shardscope.launch.api import RunResult, check_cluster
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

_PREFIX = "shardscope-check-"
_MAX_STEPS = 50
_MAX_RUNS = 12
_MAX_FINDINGS = 5


@final
class CheckResult:
    """What `check` returns: a `recording` with its findings and with what was tried."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording


def check(
    script: str | Path,
    *args: str,
    num_nodes: int = 1,
    num_per_node: int = 8,
    steps: int = _MAX_STEPS,
    gpu: str = "h200",
    is_module: bool = False,
    on_event: OnEvent = lambda event: None,
) -> CheckResult:
    program = Program(os.fspath(script), args, is_module)
    program.check()
    cluster = Cluster(num_nodes, num_per_node)
    check_cluster(cluster, gpu=gpu, steps=steps, data=True, real=False)
    with tempfile.TemporaryDirectory(
        prefix="shardscope-check-", ignore_cleanup_errors=True
    ) as folder:
        request = Request(
            script=program.script,
            args=args,
            is_module=is_module,
            num_nodes=num_nodes,
            num_per_node=num_per_node,
            num_steps=steps,
            gpu=gpu,
            scratch=folder,
            jobs=(),
            num_parallel=cluster.size,
        )
        interruption = Interruption()
        with interruption.watched(), WarmProcess(interruption) as process:
            recording = _Check(LockstepRanks(process, request, folder, on_event), cluster).run()
        if interruption.signal is not None:
            raise KeyboardInterrupt
    return CheckResult(replace(recording, run=replace(recording.run, command=program.command)))


@final
class _Check:
    def __init__(self, ranks: LockstepRanks, cluster: Cluster) -> None:
        self._ranks = ranks
        self._cluster = cluster
        self._findings: list[Finding] = []
        self._tried: list[Variation] = []

    def run(self) -> Recording:
        first = self._ranks.run()
        if first.outcome.reason == "failed" or first.recording is None:
            failures = RunResult(first.recording, first.ended).failures
            raise LaunchError("; ".join(failures) or f"rank failed: {first.outcome}")
        recording = first.recording
        if first.has_diverged:
            self._add(first, None)
        else:
            self._vary(first)
        check_record = Check(
            world_size=self._cluster.size,
            roles=tuple(Role(rank=r, ranks=compress_ranks([r])) for r in range(self._cluster.size)),
            num_steps=first.num_steps,
            is_complete=not recording.stops,
            has_data=True,
            variations=tuple(self._tried),
        )
        run = replace(recording.run, instruments=("check",))
        return replace(recording, run=run, findings=tuple(self._findings), checks=(check_record,))

    def _add(self, run: LockstepRun, variation: PlannedVariation | None) -> None:
        assert run.recording is not None
        finding = explain_divergence(run.recording, variation)
        if finding is not None:
            self._findings.append(finding)

    def _vary(self, first: LockstepRun) -> None:
        """Run the ranks again with variations, several in each run, until all are tried."""
        plan = Plan(first.decisions)
        waiting = list(plan.list_variations())
        for _ in range(_MAX_RUNS):
            chosen, changes = schedule(waiting, plan, first.num_steps)
            if not chosen or len(self._findings) >= _MAX_FINDINGS:
                break
            run = self._ranks.run(changes)
            reached = self._judge(first, run, chosen, changes)
            waiting = [variation for variation in waiting if variation not in chosen[:reached]]
        for variation in waiting:
            self._note(variation, CheckOutcome.NOT_TRIED, "")

    def _judge(
        self,
        first: LockstepRun,
        run: LockstepRun,
        chosen: Sequence[PlannedVariation],
        changes: Sequence[Change],
    ) -> int:
        """Note what came of the variations of a run; returns how many it has tried."""
        last = run.find_last_change()
        if last is None:
            for variation in chosen:
                self._note(variation, CheckOutcome.NOT_TRIED, run.outcome.failure or "not reached")
            return len(chosen)
        for index in range(last + 1):
            variation, change = chosen[index], changes[index]
            shift = find_shift(first.decisions, run.decisions, run.recording, change)
            is_last = index == last
            if shift is not None:
                self._findings.append(explain_shift(shift, variation))
                self._note(variation, CheckOutcome.DIVERGED, "")
                return index + 1
            if is_last and run.has_diverged:
                self._add(run, variation)
                self._note(variation, CheckOutcome.DIVERGED, "")
            elif is_last and run.outcome.reason == "failed":
                self._note(variation, CheckOutcome.RAISED, run.outcome.failure or "")
            else:
                self._note(variation, CheckOutcome.SAME, "")
        return last + 1

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
