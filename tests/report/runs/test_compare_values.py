"""Two runs of one process: what cannot be compared says so, and repeated modules are compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from shardscope import Recording, compare_runs, save, trace
from shardscope.cli import main
from shardscope.errors import DiffError
from shardscope.record import ValueKind


def run(make: Callable[[], nn.Module], *, seed: int = 0, steps: range = range(1, 4)) -> Recording:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(5)
    torch.manual_seed(seed)
    with trace(model, values=steps) as t:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=data)).square().mean().backward()
            optimizer.step()
    return t.recording


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


class Repeated(nn.Module):
    """Calls one layer three times; the last call may be scaled."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.activation = nn.Tanh()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Repeat the layer."""
        for call in range(3):
            x = self.activation(self.layer(x * (self.factor if call == 2 else 1.0)))
        return x


def test_the_call_of_a_repeated_module_that_deviates_is_named() -> None:
    result = compare_runs(run(Repeated), run(lambda: Repeated(1.01)))
    first = result.comparisons[0].deviations[0]
    assert (first.kind, first.name, first.call) == (ValueKind.OUTPUT, "layer", 2)
    assert result.findings[0].subject == "layer, output, call 2, step 1"


def test_tolerance_accepts_a_deviation() -> None:
    runs = run(Repeated), run(lambda: Repeated(1.01))
    assert compare_runs(*runs, tolerance=0.05).findings == ()


def test_weights_that_differ_from_the_beginning_are_named_as_such() -> None:
    def other() -> nn.Module:
        torch.manual_seed(1)
        return linear()

    (finding,) = compare_runs(run(linear), run(other)).findings
    assert (finding.rule, finding.subject) == ("run-weights", "0.weight, initial parameter, step 1")


def test_runs_without_common_steps_or_values_are_refused() -> None:
    early, late = run(linear, steps=range(1, 2)), run(linear, steps=range(2, 4))
    with pytest.raises(DiffError, match="A has step 1; B has step 2-3"):
        compare_runs(early, late)
    with pytest.raises(DiffError, match="B has no sampled values"):
        compare_runs(early, Recording(run=early.run))


def test_random_numbers_that_differ_end_the_comparison_with_exit_code_2(tmp_path: Path) -> None:
    files = []
    for seed in (1, 2):
        files.append(str(tmp_path / f"{seed}.json"))
        save(run(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout()), seed=seed), files[-1])
    result = CliRunner().invoke(main, ["compare", *files])
    assert result.exit_code == 2
    assert "1 draws random numbers, which differ" in " ".join(result.output.split())
    equal = CliRunner().invoke(main, ["compare", files[0], files[0]])
    assert equal.exit_code == 0


def test_files_that_a_pattern_or_folder_does_not_have_are_an_error(tmp_path: Path) -> None:
    for run_a, text in (("no-*.json", "no file matches"), (str(tmp_path), "has no recordings")):
        result = CliRunner().invoke(main, ["compare", run_a, run_a])
        assert result.exit_code == 2
        assert text in " ".join(result.output.split())
