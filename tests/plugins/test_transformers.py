"""The callback in a real Hugging Face trainer: step N, nothing but step N, and no harm."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # theirs, at import
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

from torch.distributed.fsdp import fully_shard

from shardscope import World, load, simulate, trace
from shardscope.comm.trace import Trace
from shardscope.plugins.transformers import ShardscopeCallback
from small_models import Net
from trained_models import is_watched, said


class Regression(nn.Module):
    """A model as the trainer wants one: a loss from a batch; remembers it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        loss = self.net(x).pow(2).mean()
        self.losses.append(loss.item())
        return {"loss": loss}


def make_vectors() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, generator=generator)} for _ in range(12)]


def make_regression() -> Regression:
    torch.manual_seed(0)
    return Regression(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)))


def make_llama(world: World | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    if world is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=world.mesh)
        fully_shard(model, mesh=world.mesh)
    return model


def make_texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 64, (6,), generator=generator) for _ in range(12)]
    return [{"input_ids": text, "labels": text} for text in texts]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    def run(model: nn.Module, *callbacks: Any, resume: Any = None, **options: Any) -> Trainer:
        arguments = TrainingArguments(
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
        data = make_vectors() if isinstance(model, Regression) else make_texts()
        trainer = Trainer(
            model, arguments, train_dataset=data, eval_dataset=data[:2], callbacks=list(callbacks)
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    yield run
    assert not is_watched()


class Surrounding(TrainerCallback):
    """A plain trace of the same step, by somebody who owns the loop's hooks too."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.trace: Trace | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step - 1:
            self.trace = trace(kwargs["model"]).__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step and self.trace is not None:
            self.trace.__exit__(None, None, None)


def test_the_step_is_recorded_with_all_its_batches_and_the_clipping(
    train: Callable[..., Trainer], tmp_path: Path
) -> None:
    with simulate(mesh={"dp": 2}) as world, trace() as whole:
        options = {"gradient_accumulation_steps": 2, "max_steps": 3}
        plain = Surrounding(2)
        train(make_llama(world), ShardscopeCallback(2, output=tmp_path / "run.json.gz"), **options)
        train(make_llama(world), plain, **options)
    recording = load(tmp_path / "run-0.json.gz")
    assert plain.trace is not None
    assert said(recording) == said(plain.trace.recording)
    assert len(recording.collectives) * 3 * 2 == len(whole.recording.collectives)
    kinds = [(one.kind, one.owner) for one in recording.collectives]
    assert kinds.count(("all_gather", "model.layers.1")) == 2 * 2
    assert kinds.count(("reduce_scatter", "model.layers.1")) == 2
    assert kinds.count(("all_reduce", None)) == 1  # of the gradients' norm
    assert recording.gaps == ()


def test_training_is_the_same_to_the_bit_with_and_without(
    train: Callable[..., Trainer], tmp_path: Path
) -> None:
    losses, states = [], []
    for callbacks in ([], [ShardscopeCallback(1, output=tmp_path / "run.json")]):
        model = make_regression()
        trainer = train(model, *callbacks, eval_strategy="steps", eval_steps=1)
        losses.append((model.losses, [log.get("eval_loss") for log in trainer.state.log_history]))
        states.append((torch.get_rng_state().tolist(), [p.tolist() for p in model.parameters()]))
    assert losses[0] == losses[1]
    assert states[0] == states[1]
    assert load(tmp_path / "run.json").collectives == ()


class Refusing(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("no gradient today")


class Failing(nn.Module):
    """Fails in the given batch, forwards or backwards."""

    def __init__(self, *, batch: int, phase: str) -> None:
        super().__init__()
        self.net = Net()
        self._batches_left, self._phase = batch, phase

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        self._batches_left -= 1
        if self._batches_left == 0 and self._phase == "forward":
            raise ZeroDivisionError("no result today")
        return Refusing.apply(x) if self._batches_left == 0 else x


class FailingOptimizer(torch.optim.SGD):
    """Fails in its second step."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        if self.num_steps == 2:
            raise ZeroDivisionError("no step today")
        super().step()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_training_that_raises_leaves_the_step_so_far_and_nothing_behind(
    train: Callable[..., Trainer], tmp_path: Path, phase: str
) -> None:
    model = Regression(Failing(batch=2, phase=phase))
    with simulate(mesh={"dp": 2}):
        with pytest.raises(ZeroDivisionError, match="today"):
            train(model, ShardscopeCallback(2, output=tmp_path / "run.json"))
        with trace() as after:  # whatever comes next is nobody else's
            model.net.net(torch.zeros(1, 8))
    recording = load(tmp_path / "run-0.json")
    assert len(recording.collectives) == len(after.recording.collectives) == 2
    assert "it ended early with ZeroDivisionError: no" in recording.gaps[0].fact


def test_an_optimizer_that_raises_is_noticed_too(tmp_path: Path) -> None:
    model = make_regression()
    optimizer = FailingOptimizer(model.parameters(), lr=0.1)
    arguments = TrainingArguments(
        str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, max_steps=3
    )
    callback = ShardscopeCallback(2, output=tmp_path / "run.json")
    trainer = Trainer(
        model,
        arguments,
        train_dataset=make_vectors(),
        callbacks=[callback],
        optimizers=(optimizer, None),
    )
    with pytest.raises(ZeroDivisionError, match="no step today"):
        trainer.train()
    assert not is_watched()
    assert "no step today" in load(tmp_path / "run.json").gaps[0].fact
    assert "training_step" not in vars(trainer)


def test_two_callbacks_may_record_the_same_step(tmp_path: Path) -> None:
    model = make_regression()
    arguments = TrainingArguments(
        str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True, max_steps=2
    )
    callbacks = [ShardscopeCallback(1, output=tmp_path / f"{name}.json") for name in "ab"]
    trainer = Trainer(model, arguments, train_dataset=make_vectors(), callbacks=callbacks)
    trainer.create_optimizer_and_scheduler(num_training_steps=2)
    before = [{**vars(one)} for one in (trainer, trainer.accelerator, trainer.optimizer)]
    trainer.train()
    after = [vars(one) for one in (trainer, trainer.accelerator, trainer.optimizer)]
    for was, now in zip(before, after, strict=True):
        for name in ("training_step", "clip_grad_norm_"):
            assert was.get(name) is now.get(name) is None
    assert "Overheard" not in repr(trainer.optimizer.step)
    assert load(tmp_path / "a.json").run == load(tmp_path / "b.json").run
    assert not is_watched()


class Meddling(TrainerCallback):
    """Raises in the middle of the second step, where nobody looks."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            raise ZeroDivisionError("meddled")


def test_an_error_that_nobody_hears_of_is_noticed_when_the_callback_is_used_again_or_gone(
    train: Callable[..., Trainer], tmp_path: Path
) -> None:
    again, gone = (ShardscopeCallback(2, output=tmp_path / f"{name}.json") for name in "ab")
    for callback in (again, gone):
        with pytest.raises(ZeroDivisionError, match="meddled"):
            train(make_regression(), callback, Meddling())
    assert is_watched()
    train(make_regression(), again)
    del callback, gone
    gc.collect()
    assert not is_watched()
    for name in "ab":
        assert "training ended before step 2 did" in load(tmp_path / f"{name}.json").gaps[-1].fact


def test_our_own_failures_are_warnings_and_training_goes_on(
    train: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = ShardscopeCallback(2, output=tmp_path / "none" / "run.json")
    with pytest.warns(UserWarning, match="step 2 is not recorded.*there is no folder"):
        assert train(make_regression(), callback).state.global_step == 4

    def fail(self: Trace) -> Trace:
        raise RuntimeError("no trace today")

    monkeypatch.setattr(Trace, "__enter__", fail)
    with pytest.warns(UserWarning, match="step 2 is not recorded, and training goes on: no trace"):
        trainer = train(make_regression(), ShardscopeCallback(2, output=tmp_path / "run.json"))
    assert trainer.state.global_step == 4
    assert "training_step" not in vars(trainer)


def test_a_program_whose_warnings_are_errors_trains_on(
    train: Callable[..., Trainer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = train(make_regression(), ShardscopeCallback(9, output=tmp_path / "run.json"))
    assert trainer.state.global_step == 4
    assert "shardscope: step 9 was not recorded" in capsys.readouterr().err


def test_steps_are_the_trainers_own_also_when_it_goes_on_from_a_checkpoint(
    train: Callable[..., Trainer], tmp_path: Path
) -> None:
    train(make_regression(), max_steps=3, save_strategy="steps", save_steps=3)
    past, first, last = (
        ShardscopeCallback(step, output=tmp_path / f"{step}.json") for step in (2, 4, 5)
    )
    checkpoint = str(tmp_path / "trainer" / "checkpoint-3")
    with pytest.warns(UserWarning, match="step 2 was not recorded"):
        train(make_regression(), past, first, last, max_steps=5, resume=checkpoint)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["4.json", "5.json"]
    train(make_regression(), last)  # it records once
    assert not last.recorder.is_recording


def test_the_class_itself_is_a_callback_too(
    train: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = train(make_regression(), ShardscopeCallback, max_steps=10)
    assert load("shardscope.json.gz").run.instruments == ("trace",)
    assert isinstance(trainer.pop_callback(ShardscopeCallback), TrainerCallback)
