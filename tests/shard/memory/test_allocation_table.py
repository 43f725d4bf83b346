"""The table of a step's allocations: lines, phases, and the limit of its length."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from shardscope import memory
from shardscope.record import AllocationTable, MemoryKind, Phase
from shardscope.shard.memory import profile as profile_module

DIM = 256
SQUARE = DIM * DIM * 4


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM, bias=False)
        self.down = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        hidden = hidden.sigmoid()
        return self.down(hidden)


def _sum_lines(table: AllocationTable, phase: Phase) -> Counter[str]:
    """Bytes that a phase allocated, by the text of the line."""
    sums: Counter[str] = Counter()
    for at, source, num_bytes in zip(table.phase, table.source, table.num_bytes, strict=True):
        if list(Phase)[at] is phase:
            sums["" if source < 0 else table.sources[source].text] += num_bytes
    return sums


def _record(model: nn.Module) -> AllocationTable:
    rows = torch.randn(DIM, DIM)
    result = memory(model, lambda: model(rows).sum().backward())
    assert result.profile.allocations is not None
    return result.profile.allocations


def test_what_backward_allocates_belongs_to_the_line_of_forward_whose_gradient_it_is() -> None:
    table = _record(Mlp())
    forward, backward = (_sum_lines(table, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    assert forward["hidden = hidden.sigmoid()"] == SQUARE
    assert backward["hidden = hidden.sigmoid()"] == SQUARE
    # The gradients of down's weight and of its input, and a workspace of cuBLAS.
    assert backward["return self.down(hidden)"] >= 2 * SQUARE
    assert backward["hidden = self.up(x)"] >= SQUARE
    calls = {text for text in backward if text.endswith(".backward())")}
    assert all(backward[text] < SQUARE for text in calls)  # the first gradient, a scalar


def test_parameters_were_there_before_and_gradients_outlive_the_step() -> None:
    table = _record(Mlp())
    kinds = list(MemoryKind)
    for start, end, kind, source in zip(
        table.start, table.end, table.kind, table.source, strict=True
    ):
        if kinds[kind] is MemoryKind.PARAMETERS:
            assert (start < 0, end, source) == (True, table.last_order + 1, -1)
    gradients = [at for at, kind in enumerate(table.kind) if kinds[kind] is MemoryKind.GRADIENTS]
    assert any(table.end[at] > table.last_order for at in gradients)


def test_beyond_the_limit_the_smallest_are_left_out_and_a_gap_says_so(monkeypatch) -> None:
    full = _record(Mlp())
    monkeypatch.setattr(profile_module, "MAX_ROWS", 6)
    model, rows = Mlp(), torch.randn(DIM, DIM)
    result = memory(model, lambda: model(rows).sum().backward())
    table = result.profile.allocations
    assert len(table.start) == 6
    assert table.num_left_out == len(full.start) - 6
    assert min(table.num_bytes) >= table.max_left_out_bytes
    (gap,) = (gap for gap in result.recording.gaps if gap.place == "allocations")
    assert f"{table.num_left_out} allocations of at most" in gap.fact
    assert "lists the 6 largest" in gap.fact
    assert result.profile.samples[-1].num_bytes  # sums are of everything


@pytest.mark.parametrize("has_data", [False, True])
def test_a_line_is_known_for_functions_outside_of_modules(has_data) -> None:
    weight = nn.Parameter(torch.randn(DIM, DIM))
    model = nn.ParameterList([weight]) if has_data else None

    def step() -> None:
        doubled = weight * 2
        doubled.sum().backward()

    table = memory(model, step).profile.allocations
    assert any(source.text == "doubled = weight * 2" for source in table.sources)
