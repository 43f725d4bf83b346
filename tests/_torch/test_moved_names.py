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

import moved_names
from shardscope import audit, simulate, trace
from shardscope._torch import private
from shardscope._torch.private import find_class, find_code, find_exception, find_name, require
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
