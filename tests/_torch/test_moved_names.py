"""A private name missing in torch disables one feature, never the package or the user's step."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining.schedules

import moved_names
from shardscope import audit, coverage, memory, parallelize, parity, simulate, trace
from shardscope._torch import private
from shardscope._torch.collectives.hooks import kernel_hooks
from shardscope._torch.private import (
    find_class,
    find_code,
    find_exception,
    find_name,
    moved_names_explained,
    require,
)
from shardscope.attribution import program_records as run
from shardscope.errors import ShardscopeError, TorchVersionError
from shardscope.version import TESTED_TORCH
from small_models import Block, batch

NOWHERE = "torch._nowhere.at_all"


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    """Results of a traced step with each name missing, with all missing, and with none."""
    done = subprocess.run(
        [sys.executable, str(Path(moved_names.__file__))],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


def test_every_public_name_can_be_imported_without_any_private_name(
    traced: dict[str, Any],
) -> None:
    assert len(traced["names"]) > 100
    assert traced["imports"] == []


def test_a_step_runs_without_any_of_the_private_names(traced: dict[str, Any]) -> None:
    assert traced["all"]["is_same_step"]
    assert traced["all"]["collectives"] == []
    assert any("some are not recorded" in fact for fact in traced["all"]["gaps"])


def test_a_missing_name_is_a_gap_and_does_not_change_the_step(traced: dict[str, Any]) -> None:
    complete = traced["none"]
    assert complete["is_same_step"]
    assert complete["gaps"] == []
    assert len(complete["collectives"]) == 2
    assert len(traced["each"]) > 40
    for name, result in traced["each"].items():
        assert result.get("is_same_step"), (name, result)
        is_complete = result["collectives"] == complete["collectives"]
        assert is_complete or any(name in gap for gap in result["gaps"]), name


@pytest.mark.parametrize(
    "name",
    [
        "torch._C._dispatch_get_all_op_names",
        "torch._dynamo.OptimizedModule",
        "torch._ops.OpOverload",
        "torch.utils.checkpoint",
        "torch.distributed.fsdp._runtime_utils._unshard",
    ],
)
def test_a_missing_name_of_a_detail_loses_no_collective(traced: dict[str, Any], name: str) -> None:
    result = traced["each"][name]
    assert result["collectives"] == traced["none"]["collectives"]
    assert [name in gap for gap in result["gaps"]] == [True]


@pytest.fixture
def nothing_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo lookups made in a test after it."""
    monkeypatch.setattr(private, "_missing", dict(private._missing))
    monkeypatch.setattr(private, "_needs", dict(private._needs))


@pytest.mark.usefixtures("nothing_missing")
def test_using_a_missing_name_raises_an_error_with_a_remedy() -> None:
    missing: Any = find_name(NOWHERE, "find things")
    sentence = (
        rf"torch \S+ has no {NOWHERE}, which shardscope \S+ needs to find things. Use a torch that "
        rf"it was tested with \(.*{TESTED_TORCH[-1]}\), or a newer shardscope."
    )

    class Sub(missing):  # type: ignore[misc]
        pass

    for use in (
        lambda: missing(),
        lambda: missing.attribute,
        lambda: isinstance(1, missing),
        lambda: isinstance(1, int | missing),
        lambda: missing.__enter__(),
        lambda: Sub(),
        lambda: require(1, missing),
    ):
        with pytest.raises(TorchVersionError, match=sentence):
            use()
    assert issubclass(TorchVersionError, ShardscopeError)
    assert {missing: 1}[missing] == 1


@pytest.mark.usefixtures("nothing_missing")
def test_missing_classes_have_no_instances_and_missing_exceptions_are_never_raised() -> None:
    assert not isinstance(1, find_class(NOWHERE, "know things"))
    with pytest.raises(ZeroDivisionError), suppress(find_exception(NOWHERE, "catch things")):
        raise ZeroDivisionError
    assert find_code(NOWHERE, "see things") is None
    assert find_code("torch.utils.checkpoint", "see things", inner="nowhere") is None
    assert find_code("torch.optim.Optimizer.zero_grad", "see", variables=("nowhere",)) is None
    assert len([fact for fact in private.missing_names() if "nowhere" in fact]) == 3


@pytest.mark.usefixtures("nothing_missing")
def test_a_missing_name_is_a_gap_in_every_recording() -> None:
    find_name(NOWHERE, "find things")
    with simulate(mesh={"dp": 2}):
        model = Block()
        with trace(model) as t:
            model(batch())
        for recording in (t.recording, audit(model)):
            assert [gap.place for gap in recording.gaps] == ["torch"]
            assert f"has no {NOWHERE}" in recording.gaps[0].fact


@pytest.mark.usefixtures("nothing_missing")
def test_simulate_raises_if_a_name_it_needs_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_groups = find_name(NOWHERE, "make a process group of any size")
    monkeypatch.setattr("shardscope._torch.process_groups.simulated._FAKE_GROUPS", fake_groups)
    with pytest.raises(TorchVersionError, match="needs to make a process group"):
        simulate(mesh={"dp": 2}).__enter__()
    assert not torch.distributed.is_initialized()


def describe() -> None:
    run.describe_run(0, 1, (), instrument="trace")


@pytest.mark.parametrize("version", ["2.16.0", "3.0.1+cu140"])
def test_an_instrument_warns_once_of_an_untested_torch(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(private, "_has_warned", False)
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(UserWarning, match=r"was tested with torch 2.11, .* and this is torch") as w:
        describe()
    assert [str(warning.filename) for warning in w] == [__file__]
    describe()


def test_an_untested_torch_does_not_end_a_run_whose_warnings_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private, "_has_warned", False)
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        describe()
    assert private._has_warned


@pytest.mark.parametrize("version", [*TESTED_TORCH, "2.12.1", f"{TESTED_TORCH[-1]}.9+cpu"])
def test_tested_versions_and_those_between_give_no_warning(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(private, "_has_warned", False)
    monkeypatch.setattr(torch, "__version__", version)
    describe()  # a warning would be an error
    assert not private._has_warned


class Moving:
    """An object of torch without its former attribute `_old`."""

    def read(self) -> Any:
        code = compile("def read(found): return found._old", "shim.py", "exec")
        shim: dict[str, Any] = {"__name__": "shardscope._torch.some_shim"}
        exec(code, shim)
        return shim["read"](self)


SENTENCE = (
    r"torch \S+ has no _old, which shardscope \S+ needs to use shardscope._torch.some_shim. Use a "
    r"torch that it was tested with"
)


def test_every_public_function_explains_a_missing_attribute() -> None:
    class Reading(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Moving().read()
            return x

    model = Reading()
    calls: dict[str, Any] = {
        "coverage": lambda: coverage(model, batch()),
        "memory": lambda: memory(model, lambda: model(batch())),
        "parallelize": lambda: parallelize(model, {"tp": 2}, {}, args=(batch(),)),
        "parity": lambda: parity(model, {"tp": 2}, parallelize=lambda *_: None, inputs=batch()),
    }
    for name, call in calls.items():
        with pytest.raises(TorchVersionError, match=SENTENCE):
            raise AssertionError(f"{name} returned {call()}")
    with pytest.raises(TorchVersionError, match=SENTENCE), simulate(mesh={"dp": 2}):
        Moving().read()
    assert not torch.distributed.is_initialized()


def test_errors_of_user_code_are_not_explained_as_missing_names() -> None:
    def read_own() -> None:
        Moving()._old  # type: ignore[attr-defined]  # noqa: B018

    def import_own() -> None:
        import _nowhere_at_all  # type: ignore[import-not-found]  # noqa: F401

    for read in (read_own, import_own):
        with pytest.raises((AttributeError, ImportError)) as caught, moved_names_explained():
            read()
        assert not isinstance(caught.value, ShardscopeError)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import torch; torch.nn._nowhere", "torch.nn._nowhere"),
        ("import torch; torch.nn.Linear(1, 1)._nowhere", "_nowhere"),
        ("import torch; torch.nn.Linear._nowhere", "_nowhere"),
        ("import torch; torch.ops.aten._nowhere", "_nowhere"),
        ("from torch._dynamo import nowhere", "torch._dynamo.nowhere"),
        ("import torch._nowhere.at_all", "torch._nowhere"),
        ("import importlib; importlib.import_module('torch._nowhere')", "torch._nowhere"),
    ],
)
def test_missing_names_are_explained_however_they_are_used(line: str, name: str) -> None:
    with (
        pytest.raises(TorchVersionError, match=rf"has no {name}, which .*_torch\.some_shim\."),
        moved_names_explained(),
    ):
        exec(compile(line, "shim.py", "exec"), {"__name__": "shardscope._torch.some_shim"})


@pytest.mark.usefixtures("nothing_missing")
def test_simulate_works_where_some_hooks_cannot_be_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = find_name(NOWHERE, "intercept collectives before their kernels run")
    monkeypatch.setattr("shardscope._torch.collectives.hooks._NEEDED", (needed,))
    with simulate(mesh={"dp": 2}):
        model = Block()
        with trace(model) as t:
            torch.distributed.all_reduce(model(batch()))
    assert {str(c.kind) for c in t.recording.collectives} == {"all_reduce"}
    assert any("some are not recorded" in gap.fact for gap in t.recording.gaps)


def test_trace_works_where_libraries_of_torch_cannot_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulate(mesh={"dp": 2}):
        with monkeypatch.context() as patch:
            patch.delattr(torch.library.Library, "_destroy")
            with pytest.raises(TorchVersionError, match="_destroy"), moved_names_explained():
                kernel_hooks().__enter__()
        model = Block()
        with trace(model) as t:
            torch.distributed.all_reduce(model(batch()))
    assert len(t.recording.collectives) == 2


@pytest.mark.usefixtures("nothing_missing")
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.distributed.pipelining.schedules, "_PipelineSchedule"),
        (torch.nn.init, "_no_grad_trunc_normal_"),
    ],
)
def test_a_missing_name_of_a_detail_of_a_simulated_world_is_a_gap(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    monkeypatch.delattr(owner, name)
    with simulate(mesh={"dp": 2}, device="cuda") as world:
        with torch.device("meta"):
            model = Block()
        model = world.materialize(model)
        with trace(model) as t:
            model(batch().to("cuda"))
    assert [str(c.kind) for c in t.recording.collectives] == ["all_reduce"]
    assert [name in gap.fact for gap in t.recording.gaps] == [True]
