"""The search, with a worker that dies, sleeps or cannot answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import diagnosed_models as models
from home_workers import HomeWorkers
from shardscope.compile.diagnose.accuracy.check_result import CheckResult
from shardscope.compile.diagnose.minimize import MinimizedFailure, Minimizer
from shardscope.compile.diagnose.subgraph.subgraph import Compiler
from shardscope.compile.diagnose.target import capture
from shardscope.compile.diagnose.worker_client import ProgressReporter, Timeouts, WorkerClient
from shardscope.compile.diagnose.worker_tasks import OpSubset
from shardscope.errors import CompileError
from shardscope.record import Condition, Diagnosis, Phase, Stage


@pytest.fixture
def workers() -> HomeWorkers:
    return HomeWorkers()


def ask(workers: HomeWorkers, backend: Any) -> WorkerClient:
    """Queries about the only graph of a function."""
    client = WorkerClient(workers, Compiler(backend), Timeouts(60.0))  # type: ignore[arg-type]
    (subgraph,) = capture(models.deep, (torch.ones(4),), {}).subgraphs
    client.load(0, subgraph)
    return client


def search(client: WorkerClient, backend: Any, *, budget: int = 100) -> MinimizedFailure:
    graph_outcome = client.check(OpSubset(0))
    minimizer = Minimizer(client, Compiler(backend), ProgressReporter(None, budget), budget=budget)
    empty_diagnosis = Diagnosis(
        rank=0, target="deep", backend="", condition=graph_outcome.condition, fact=""
    )
    return minimizer.find(empty_diagnosis, 0, client._loaded[0], graph_outcome)


def test_a_crash_is_traced_to_its_op_by_workers_that_die(workers: HomeWorkers) -> None:
    client = ask(workers, models.crashes)
    failure = search(client, models.crashes)
    diagnosis = failure.diagnosis
    assert (diagnosis.condition, diagnosis.stage, diagnosis.phase) == (
        Condition.CRASH,
        Stage.BACKEND,
        Phase.FORWARD,
    )
    assert diagnosis.fact == "the process died (SIGSEGV) while running forward"
    assert diagnosis.error == "SIGSEGV"
    assert [suspect.op for suspect in diagnosis.suspects] == ["torch.relu"]
    assert diagnosis.is_minimal
    assert workers.num_started > 2
    assert client.last_phase == "running"


def test_a_hang_is_traced_to_its_op_with_a_shorter_timeout_from_then_on(
    workers: HomeWorkers,
) -> None:
    client = ask(workers, models.sleeps)
    at_first = client.run_s
    failure = search(client, models.sleeps)
    assert (failure.diagnosis.condition, failure.diagnosis.is_minimal) == (Condition.HANG, True)
    assert "running forward made no progress for" in failure.diagnosis.fact
    assert [suspect.op for suspect in failure.diagnosis.suspects] == ["torch.relu"]
    assert client.run_s < at_first


def test_each_subset_is_checked_once(workers: HomeWorkers) -> None:
    client = ask(workers, models.Adds("relu"))
    loaded = client._loaded[0]
    first = client.check(OpSubset(0))
    assert client.check(OpSubset(0, frozenset(loaded.ops))) is first
    assert client.num_calls == 1
    assert workers.calls.count("check_ops") == 1


def test_subsets_that_cannot_be_checked_are_neither_right_nor_wrong(
    workers: HomeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ask(workers, models.Adds("relu"))
    client.check(OpSubset(0))
    original = WorkerClient.check

    def refuse_halves(self: WorkerClient, subset: OpSubset) -> CheckResult:
        if subset.keep is not None and len(subset.keep) in (3, 6):
            raise CompileError("without a compiler it fails as well")
        return original(self, subset)

    monkeypatch.setattr(WorkerClient, "check", refuse_halves)
    failure = search(client, models.Adds("relu"))
    assert [suspect.op for suspect in failure.diagnosis.suspects] == ["torch.relu"]


def test_a_stage_that_cannot_be_found_is_a_note(
    workers: HomeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise CompileError("no way")

    monkeypatch.setattr("shardscope.compile.diagnose.minimize.locate_stage", refuse)
    failure = search(ask(workers, models.Adds("relu")), models.Adds("relu"))
    assert failure.diagnosis.stage is None
    assert failure.diagnosis.notes == ("Finding the stage failed (no way).",)
