"""explain leaves everything as it was: caches, numbers, buffers, gradients, inputs, modes."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from shardscope import explain


def counting_backend() -> tuple[list[Any], Callable[..., Any]]:
    """A backend, and the graphs that went to it."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return graphs, backend


def helper(x: torch.Tensor) -> torch.Tensor:
    print(end="")
    return x * 2


def looping(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = helper(x)
    return x.relu()


def test_a_function_that_is_compiled_is_not_compiled_again() -> None:
    torch._dynamo.reset()
    graphs, backend = counting_backend()
    compiled = torch.compile(looping, backend=backend)
    for size in (4, 5, 1):
        compiled(torch.ones(size))
    before = len(graphs)
    told = explain(looping, torch.ones(7)).explanations[0]
    for size in (4, 5, 1, 9):
        compiled(torch.ones(size))
    assert len(graphs) == before
    # And though Python runs what the user compiled, since it breaks in a loop, it was looked at.
    assert (told.num_graphs, told.num_break_events, told.num_skipped_frames) == (1, 1, 1)
    assert told.num_recompiles == 0


def test_what_others_compiled_is_not_compiled_again() -> None:
    torch._dynamo.reset()
    graphs, backend = counting_backend()
    others = [torch.compile(one, backend=backend) for one in (torch.nn.Linear(4, 4), helper)]
    for one in others:
        one(torch.ones(4))
    before = len(graphs)
    explain(lambda x: helper(x).sin(), torch.ones(4))
    for one in others:
        one(torch.ones(4))
    assert len(graphs) == before


def test_a_function_is_compiled_afterwards_as_if_it_had_never_been_explained() -> None:
    torch._dynamo.reset()
    graphs, backend = counting_backend()
    explain(looping, torch.ones(4))
    compiled = torch.compile(looping, backend=backend)
    compiled(torch.ones(5))
    assert len(graphs) == 1
    # Had the sizes of the explanation been remembered, this one would be open.
    values = [node.meta.get("example_value") for node in graphs[0].graph.nodes]
    (size,) = {one.shape[0] for one in values if isinstance(one, torch.Tensor)}
    assert isinstance(size, int)
    assert size == 5


def test_dynamos_counters_are_put_back() -> None:
    torch._dynamo.reset()
    torch.compile(helper, backend="eager")(torch.ones(4))
    utils, frames = torch._dynamo.utils, torch._dynamo.convert_frame

    def read() -> Any:
        counters = {key: dict(value) for key, value in utils.counters.items()}
        times = {key: len(value) for key, value in utils.compilation_time_metrics.items()}
        return counters, times, frames.FRAME_COUNTER, len(frames.input_codes.seen)

    before = read()
    explain(looping, torch.ones(4))
    assert read() == before


def test_a_second_explanation_is_the_same_as_the_first() -> None:
    first, second = (explain(looping, torch.ones(4)).explanations[0] for _ in range(2))
    assert (first.graphs, first.break_sites) == (second.graphs, second.break_sites)
    assert (first.fingerprint, first.skipped_frames) == (second.fingerprint, second.skipped_frames)


class Restless(nn.Module):
    """Changes whatever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.seen = 0
        self.history: list[int] = []
        self.average = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.history.append(self.seen)
        self.average.data.add_(1)
        self.eval() if self.seen > 3 else self.layer.eval()
        y = self.norm(self.layer(x)) + torch.rand_like(x)
        y.sum().backward()
        x.mul_(0)
        with torch.no_grad():
            self.layer.weight.add_(1)
        return y


def state_of(model: Restless, x: torch.Tensor) -> list[Any]:
    tensors = [x, model.average, *model.state_dict().values()]
    tensors += [one.grad for one in model.parameters() if one.grad is not None]
    plain = [model.seen, list(model.history), [one.training for one in model.modules()]]
    return [one.clone() for one in tensors] + plain


def is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_buffers_gradients_inputs_and_attributes_are_put_back() -> None:
    model, x = Restless(), torch.rand(3, 4)
    model(x.clone())  # so that there are gradients
    before = state_of(model, x)
    gradients = [id(one.grad) for one in model.parameters()]
    told = explain(model, x)
    assert told.explanations[0].failure == ""
    after = state_of(model, x)
    assert [is_same(*pair) for pair in zip(before, after, strict=True)] == [True] * len(before)
    assert [id(one.grad) for one in model.parameters()] == gradients


COUNTS = {"calls": 0, "seen": []}


def test_lists_and_dicts_that_the_function_names_are_put_back() -> None:
    calls, sums = [0], {"total": torch.zeros(2)}

    def counting(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        COUNTS["calls"] += 1
        COUNTS["seen"].append(x)
        sums["total"].add_(x)
        return x * calls[0]

    explain(counting, torch.ones(2))
    assert (calls, COUNTS, sums["total"].tolist()) == ([0], {"calls": 0, "seen": []}, [0.0, 0.0])


def test_a_model_without_gradients_has_none_afterwards() -> None:
    model = Restless()
    explain(model, torch.rand(3, 4))
    assert [one.grad for one in model.parameters()] == [None] * 4


def test_random_numbers_go_on_as_if_nothing_had_happened() -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        random.random(), numpy.random.rand()
        return x + torch.rand(4)

    def next_numbers() -> list[float]:
        return [torch.rand(1).item(), random.random(), float(numpy.random.rand())]

    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(3)
    wanted = next_numbers()
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(3)
    explain(draw, torch.ones(4))
    assert next_numbers() == wanted


def test_a_graph_recorded_before_can_still_run_backward() -> None:
    weight = torch.ones(4, requires_grad=True)

    def change(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight.add_(1)
        return x * weight

    loss = (weight * weight).sum()
    explain(change, torch.ones(4))
    loss.backward()  # torch would refuse, had a saved tensor changed
    assert weight.tolist() == [1.0] * 4
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 4


def test_modes_stance_and_default_dtype_are_put_back() -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return x + 1

    with torch.compiler.set_stance("force_eager"):
        told = explain(change, torch.ones(4))
        graphs, backend = counting_backend()
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(4))
    assert told.explanations[0].num_graphs >= 1
    assert graphs == []
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32


def test_state_is_put_back_after_an_exception_and_what_was_compiled_is_explained() -> None:
    model = Restless()

    def fail(x: torch.Tensor) -> torch.Tensor:
        model.norm(x)
        model.seen = 99
        print(end="")
        raise ValueError("too long")

    before = model.norm.running_mean.clone()  # type: ignore[union-attr, operator]
    recording = explain(fail, torch.rand(3, 4))
    (told,) = recording.explanations
    assert told.failure == "ValueError: too long"
    assert told.num_graphs == 1
    assert "raised" in [finding.rule for finding in recording.findings]
    assert torch.equal(model.norm.running_mean, before)  # type: ignore[arg-type]
    assert model.seen == 0


def test_an_interrupt_is_not_swallowed_and_state_is_put_back() -> None:
    x = torch.ones(4)

    def interrupt(x: torch.Tensor) -> None:
        x.add_(1)
        print(end="")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explain(interrupt, x)
    assert x.tolist() == [1.0] * 4


def test_an_input_that_changes_its_shape_has_the_old_one_afterwards() -> None:
    x = torch.arange(4.0)
    explain(lambda x: x.unsqueeze_(0).mul_(2), x)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    batch = {"x": [x]}
    explain(lambda batch: batch["x"].append(batch["x"][0] + 1), batch)
    assert len(batch["x"]) == 1


def test_nothing_is_left_in_the_functions_globals() -> None:
    before = set(globals())
    explain(looping, torch.ones(4))
    gc.collect()
    assert set(globals()) == before


def test_a_thread_of_the_functions_own_may_compile() -> None:
    graphs, backend = counting_backend()
    compiled = torch.compile(helper, backend=backend)

    def compile_elsewhere(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=compiled, args=(x,))
        thread.start()
        thread.join(timeout=60)
        assert not thread.is_alive()
        return x + 1

    told = explain(compile_elsewhere, torch.ones(4)).explanations[0]
    assert told.failure == ""
    assert len(graphs) == 1


def test_functions_that_no_module_names_are_put_back_too() -> None:
    torch._dynamo.reset()
    graphs, backend = counting_backend()
    scale = 3

    def local(x: torch.Tensor) -> torch.Tensor:
        return helper(x) * scale

    code = local.__code__
    compiled = torch.compile(local, backend=backend)
    compiled(torch.ones(4))
    before = len(graphs)
    assert explain(local, torch.ones(4)).explanations[0].num_graphs == 2
    compiled(torch.ones(4))
    assert len(graphs) == before
    assert local.__code__ is code


def test_state_that_is_too_large_to_restore_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardscope.compile.call_state._MAX_OBJECTS", 5)
    recording = explain(lambda x, table: x + 1, torch.ones(2), [[place] for place in range(9)])
    (gap,) = [gap for gap in recording.gaps if gap.place == "explain"]
    assert "can reach too many objects to restore all of them" in gap.fact
