"""torch's op coverage summary under its own names, where torch's own fails or is wrong."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardscope.compat import get_inductor_decomp_graphs, print_op_coverage_summary
from small_models import MLP, batch


@torch.library.custom_op("op_summary_tests::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    """An op that DTensor does not know."""
    return x + 1


unknown.register_fake(lambda x: torch.empty_like(x))


class Tied(nn.Module):
    """An embedding whose weight is also the output's, and a dict for an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, scale: float) -> dict[str, Tensor]:
        return {"logits": self.out(self.embed(tokens)) * scale, "seen": unknown(tokens)}


TOKENS = torch.zeros(2, 4, dtype=torch.long)


def test_graphs_are_forward_and_backward_also_of_tied_weights_and_dicts() -> None:
    model = Tied()
    for _ in range(2):
        forward, backward = get_inductor_decomp_graphs(model, (TOKENS,), {"scale": 2.0})
        assert "aten.embedding.default" in {str(node.target) for node in forward.graph.nodes}
        assert "aten.mm.default" in {str(node.target) for node in backward.graph.nodes}
    assert model.out.weight is model.embed.weight
    assert model.out.weight.grad is None


def test_a_model_without_gradients_has_one_graph() -> None:
    assert len(get_inductor_decomp_graphs(MLP().requires_grad_(False), (batch(),), None)) == 1


def rows(printed: str) -> dict[str, tuple[int, bool]]:
    """Count and support by op."""
    found = {}
    for line in printed.splitlines()[2:]:
        op, *_, count, supported = line.split()
        found[op] = (int(count), supported == "True")
    return found


def test_the_table_says_what_dtensor_can_run_on_every_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tables = []
    for _ in range(2):
        print_op_coverage_summary(Tied(), (TOKENS,), {"scale": 2.0})
        tables.append(rows(capsys.readouterr().out))
    assert tables[0] == tables[1]
    assert tables[0]["aten.mm.default"] == (3, True)
    assert tables[0]["op_summary_tests.unknown.default"] == (1, False)
    counts = [count for count, _ in tables[0].values()]
    assert counts == sorted(counts, reverse=True)


def test_the_csv_is_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    print_op_coverage_summary(MLP(), (batch(),), {}, output_csv=True)
    written = list(csv.DictReader((tmp_path / "op_summary.csv").read_text().splitlines()))
    assert list(written[0]) == ["Operator", "Schema", "Total Count", "Supported"]
    assert {row["Operator"] for row in written} == set(rows(capsys.readouterr().out))


def test_a_model_that_no_single_graph_holds_is_run_instead(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Choosing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() if x.sum().item() > 0 else x.tanh()

    print_op_coverage_summary(Choosing(), (torch.ones(4, requires_grad=True),), {})
    printed = capsys.readouterr().out
    assert "The model is not a single graph" in printed
    assert "aten.relu.default" in printed
