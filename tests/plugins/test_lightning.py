"""The callback in a real Lightning trainer: step N, nothing but step N, and no harm."""

from __future__ import annotations

import gc
import pickle
import weakref
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from shardscope import load, simulate, trace
from shardscope.comm.trace import Trace
from shardscope.errors import TraceError
from shardscope.plugins.lightning import ShardscopeCallback
from small_models import Net
from trained_models import is_watched, make_net, said, shard_net

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataload"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint"),
    pytest.mark.filterwarnings("ignore:`ModelCheckpoint"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),  # on purpose: any machine
]


@pytest.fixture(scope="module")
def lab() -> Any:
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    return import_module("lightning_models")


def test_the_step_is_recorded_as_a_plain_trace_of_it_would_be(lab: Any, tmp_path: Path) -> None:
    with simulate(mesh={"dp": 2, "tp": 2}) as world:
        model = lab.Learner(shard_net(make_net(), world))
        lab.fit(model, ShardscopeCallback(3, output=tmp_path / "run.json.gz"))
        recording = load(tmp_path / "run-0.json.gz")
        expected = lab.train_by_hand(
            lab.Learner(shard_net(make_net(), world)), num_steps=3
        ).recording
    assert said(recording) == said(expected)
    assert {collective.owner for collective in recording.collectives} >= {"net.0", "net.0.down"}
    assert recording.gaps == ()
    assert recording.run.world_size == 4
    assert [module.name for module in recording.modules] == [
        module.name for module in expected.modules
    ]
    assert not is_watched()


def test_a_step_is_all_of_its_batches_without_the_validation_between(
    lab: Any, tmp_path: Path
) -> None:
    with simulate(mesh={"dp": 2, "tp": 2}) as world:
        model = lab.Learner(shard_net(make_net(), world))
        callback = ShardscopeCallback(2, output=tmp_path / "{rank}.json")
        options = {"accumulate_grad_batches": 2, "val_check_interval": 1, "max_steps": 3}
        lab.fit(model, callback, validate=True, num_sanity_val_steps=1, **options)
        recording = load(tmp_path / "0.json")
        by_hand = lab.Learner(shard_net(make_net(), world))
        expected = lab.train_by_hand(by_hand, num_steps=2, batches_per_step=2).recording
    assert said(recording) == said(expected)
    assert [collective.kind for collective in recording.collectives].count(
        "reduce_scatter"
    ) == 2 * 2


@pytest.mark.parametrize("package", ["pl", "pytorch_lightning"])
def test_training_is_the_same_to_the_bit_with_and_without(
    lab: Any, tmp_path: Path, package: str
) -> None:
    losses, states = [], []
    for callbacks in ([], [ShardscopeCallback(2, output=tmp_path / "run.json", memory=True)]):
        model = lab.Learner()
        lab.fit(model, *callbacks)
        losses.append(model.losses)
        states.append((torch.get_rng_state().tolist(), [p.tolist() for p in model.parameters()]))
    assert losses[0] == losses[1]
    assert states[0] == states[1]
    assert isinstance(callbacks[0], getattr(lab, package).Callback)
    recording = load(tmp_path / "run.json")
    assert recording.collectives == ()
    assert recording.memory[0].is_live


def test_training_that_raises_leaves_the_step_so_far_and_nothing_behind(
    lab: Any, tmp_path: Path
) -> None:
    with simulate(mesh={"dp": 2}):
        model = lab.Learner(Net(), fail_at=1)
        with pytest.raises(ZeroDivisionError, match="no such batch"):
            lab.fit(model, ShardscopeCallback(2, output=tmp_path / "run-{rank}.json"))
    assert not is_watched()
    recording = load(tmp_path / "run-0.json")
    assert {collective.phase for collective in recording.collectives} == {"forward"}
    assert "it ended early with ZeroDivisionError: no such batch" in recording.gaps[0].fact


def test_our_own_failures_are_warnings_and_training_goes_on(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text("precious")
    with pytest.warns(UserWarning, match=r"step 2 is not recorded.*already exists"):
        trainer = lab.fit(lab.Learner(), ShardscopeCallback(2, output=tmp_path / "run.json"))
    assert trainer.global_step == 4
    assert (tmp_path / "run.json").read_text() == "precious"

    def fail(self: Trace) -> Trace:
        raise RuntimeError("no trace today")

    monkeypatch.setattr(Trace, "__enter__", fail)
    with pytest.warns(UserWarning, match="step 2 is not recorded; training continues: no trace"):
        trainer = lab.fit(lab.Learner(), ShardscopeCallback(2, output=tmp_path / "new.json"))
    assert trainer.global_step == 4


def test_a_step_that_training_does_not_reach_is_a_warning_at_the_end(
    lab: Any, tmp_path: Path
) -> None:
    callback = ShardscopeCallback(9, output=tmp_path / "run.json")
    with pytest.warns(UserWarning, match="step 9 was not recorded, because training ended with st"):
        lab.fit(lab.Learner(), callback)
    assert not (tmp_path / "run.json").exists()
    lab.fit(lab.Learner(), callback, max_steps=10)  # the same callback, in a training that does
    assert (tmp_path / "run.json").exists()


def test_steps_are_the_trainers_own_also_when_it_goes_on_from_a_checkpoint(
    lab: Any, tmp_path: Path
) -> None:
    trainer = lab.fit(lab.Learner(), max_steps=3)
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    past = ShardscopeCallback(2, output=tmp_path / "two.json")
    first, last = (ShardscopeCallback(step, output=tmp_path / f"{step}.json") for step in (4, 5))
    with pytest.warns(UserWarning, match="step 2 was not recorded"):
        lab.fit(lab.Learner(), past, first, last, max_steps=5, ckpt_path=tmp_path / "three.ckpt")
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["4.json", "5.json"]


def test_a_callback_records_once_however_often_it_is_used(lab: Any, tmp_path: Path) -> None:
    callback = ShardscopeCallback(1, output=tmp_path / "run.json")
    lab.fit(lab.Learner(), callback, max_steps=2)
    before = (tmp_path / "run.json").read_bytes()
    lab.fit(lab.Learner(), callback, max_steps=2)
    assert (tmp_path / "run.json").read_bytes() == before
    assert not callback.recorder.is_recording


@pytest.mark.parametrize("step", [3, 4])
def test_with_two_optimizers_a_step_is_recorded_with_its_batch(
    lab: Any, tmp_path: Path, step: int
) -> None:
    with simulate(mesh={"dp": 2, "tp": 2}) as world:
        model = lab.TwoPlayers(shard_net(make_net(), world))
        with trace() as whole:
            lab.fit(model, ShardscopeCallback(step, output=tmp_path / "{rank}.json"), max_steps=6)
    num_calls = len(load(tmp_path / "0.json").collectives)
    assert num_calls * 3 == len(whole.recording.collectives)


def test_with_optimizers_that_take_turns_a_step_is_one_batch(lab: Any, tmp_path: Path) -> None:
    with simulate(mesh={"dp": 2, "tp": 2}) as world:
        model = lab.TakingTurns(shard_net(make_net(), world))
        with trace() as whole:
            lab.fit(model, ShardscopeCallback(3, output=tmp_path / "{rank}.json"), max_steps=4)
    num_calls = len(load(tmp_path / "0.json").collectives)
    assert num_calls * 4 == len(whole.recording.collectives)


def test_a_callback_that_has_recorded_holds_nothing(lab: Any, tmp_path: Path) -> None:
    model = lab.Learner()
    callback = ShardscopeCallback(2, output=tmp_path / "run.json")
    lab.fit(model, callback)
    gone = weakref.ref(model)
    recorder = callback.recorder
    del model, callback  # to which Lightning has given methods of the model
    gc.collect()
    assert gone() is None
    assert not recorder.is_recording
    assert load(tmp_path / "run.json").modules[0].type == "Learner"


def test_a_callback_may_be_sent_to_another_process(lab: Any, tmp_path: Path) -> None:
    callback = ShardscopeCallback(7, output=tmp_path / "run.json", force=True)
    again = pickle.loads(pickle.dumps(callback))
    assert isinstance(again, lab.pl.Callback)
    assert isinstance(again, ShardscopeCallback)
    assert again.recorder.step == 7
    (tmp_path / "run.json").write_text("old")
    lab.fit(lab.Learner(), again, max_steps=7)
    assert load(tmp_path / "run.json").run.world_size == 1


@pytest.mark.parametrize("step", [0, -1, 2.0, True, None])
def test_what_is_no_step_is_refused_before_training(lab: Any, step: Any) -> None:
    with pytest.raises(TraceError, match=r"got step=.*, which is not a step: .* counted from 1"):
        ShardscopeCallback(step)
