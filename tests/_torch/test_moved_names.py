"""A torch that has moved a private name costs one feature, and never the package or the step."""

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
from shardscope._torch.kernel_doors import kernel_doors
from shardscope._torch.private import (
    find_class,
    find_code,
    find_exception,
    find_name,
    moved_names_explained,
    require,
)
from shardscope.comm import run
from shardscope.errors import ShardscopeError, TorchVersionError
from shardscope.version import TESTED_TORCH
from small_models import Block, batch

NOWHERE = "torch._nowhere.at_all"


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    """What became of a traced step in torches that lack one name each, or all of them, or none."""
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


def test_every_public_name_can_be_imported_without_a_single_private_one(
    traced: dict[str, Any],
) -> None:
    assert len(traced["names"]) > 100
    assert traced["imports"] == []


def test_a_step_goes_on_in_a_torch_without_any_of_the_names(traced: dict[str, Any]) -> None:
    assert traced["all"]["is_same_step"]
    assert traced["all"]["collectives"] == []
    assert any("some are not recorded" in fact for fact in traced["all"]["gaps"])


def test_a_name_that_moved_is_a_gap_and_changes_no_step(traced: dict[str, Any]) -> None:
    whole = traced["none"]
    assert whole["is_same_step"]
    assert whole["gaps"] == []
    assert len(whole["collectives"]) == 2
    assert len(traced["each"]) > 40
    for name, result in traced["each"].items():
        assert result.get("is_same_step"), (name, result)
        is_whole = result["collectives"] == whole["collectives"]
        assert is_whole or any(name in gap for gap in result["gaps"]), name


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
def test_a_name_that_only_details_need_costs_no_collective(
    traced: dict[str, Any], name: str
) -> None:
    result = traced["each"][name]
    assert result["collectives"] == traced["none"]["collectives"]
    assert [name in gap for gap in result["gaps"]] == [True]


@pytest.fixture
def nothing_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are looked up in a test are forgotten after it."""
    monkeypatch.setattr(private, "_missing", dict(private._missing))
    monkeypatch.setattr(private, "_needs", dict(private._needs))


@pytest.mark.usefixtures("nothing_missing")
def test_whatever_uses_a_missing_name_says_what_is_missing_and_what_to_do() -> None:
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
def test_a_simulated_world_without_what_it_needs_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_groups = find_name(NOWHERE, "make a process group of any size")
    monkeypatch.setattr("shardscope._torch.simulated_group._FAKE_GROUPS", fake_groups)
    with pytest.raises(TorchVersionError, match="needs to make a process group"):
        simulate(mesh={"dp": 2}).__enter__()
    assert not torch.distributed.is_initialized()


def describe() -> None:
    run.describe_run(0, 1, (), instrument="trace")


@pytest.mark.parametrize("version", ["2.16.0", "3.0.1+cu140"])
def test_an_untested_torch_is_warned_of_once_when_an_instrument_is_used(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(private, "_has_warned", False)
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(UserWarning, match=r"was tested with torch 2.11, .* and this is torch") as w:
        describe()
    assert [str(one.filename) for one in w] == [__file__]
    describe()


def test_a_run_whose_warnings_are_errors_goes_on_in_an_untested_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private, "_has_warned", False)
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        describe()
    assert private._has_warned


@pytest.mark.parametrize("version", [*TESTED_TORCH, "2.12.1", f"{TESTED_TORCH[-1]}.9+cpu"])
def test_tested_versions_and_those_between_are_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(private, "_has_warned", False)
    monkeypatch.setattr(torch, "__version__", version)
    describe()  # a warning would be an error
    assert not private._has_warned


class Moving:
    """An object of torch's that lost the attribute `_old`."""

    def read(self) -> Any:
        code = compile("def read(found): return found._old", "shim.py", "exec")
        shim: dict[str, Any] = {"__name__": "shardscope._torch.some_shim"}
        exec(code, shim)
        return shim["read"](self)


SENTENCE = (
    r"torch \S+ has no _old, which shardscope \S+ needs to use shardscope._torch.some_shim. Use a "
    r"torch that it was tested with"
)


def test_an_attribute_that_torch_moved_is_one_sentence_from_every_function() -> None:
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


def test_errors_of_users_and_public_names_are_not_taken_for_moved_names() -> None:
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
def test_names_that_are_reached_late_are_told_however_they_are_reached(
    line: str, name: str
) -> None:
    with (
        pytest.raises(TorchVersionError, match=rf"has no {name}, which .*_torch\.some_shim\."),
        moved_names_explained(),
    ):
        exec(compile(line, "shim.py", "exec"), {"__name__": "shardscope._torch.some_shim"})


@pytest.mark.usefixtures("nothing_missing")
def test_a_world_is_simulated_where_some_collectives_cannot_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = find_name(NOWHERE, "intercept collectives before their kernels run")
    monkeypatch.setattr("shardscope._torch.kernel_doors._NEEDED", (needed,))
    with simulate(mesh={"dp": 2}):
        model = Block()
        with trace(model) as t:
            torch.distributed.all_reduce(model(batch()))
    assert {str(c.kind) for c in t.recording.collectives} == {"all_reduce"}
    assert any("some are not recorded" in gap.fact for gap in t.recording.gaps)


def test_a_trace_goes_on_where_torchs_libraries_cannot_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with simulate(mesh={"dp": 2}):
        with monkeypatch.context() as patch:
            patch.delattr(torch.library.Library, "_destroy")
            with pytest.raises(TorchVersionError, match="_destroy"), moved_names_explained():
                kernel_doors().__enter__()
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
def test_a_moved_name_of_a_detail_costs_a_simulated_world_that_detail_and_is_a_gap(
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
