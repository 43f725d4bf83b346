"""The one-line hooks of loops that are written by hand: step N, nothing but step N, and no harm."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardscope import load, simulate, trace
from shardscope.errors import PluginError, TraceError
from shardscope.plugins.accelerate import observe as observe_accelerate
from shardscope.plugins.torchtitan import observe as observe_trainer
from shardscope.plugins.torchtitan import record_step
from shardscope.plugins.training_loop import observe
from shardscope.record import BucketReduce
from shardscope.report.text.summary import render_text
from shardscope.shard.memory.allocations import LiveStorages
from trained_models import is_watched, leaving_torch_alone, make_batches, make_net, said, shard_net

BATCHES = [torch.stack(make_batches(2)) for _ in range(8)]


def train(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    num_steps: int = 4,
    before: Callable[[int], None] = lambda _: None,
) -> list[float]:
    """Losses of some steps of two batches each; an evaluation comes before each step."""
    losses = []
    for number in range(1, num_steps + 1):
        evaluate(model)
        before(number)
        for batch in BATCHES[:2]:
            loss = model(batch).pow(2).mean()
            loss.backward()
            losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def evaluate(model: nn.Module) -> None:
    """Call the model as no step does; FSDP keeps what it has gathered."""
    with torch.no_grad():
        model(BATCHES[0])
    model.eval()
    model(BATCHES[0])
    model.train()


def has_hooks(*optimizers: torch.optim.Optimizer) -> bool:
    return any(optimizer._optimizer_step_post_hooks for optimizer in optimizers) or is_watched()


@pytest.mark.parametrize(("step", "num_steps"), [(1, 1), (3, 1), (2, 2)])
def test_the_recorded_steps_are_those_of_a_plain_trace_without_the_evaluation(
    tmp_path: Path, step: int, num_steps: int
) -> None:
    with simulate(mesh={"dp": 2, "tp": 2}) as world:
        model = shard_net(make_net(), world)
        optimizer = torch.optim.AdamW(model.parameters())
        observe(model, optimizer, step=step, num_steps=num_steps, output=tmp_path / "run.json")
        train(model, optimizer)
        evaluate(model)
        with trace(model) as plain:
            for batch in BATCHES[:2]:
                model(batch).pow(2).mean().backward()
            optimizer.step()
    assert not has_hooks(optimizer)
    recording = load(tmp_path / "run-0.json")
    assert said(recording) == said(plain.recording) * num_steps
    assert recording.run.num_forwards == 2 * num_steps
    assert recording.gaps == ()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
@pytest.mark.parametrize("is_compiled", [False, True])
def test_training_is_the_same_to_the_bit_with_and_without(
    tmp_path: Path, is_compiled: bool
) -> None:
    results = []
    for is_observed in (False, True):
        model = make_net()
        if is_compiled:
            model.compile(backend="eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if is_observed:
            observe(model, optimizer, step=2, output=tmp_path / "run.json", memory=True)
        losses = train(model, optimizer)
        results.append(
            (losses, [p.tolist() for p in model.parameters()], torch.get_rng_state().tolist())
        )
    assert results[0] == results[1]
    recording = load(tmp_path / "run.json")
    assert recording.run.num_forwards == 2
    assert len(recording.memory) == (not is_compiled)
    fact = "the model is compiled" if is_compiled else "the step ran on the CPU"
    assert [gap.place for gap in recording.gaps if fact in gap.fact] == ["memory"]


@pytest.mark.parametrize("step", [1, 2])
def test_the_memory_of_a_live_step_is_that_of_its_tensors(step: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    observe(model, optimizer, step=step, output=tmp_path / "run.json", memory=True)
    batch = torch.ones(1024, 512)
    for _ in range(step):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    recording = load(tmp_path / "run.json")
    (profile,) = recording.memory
    num_bytes: dict[str, int] = Counter()
    for use in profile.at_peak:
        num_bytes[str(use.kind)] += use.num_bytes
    parameters = sum(4 * parameter.numel() for parameter in model.parameters())
    assert num_bytes["parameters"] == parameters
    assert num_bytes["optimizer_state"] == 2 * parameters
    assert "not-counted" not in {finding.rule for finding in recording.findings}
    assert (profile.is_live, profile.first_peak_bytes) == (True, None)
    assert recording.run.instruments == ("trace", "memory")
    assert "estimated from the ops of a step of the training run" in render_text(recording)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode()


def test_the_cause_of_a_collective_is_the_same_while_memory_is_observed(tmp_path: Path) -> None:
    causes = []
    for memory in (False, True):
        with simulate(mesh={"dp": 2}) as world:
            model = nn.parallel.DistributedDataParallel(make_net(), device_mesh=world.mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            output = tmp_path / f"run-{memory}-{{rank}}.json"
            observe(model, optimizer, step=2, output=output, memory=memory)
            train(model, optimizer, num_steps=2)
        recording = load(tmp_path / f"run-{memory}-0.json")
        causes.append([call.cause for call in recording.collectives])
    assert causes[0] == causes[1]
    assert {type(cause) for cause in causes[0]} == {BucketReduce}


def test_an_error_while_memory_is_observed_is_a_gap_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LiveStorages, tensor: torch.Tensor) -> None:
        raise RuntimeError("no storage today")

    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observe(model, optimizer, step=1, output=tmp_path / "run.json", memory=True)
    monkeypatch.setattr(LiveStorages, "find_or_begin", fail)
    assert len(train(model, optimizer)) == 8
    recording = load(tmp_path / "run.json")
    assert recording.memory == ()
    assert "not observed to the end: RuntimeError: no storage today" in recording.gaps[-1].fact


def test_a_step_contains_a_step_of_each_optimizer(tmp_path: Path) -> None:
    with simulate(mesh={"dp": 2}) as world:
        model = make_net()
        for block in model:
            fully_shard(block, mesh=world.mesh)
        pair = [torch.optim.SGD(block.parameters(), lr=0.1) for block in model]
        observe(model, pair, step=2, output=tmp_path / "run.json")
        train(model, *pair, num_steps=2)
    assert not has_hooks(*pair)
    recording = load(tmp_path / "run-0.json")
    assert recording.run.num_forwards == 2
    assert [call.kind for call in recording.collectives].count("reduce_scatter") == 4


def test_a_step_that_raises_is_saved_as_far_as_it_came(tmp_path: Path) -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(number: int) -> None:
        if number == 2:
            model(BATCHES[0])
            raise ZeroDivisionError("not today")

    with (
        pytest.raises(ZeroDivisionError, match="not today"),
        observe(model, optimizer, step=2, output=tmp_path / "run.json"),
    ):
        train(model, optimizer, before=fail)
    assert "ended early with ZeroDivisionError" in load(tmp_path / "run.json").gaps[0].fact
    assert not has_hooks(optimizer)


def test_what_prevents_recording_is_a_warning_and_training_continues(tmp_path: Path) -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="step 2 is not recorded; training continues.*no folder"):
        observe(model, optimizer, step=2, output=tmp_path / "none" / "run.json")
    assert len(train(model, optimizer)) == 8
    observer = observe(model, optimizer, step=9, output=tmp_path / "run.json")
    train(model, optimizer)
    with pytest.warns(UserWarning, match="step 9 was not recorded, because training ended with"):
        observer.close()
    assert not has_hooks(optimizer)
    assert list(tmp_path.iterdir()) == []


def test_training_that_ends_before_the_step_is_a_warning_without_a_call(tmp_path: Path) -> None:
    model = make_net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    observe(model, optimizers, step=9, output=tmp_path / "run.json")
    train(model, *optimizers)
    with pytest.warns(UserWarning, match="step 9 was not recorded, because training ended with"):
        optimizers.clear()
    program = (
        "import torch\nfrom shardscope.plugins.training_loop import observe\n"
        "model = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters())\n"
        "observe(model, optimizer, step=9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "step 9 was not recorded, because training ended with step 0" in done.stderr


def test_wrong_arguments_are_refused_before_training() -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PluginError, match="got list for its optimizer"):
        observe(model, [[optimizer]])  # type: ignore[list-item]
    with pytest.raises(PluginError, match="got nothing for its model"):
        observe([], optimizer)
    with pytest.raises(TraceError, match="num_steps=0, of which nothing can be recorded"):
        observe(model, optimizer, num_steps=0)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_counts_steps_and_not_accumulated_batches(tmp_path: Path) -> None:
    with leaving_torch_alone():
        from accelerate import Accelerator
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        log_with="tensorboard",
        project_dir=str(tmp_path),
    )
    with pytest.raises(PluginError, match=r"no model.*Call it after accelerator\.prepare"):
        observe_accelerate(accelerator)
    accelerator.init_trackers("logs")
    net = make_net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    observe_accelerate(accelerator, step=2, output=tmp_path / "run.json")
    for batch in BATCHES:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    assert load(tmp_path / "run.json").run.num_forwards == 2
    assert not has_hooks(optimizer.optimizer)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert events.Scalars("shardscope/run/forward_passes")[0].step == 2


class Trainer:
    """Has what the hook uses of torchtitan's trainer; `benchmarks/torchtitan_hook.py` runs that."""

    def __init__(self, folder: Path, fail_at: int = 0) -> None:
        self.model_parts = [make_net()]
        self.step = 0
        self.config = self
        self.training = self
        self.dump_folder = str(folder / "outputs")
        self._optimizer = torch.optim.SGD(self.model_parts[0].parameters(), lr=0.1)
        self._fail_at = fail_at

    def train_step(self, batches: Any) -> str:
        self.model_parts[0](next(batches)).sum().backward()
        if self.step == self._fail_at:
            raise ZeroDivisionError("not today")
        self._optimizer.step()
        return "done"

    def train(self, num_steps: int) -> None:
        batches = iter(BATCHES)
        for self.step in range(1, num_steps + 1):
            assert self.train_step(batches) == "done"


def test_the_step_of_a_trainer_is_wrapped_until_it_is_recorded(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    observe_trainer(trainer, step=2, num_steps=2)
    trainer.train(4)
    assert load(tmp_path / "outputs" / "shardscope.json.gz").run.num_forwards == 2
    assert "train_step" not in vars(trainer)
    failing = Trainer(tmp_path, fail_at=2)
    observe_trainer(failing, step=2, output=tmp_path / "failed.json")
    with pytest.raises(ZeroDivisionError, match="not today"):
        failing.train(4)
    assert "ZeroDivisionError" in load(tmp_path / "failed.json").gaps[0].fact
    assert not is_watched()
    with pytest.raises(PluginError, match="got Linear, which is not a torchtitan Trainer"):
        observe_trainer(nn.Linear(2, 2))
    with pytest.raises(TraceError, match="got step=0, which is not a step"):
        record_step(None, step=0)
