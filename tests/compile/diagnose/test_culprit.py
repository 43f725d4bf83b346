"""The search, with a worker that dies, sleeps or cannot answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import diagnosed_models as models
from home_workers import HomeWorkers
from shardscope.compile.diagnose.at_bench import Piece
from shardscope.compile.diagnose.capture import capture
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.culprit import Culprit, Found
from shardscope.compile.diagnose.outcome import Outcome
from shardscope.compile.diagnose.progress import Teller
from shardscope.compile.diagnose.queries import Patience, Queries
from shardscope.errors import CompileError
from shardscope.record import Condition, Diagnosis, Phase, Stage


@pytest.fixture
def workers() -> HomeWorkers:
    return HomeWorkers()


def ask(workers: HomeWorkers, backend: Any) -> Queries:
    """Queries about the only graph of a function."""
    queries = Queries(workers, Compiler(backend), Patience(60.0))  # type: ignore[arg-type]
    (fragment,) = capture(models.deep, (torch.ones(4),), {}).fragments
    queries.load(0, fragment)
    return queries


def search(queries: Queries, backend: Any, *, budget: int = 100) -> Found:
    whole = queries.ask(Piece(0))
    culprit = Culprit(queries, Compiler(backend), Teller(None, budget), budget=budget)
    begun = Diagnosis(rank=0, target="deep", backend="", condition=whole.condition, fact="")
    return culprit.find(begun, 0, queries._loaded[0], whole)


def test_a_crash_is_traced_to_its_op_by_workers_that_die(workers: HomeWorkers) -> None:
    queries = ask(workers, models.crashes)
    found = search(queries, models.crashes)
    one = found.diagnosis
    assert (one.condition, one.stage, one.phase) == (
        Condition.CRASH,
        Stage.BACKEND,
        Phase.FORWARD,
    )
    assert one.fact == "the process died (SIGSEGV) while running forward"
    assert one.error == "SIGSEGV"
    assert [suspect.op for suspect in one.suspects] == ["torch.relu"]
    assert one.is_minimal
    assert workers.num_started > 2
    assert queries.last_phase == "running"


def test_a_hang_is_traced_to_its_op_with_less_patience_from_then_on(workers: HomeWorkers) -> None:
    queries = ask(workers, models.sleeps)
    at_first = queries.run_s
    found = search(queries, models.sleeps)
    assert (found.diagnosis.condition, found.diagnosis.is_minimal) == (Condition.HANG, True)
    assert "running forward made no progress for" in found.diagnosis.fact
    assert [suspect.op for suspect in found.diagnosis.suspects] == ["torch.relu"]
    assert queries.run_s < at_first


def test_each_piece_is_asked_about_once(workers: HomeWorkers) -> None:
    queries = ask(workers, models.Adds("relu"))
    loaded = queries._loaded[0]
    first = queries.ask(Piece(0))
    assert queries.ask(Piece(0, frozenset(loaded.ops))) is first
    assert queries.num_calls == 1
    assert workers.calls.count("check") == 1


def test_pieces_that_cannot_be_judged_are_neither_right_nor_wrong(
    workers: HomeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = ask(workers, models.Adds("relu"))
    queries.ask(Piece(0))
    original = Queries.ask

    def refuse_halves(self: Queries, piece: Piece) -> Outcome:
        if piece.keep is not None and len(piece.keep) in (3, 6):
            raise CompileError("without a compiler it fails as well")
        return original(self, piece)

    monkeypatch.setattr(Queries, "ask", refuse_halves)
    found = search(queries, models.Adds("relu"))
    assert [suspect.op for suspect in found.diagnosis.suspects] == ["torch.relu"]


def test_a_stage_that_cannot_be_found_is_a_note(
    workers: HomeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise CompileError("no way")

    monkeypatch.setattr("shardscope.compile.diagnose.culprit.locate_stage_by", refuse)
    found = search(ask(workers, models.Adds("relu")), models.Adds("relu"))
    assert found.diagnosis.stage is None
    assert found.diagnosis.notes == ("Finding the stage failed (no way).",)
