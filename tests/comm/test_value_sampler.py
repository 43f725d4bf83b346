"""Values of training steps are sampled as they are, and sampling changes nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardscope import ValueSamples, load, simulate, trace
from shardscope.comm.value_statistics import StatisticsBuffer
from shardscope.errors import TraceError
from shardscope.plugins.training_loop import observe
from shardscope.record import Recording, ValueKind, ValueSample


class Block(nn.Module):
    """A linear layer, recomputed in backward, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        """A dict of two tensors."""
        y = checkpoint(self.linear, x, use_reentrant=False)
        return {"y": self.norm(y), "more": [y.detach()]}


def make_model() -> tuple[Block, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Block()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, num_steps: int = 3) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        for _ in range(2):  # micro-batches
            (model(torch.randn(4, 6))["y"].square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(4, 6))  # an evaluation


def sample(**options: Any) -> tuple[Recording, Block]:
    model, optimizer = make_model()
    with trace(model, **options) as t:
        train(model, optimizer)
    return t.recording, model


def find(recording: Recording, kind: ValueKind, name: str, step: int) -> list[ValueSample]:
    return [
        value
        for value in recording.values
        if (value.kind, value.name, value.step) == (kind, name, step)
    ]


def test_each_tensor_of_a_step_is_sampled_once_at_its_time() -> None:
    recording, model = sample(values=True)
    assert recording.gaps == ()
    counts = Counter((value.step, value.kind) for value in recording.values)
    for step in (1, 2, 3):
        assert counts[step, ValueKind.INPUT] == 2
        assert counts[step, ValueKind.OUTPUT] == 2 * (1 + 1 + 2)
        assert counts[step, ValueKind.OUTPUT_GRADIENT] == 2 * (1 + 1 + 1)
        assert counts[step, ValueKind.LOSS] == 2
        assert counts[step, ValueKind.GRADIENT] == counts[step, ValueKind.CLIPPED] == 4
        assert counts[step, ValueKind.UPDATED] == 4
        assert counts[step, ValueKind.BUFFER] == 3
    assert [step for step, kind in counts if kind is ValueKind.WEIGHT] == [1]
    (last,) = find(recording, ValueKind.UPDATED, "linear.weight", 3)
    weight = model.linear.weight.detach().double()
    assert last.sum_squares == pytest.approx(float(weight.square().sum()), rel=1e-6)
    assert last.sum == pytest.approx(float(weight.sum()), rel=1e-5)
    assert last.max_abs == pytest.approx(float(weight.abs().max()))
    first, clipped = (
        find(recording, kind, "linear.weight", 1)[0]
        for kind in (ValueKind.GRADIENT, ValueKind.CLIPPED)
    )
    assert first.sum_squares > clipped.sum_squares > 0
    settings = {value.name: value.sum for value in recording.values if value.step == 2}
    assert (settings["SGD.lr"], settings["SGD.momentum"]) == (0.1, 0.9)


def test_sampling_changes_neither_weights_nor_random_numbers() -> None:
    _, sampled = sample(values=True)
    state = torch.get_rng_state()
    model, optimizer = make_model()
    train(model, optimizer)
    assert torch.equal(torch.get_rng_state(), state)
    for tensor, reference in zip(
        sampled.state_dict().values(), model.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, reference)


@pytest.mark.parametrize(
    ("values", "steps"), [(2, {2}), (range(2, 9), {2, 3}), ([3], {3}), (False, set())]
)
def test_only_the_chosen_steps_are_sampled(values: Any, steps: set[int]) -> None:
    recording, _ = sample(values=values)
    assert {value.step for value in recording.values} == steps


def test_kinds_and_modules_can_be_chosen() -> None:
    samples = ValueSamples(outputs=False, parameters=False, modules="norm")
    recording, _ = sample(values=samples, step=7)
    tensors = {value.name for value in recording.values if value.kind is not ValueKind.SETTING}
    assert tensors == {"norm.weight", "norm.bias", "loss"}
    assert {value.step for value in recording.values} == {7, 8, 9}


def test_a_stream_has_the_values_too(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recording, _ = sample(values=[1, 3], stream=path)
    assert load(path).values == recording.values


def test_wrong_steps_are_refused() -> None:
    with pytest.raises(TraceError, match="Give True, a training step counted from 1"):
        trace(values=[0])


def test_plugins_sample_the_steps_that_they_record(tmp_path: Path) -> None:
    model, optimizer = make_model()
    path = tmp_path / "loop.json"
    observe(model, optimizer, step=2, values=True, output=path)
    train(model, optimizer)
    recording = load(path)
    assert {value.step for value in recording.values} == {2}
    kinds = {value.kind for value in recording.values}
    assert kinds == set(ValueKind)


def test_tensors_without_data_are_a_gap_and_end_nothing() -> None:
    with simulate(mesh={"dp": 2}) as world:
        model = world.materialize(nn.Linear(2, 2, device="meta"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trace(model, values=True) as t:
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
    facts = [gap.fact for gap in t.recording.gaps if gap.place == "values"]
    assert any("its tensors have no data" in fact for fact in facts)
    assert {value.kind for value in t.recording.values} == {ValueKind.SETTING}


def test_statistics_are_exact_for_every_dtype_and_size() -> None:
    buffer = StatisticsBuffer()
    nonfinite = torch.tensor([1.0, float("nan"), float("inf"), -2.0])
    tensors = [
        torch.arange(2_500_001, dtype=torch.int64),
        torch.ones(1030, dtype=torch.bfloat16) * 3,
        torch.tensor([1 + 2j, -3j]),
        torch.zeros(0),
        nonfinite,
        torch.tensor([True, False, True]),
        torch.full((3, 5), 2.0).T,
    ]
    for tensor in tensors:
        buffer.add(tensor)
    results = buffer.read()
    count = 2_500_001
    assert results[0].sum == count * (count - 1) / 2
    assert results[1].sum_squares == pytest.approx(1030 * 9)
    assert (results[2].sum, results[2].sum_squares) == (0.0, pytest.approx(14))
    assert (results[3].sum, results[3].max_abs) == (0.0, 0.0)
    assert (results[4].sum, results[4].num_nonfinite) == (None, 2)
    assert results[5].sum == 2.0
    assert results[6].sum_squares == pytest.approx(60)
    assert len(buffer) == 0


def test_a_hash_depends_on_each_value_and_its_place() -> None:
    buffer = StatisticsBuffer()
    values = torch.randn(5000)
    swapped = values.clone()
    swapped[[17, 4900]] = values[[4900, 17]]
    rows = values.clone()
    rows[:2048] = values[:2048].view(2, 1024).flip(0).flatten()
    for tensor in (values, values.clone(), swapped, rows, values.nextafter(torch.tensor(9.0))):
        buffer.add(tensor)
    first, copy, *others = (result.hash for result in buffer.read())
    assert first == copy
    assert len({first, *others}) == 4
