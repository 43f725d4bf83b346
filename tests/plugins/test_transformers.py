"""The callback in a real Hugging Face trainer: step N, nothing but step N, and no harm."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardscope import load, simulate, trace
from shardscope.comm.trace import Trace
from shardscope.plugins.transformers import ShardscopeCallback
from trained_models import is_watched, said


@pytest.fixture(scope="module")
def lab() -> Any:
    if find_spec("transformers") is None or find_spec("accelerate") is None:
        pytest.skip("transformers or accelerate is not installed")
    return import_module("transformers_models")


@pytest.fixture
def train(lab: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    def run(model: nn.Module, *callbacks: Any, resume: Any = None, **options: Any) -> Any:
        arguments = lab.TrainingArguments(
            **{
                "output_dir": str(tmp_path / "trainer"),
                "per_device_train_batch_size": 2,
                "max_steps": 4,
                "report_to": "none",
                "save_strategy": "no",
                "use_cpu": True,
                "disable_tqdm": True,
                "dataloader_pin_memory": False,
                **options,
            }
        )
        data = lab.make_vectors() if isinstance(model, lab.Regression) else lab.make_texts()
        trainer = lab.Trainer(
            model, arguments, train_dataset=data, eval_dataset=data[:2], callbacks=list(callbacks)
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    yield run
    assert not is_watched()


def test_the_step_is_recorded_with_all_its_batches_and_the_clipping(
    lab: Any, train: Callable[..., Any], tmp_path: Path
) -> None:
    with simulate(mesh={"dp": 2}) as world, trace() as whole:
        options = {"gradient_accumulation_steps": 2, "max_steps": 3}
        plain = lab.Surrounding(2)
        train(
            lab.make_llama(world), ShardscopeCallback(2, output=tmp_path / "run.json.gz"), **options
        )
        train(lab.make_llama(world), plain, **options)
    recording = load(tmp_path / "run-0.json.gz")
    assert plain.trace is not None
    assert said(recording) == said(plain.trace.recording)
    assert len(recording.collectives) * 3 * 2 == len(whole.recording.collectives)
    kinds = [(collective.kind, collective.owner) for collective in recording.collectives]
    assert kinds.count(("all_gather", "model.layers.1")) == 2 * 2
    assert kinds.count(("reduce_scatter", "model.layers.1")) == 2
    assert kinds.count(("all_reduce", None)) == 1  # of the gradients' norm
    assert recording.gaps == ()


def test_training_is_the_same_to_the_bit_with_and_without(
    lab: Any, train: Callable[..., Any], tmp_path: Path
) -> None:
    losses, states = [], []
    for callbacks in ([], [ShardscopeCallback(1, output=tmp_path / "run.json", memory=True)]):
        model = lab.make_regression()
        trainer = train(model, *callbacks, eval_strategy="steps", eval_steps=1)
        losses.append((model.losses, [log.get("eval_loss") for log in trainer.state.log_history]))
        states.append((torch.get_rng_state().tolist(), [p.tolist() for p in model.parameters()]))
    assert losses[0] == losses[1]
    assert states[0] == states[1]
    recording = load(tmp_path / "run.json")
    assert recording.collectives == ()
    assert recording.memory[0].is_live
    assert {use.module for use in recording.memory[0].at_peak if use.kind == "parameters"}


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_training_that_raises_leaves_the_step_so_far_and_nothing_behind(
    lab: Any, train: Callable[..., Any], tmp_path: Path, phase: str
) -> None:
    model = lab.Regression(lab.Failing(batch=2, phase=phase))
    with simulate(mesh={"dp": 2}):
        with pytest.raises(ZeroDivisionError, match="today"):
            train(model, ShardscopeCallback(2, output=tmp_path / "run.json"))
        with trace() as after:  # whatever comes next is nobody else's
            model.net.net(torch.zeros(1, 8))
    recording = load(tmp_path / "run-0.json")
    assert len(recording.collectives) == len(after.recording.collectives) == 2
    assert "it ended early with ZeroDivisionError: no" in recording.gaps[0].fact


def test_an_optimizer_that_raises_is_noticed_too(lab: Any, tmp_path: Path) -> None:
    model = lab.make_regression()
    optimizer = lab.FailingOptimizer(model.parameters(), lr=0.1)
    arguments = lab.TrainingArguments(
        str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, max_steps=3
    )
    callback = ShardscopeCallback(2, output=tmp_path / "run.json")
    trainer = lab.Trainer(
        model,
        arguments,
        train_dataset=lab.make_vectors(),
        callbacks=[callback],
        optimizers=(optimizer, None),
    )
    with pytest.raises(ZeroDivisionError, match="no step today"):
        trainer.train()
    assert not is_watched()
    assert "no step today" in load(tmp_path / "run.json").gaps[0].fact
    assert "training_step" not in vars(trainer)


def test_two_callbacks_may_record_the_same_step(lab: Any, tmp_path: Path) -> None:
    model = lab.make_regression()
    arguments = lab.TrainingArguments(
        str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, max_steps=2
    )
    callbacks = [ShardscopeCallback(1, output=tmp_path / f"{name}.json") for name in "ab"]
    trainer = lab.Trainer(model, arguments, train_dataset=lab.make_vectors(), callbacks=callbacks)
    trainer.create_optimizer_and_scheduler(num_training_steps=2)
    before = [{**vars(owner)} for owner in (trainer, trainer.accelerator, trainer.optimizer)]
    trainer.train()
    after = [vars(owner) for owner in (trainer, trainer.accelerator, trainer.optimizer)]
    for was, now in zip(before, after, strict=True):
        for name in ("training_step", "clip_grad_norm_"):
            assert was.get(name) is now.get(name) is None
    assert "Overheard" not in repr(trainer.optimizer.step)
    assert load(tmp_path / "a.json").run == load(tmp_path / "b.json").run
    assert not is_watched()


def test_an_error_without_a_hook_is_noticed_when_the_callback_is_used_again_or_deleted(
    lab: Any, train: Callable[..., Any], tmp_path: Path
) -> None:
    again, gone = (ShardscopeCallback(2, output=tmp_path / f"{name}.json") for name in "ab")
    for callback in (again, gone):
        with pytest.raises(ZeroDivisionError, match="meddled"):
            train(lab.make_regression(), callback, lab.Meddling())
    assert is_watched()
    train(lab.make_regression(), again)
    del callback, gone
    gc.collect()
    assert not is_watched()
    for name in "ab":
        assert "training ended during step 2" in load(tmp_path / f"{name}.json").gaps[-1].fact


def test_our_own_failures_are_warnings_and_training_goes_on(
    lab: Any, train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = ShardscopeCallback(2, output=tmp_path / "none" / "run.json")
    with pytest.warns(UserWarning, match="step 2 is not recorded.*there is no folder"):
        assert train(lab.make_regression(), callback).state.global_step == 4

    def fail(self: Trace) -> Trace:
        raise RuntimeError("no trace today")

    monkeypatch.setattr(Trace, "__enter__", fail)
    with pytest.warns(UserWarning, match="step 2 is not recorded; training continues: no trace"):
        trainer = train(lab.make_regression(), ShardscopeCallback(2, output=tmp_path / "run.json"))
    assert trainer.state.global_step == 4
    assert "training_step" not in vars(trainer)


def test_training_continues_if_warnings_are_errors(
    lab: Any, train: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = train(lab.make_regression(), ShardscopeCallback(9, output=tmp_path / "run.json"))
    assert trainer.state.global_step == 4
    assert "shardscope: step 9 was not recorded" in capsys.readouterr().err


def test_steps_are_the_trainers_own_also_when_it_goes_on_from_a_checkpoint(
    lab: Any, train: Callable[..., Any], tmp_path: Path
) -> None:
    train(lab.make_regression(), max_steps=3, save_strategy="steps", save_steps=3)
    past, first, last = (
        ShardscopeCallback(step, output=tmp_path / f"{step}.json") for step in (2, 4, 5)
    )
    checkpoint = str(tmp_path / "trainer" / "checkpoint-3")
    with pytest.warns(UserWarning, match="step 2 was not recorded"):
        train(lab.make_regression(), past, first, last, max_steps=5, resume=checkpoint)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["4.json", "5.json"]
    train(lab.make_regression(), last)  # it records once
    assert not last.recorder.is_recording


def test_the_class_itself_is_a_callback_too(
    lab: Any, train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = train(lab.make_regression(), ShardscopeCallback, max_steps=10)
    assert load("shardscope.json.gz").run.instruments == ("trace",)
    assert isinstance(trainer.pop_callback(ShardscopeCallback), lab.TrainerCallback)
