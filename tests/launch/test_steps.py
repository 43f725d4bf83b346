"""Steps of a program are counted whatever optimizers it has; the last one ends the program."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardscope.errors import LaunchError
from shardscope.launch.instruments import CoverageInstrument
from shardscope.launch.steps import StepCounter, StepsDone


class Counted:
    """A step counter with what it has reported."""

    def __init__(self, limit: int = 2) -> None:
        self.models: list[list[str]] = []
        self.num_refusals = 0
        self.counter = StepCounter(
            limit, on_start=self._start, on_step=lambda: None, on_refusal=self._refuse
        )

    def _start(self, models: list[nn.Module]) -> None:
        self.models.append([type(model).__name__ for model in models])

    def _refuse(self) -> None:
        self.num_refusals += 1

    def run(self, iterate: Callable[[], None]) -> int:
        """The number of iterations that the program begins before it is ended."""
        num_iterations = 0

        def iterate_often() -> None:
            nonlocal num_iterations
            while num_iterations < 20:
                num_iterations += 1
                iterate()

        with self.counter.watching(), pytest.raises(StepsDone):
            iterate_often()
        return num_iterations


def sum_of(model: nn.Module) -> torch.Tensor:
    result: torch.Tensor = model(torch.ones(2, 4)).sum()
    return result


def test_optimizers_of_several_models_step_once_in_a_step() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]

    def iterate() -> None:
        sum_of(first).backward()
        optimizers[0].step()
        (sum_of(first) + sum_of(second)).backward()
        optimizers[1].step()

    counted = Counted()
    assert counted.run(iterate) == 3  # ended by the first call of the third
    assert counted.counter.num_steps == 2
    assert counted.models == [["Linear"]]


def test_a_program_that_goes_on_after_its_last_step_is_reported() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def iterate() -> None:
        sum_of(model).backward()
        optimizer.step()

    counted = Counted()
    counted.run(iterate)
    assert (counted.counter.num_calls, counted.num_refusals) == (3, 0)
    with counted.counter.watching():
        sum_of(model)
    assert (counted.counter.num_calls, counted.num_refusals) == (4, 1)


def test_an_optimizer_that_seldom_steps_is_not_waited_for() -> None:
    often, seldom = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer, unused = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (often, seldom))

    def iterate() -> None:
        sum_of(often).backward()
        optimizer.step()

    assert Counted().run(iterate) == 3
    assert unused.param_groups


def test_gradient_accumulation_and_closures_belong_to_one_step() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = sum_of(model) ** 2
        loss.backward()
        return loss.item()

    def iterate() -> None:
        for _ in range(3):
            sum_of(model).backward()
        optimizer.step(closure)

    assert Counted().run(iterate) == 3


def test_a_program_without_modules_is_observed_from_its_second_step() -> None:
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def iterate() -> None:
        (weight**2).sum().backward()
        optimizer.step()

    counted = Counted()
    assert counted.run(iterate) == 4  # the first is not observed, two are, the fourth is ended
    assert counted.models == [[]]


def test_modules_called_in_workers_and_other_threads_do_not_end_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, transform = nn.Linear(4, 4), nn.ReLU()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pid = os.getpid()
    errors: list[BaseException] = []

    def call_transform() -> None:
        try:
            transform(torch.ones(1))
        except StepsDone as error:
            errors.append(error)

    counted = Counted(limit=1)
    with counted.counter.watching():
        sum_of(model).backward()
        optimizer.step()
        thread = threading.Thread(target=call_transform)
        thread.start()
        thread.join()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        transform(torch.ones(1))
        monkeypatch.undo()
        assert counted.counter.num_steps == 0
        with pytest.raises(StepsDone):
            transform(torch.ones(1))
    assert errors == []
    assert counted.counter.num_steps == 1


def test_coverage_of_a_program_without_modules_is_refused() -> None:
    with pytest.raises(LaunchError, match="what the program trains is not called as a module"):
        CoverageInstrument().start([])


class Probing(nn.Module):
    """Finds out in its constructor how many features a part of it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        num_features = self.first(torch.ones(1, 4)).shape[1]
        self.second = nn.LazyLinear(num_features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(rows))
        return result


class Wrapper(nn.Module):
    """Calls another module, as torch's wrappers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(rows)
        return result


def test_calls_while_a_model_is_built_are_no_training() -> None:
    counted = Counted()

    def train() -> None:
        normalized = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        assert normalized.weight.requires_grad  # computed by a call
        model = Probing()
        sum_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            sum_of(model).backward()
            optimizer.step()

    with counted.counter.watching(), pytest.raises(StepsDone):
        train()
    assert counted.models == [["Probing"]]
    assert counted.counter.num_steps == 2


def test_a_model_that_is_wrapped_after_a_trial_call_is_observed_from_the_start() -> None:
    counted = Counted()

    def train() -> None:
        model: nn.Module = nn.Linear(4, 4)
        sum_of(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model = Wrapper(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            (sum_of(model) + sum_of(model)).backward()
            optimizer.step()

    with counted.counter.watching(), pytest.raises(StepsDone):
        train()
    assert counted.models == [["Linear"], ["Wrapper"]]
    assert counted.counter.num_steps == 2


def test_a_model_called_with_other_parameters_is_still_the_same() -> None:
    counted = Counted()
    model = nn.Linear(4, 4)

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (torch.ones(2, 4),)).sum()

    with counted.counter.watching():
        parameters = dict(model.named_parameters())
        for _ in range(3):
            gradients = torch.func.grad(loss)(parameters)
            parameters = {name: parameters[name] - gradients[name] for name in parameters}
    assert counted.models == [["Linear"]]
