"""As few collectives as Megatron's hand-written layers, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from parallel_cases.attention import QKVO, Attention, by_hand
from parallel_cases.case import Case, drawn, kinds, tokens
from parallel_cases.layers import PAIR, Mlp
from parallel_cases.transformers import LLAMA, LLAMA_SEQUENCE, LLAMA_VOCABULARY, Llama, Loss
from shardscope.parallel import Colwise, Rowwise, Shard

REDUCE, GATHER, SCATTER = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"


class After(nn.Module):
    """Something that learns comes first, so that gradients go through all of what follows."""

    def __init__(self, last: nn.Module, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.last = last

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x))


class Shared(nn.Module):
    """One value that three layers need replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        return self.layers[0](h) * self.layers[1](h) + self.layers[2](h)


def counts(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """Forward alone, and forward and backward, on every rank the same."""
    program, joint = case.parallelize(), case.parallelize(training=True)
    ranks = [program.mesh.rank_at(coordinate) for coordinate in program.mesh.coordinates]
    forward = [kinds(program.exported(rank).graph.nodes) for rank in ranks]
    both = [kinds(joint.joint(rank).graph_module.graph.nodes) for rank in ranks]
    assert all(by_kind == forward[0] for by_kind in forward)
    assert all(by_kind == both[0] for by_kind in both)
    return dict(forward[0]), dict(both[0])


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4"])
def test_a_pair_of_layers_is_one_reduction_forward_and_one_backward(mesh: str) -> None:
    plan = {f"last.{name}": style for name, style in PAIR.items()}
    case = Case("pair", lambda: After(Mlp(), 8), lambda: (drawn(4, 8),), plan, mesh=mesh)
    assert counts(case) == ({REDUCE: 1}, {REDUCE: 2})


def test_attention_is_one_reduction_forward_and_one_backward() -> None:
    plan = {f"last.{name}": style for name, style in QKVO.items()}
    make = lambda: After(Attention(by_hand), 16)  # noqa: E731
    case = Case("attention", make, lambda: (drawn(2, 6, 16),), plan)
    assert counts(case) == ({REDUCE: 1}, {REDUCE: 2})


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_llama_layer_is_two_reductions_forward_and_two_backward(num_layers: int) -> None:
    forward, both = counts(llama(LLAMA, num_layers))
    assert forward == {REDUCE: 2 * num_layers}
    assert both == {REDUCE: 4 * num_layers}


@pytest.mark.parametrize("num_layers", [1, 3])
def test_along_the_sequence_each_reduction_is_a_scatter_and_a_gather(num_layers: int) -> None:
    """Queries, keys and values share one gather, as do the gate and what it lets through."""
    forward, both = counts(llama(LLAMA_SEQUENCE, num_layers))
    num = 2 * num_layers + 1  # one more: after the embedding, and before the head
    of_loss, num_norms = 3, 2 * num_layers + 1
    assert forward == {SCATTER: num, GATHER: num, REDUCE: of_loss}
    assert both == {SCATTER: 2 * num, GATHER: 2 * num, REDUCE: of_loss + 1 + num_norms}


def test_logits_over_a_sharded_vocabulary_are_never_gathered() -> None:
    program = llama(LLAMA_VOCABULARY, 1).parallelize(training=True)
    graph = program.joint(0).graph_module.graph
    sent = [node for node in graph.nodes if str(node.target).startswith("_c10d_functional.all_")]
    num_tokens, width = 16, 16
    assert sent
    for node in sent:
        assert node.args[0].meta["val"].numel() <= num_tokens * width
        assert GATHER not in str(node.target)
    of_loss = [node for node in sent if node.args[0].meta["val"].numel() <= num_tokens]
    assert len(of_loss) == 4  # the largest, the sum, the chosen ones; and the sum's gradient


class Embedded(nn.Module):
    """An MLP on embedded tokens, to which something is added that no plan mentions."""

    def __init__(self, addition: str) -> None:
        super().__init__()
        self.addition = addition
        self.embed, self.positions = nn.Embedding(12, 8), nn.Embedding(16, 8)
        self.cls, self.norm, self.mlp = nn.Parameter(torch.ones(1, 1, 8)), nn.LayerNorm(8), Mlp()
        self.register_buffer("indices", torch.arange(16)[None])

    def forward(self, ids: Tensor) -> Tensor:
        h, (batch, length) = self.embed(ids), ids.shape
        if self.addition == "token":
            h = torch.cat([self.cls.expand(batch, -1, -1), h], 1)
        elif self.addition == "repeated token":
            h = torch.cat([self.cls.repeat(batch, 1, 1), h], 1)
        elif self.addition == "positions":
            h = h + self.positions(self.indices[:, :length].expand(batch, -1))
        elif self.addition == "mask":
            rows, columns = torch.arange(batch)[:, None, None], torch.arange(length)[None, None]
            h = h * torch.ones_like(ids, dtype=torch.bool)[rows, columns].transpose(1, 2)
        return self.mlp(self.norm(h))


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4"])
@pytest.mark.parametrize("addition", ["nothing", "token", "repeated token", "positions", "mask"])
def test_what_no_plan_mentions_stays_replicated(addition: str, mesh: str) -> None:
    """Slicing a replicated value costs nothing, but the gathers that must follow do."""
    plan = {f"mlp.{name}": style for name, style in PAIR.items()}
    case = Case("embedded", lambda: Embedded(addition), lambda: (tokens(4, 8),), plan, mesh=mesh)
    assert counts(case) == ({REDUCE: 1}, {REDUCE: 2})
    placed = case.parallelize(strict=True).placements
    sharded = {name for name, (placement,) in placed.items() if placement.startswith("S")}
    assert {name.removeprefix("p_") for name in sharded} <= {
        *("mlp_up_weight", "mlp_up_bias", "mlp_down_weight", "linear", "gelu"),
    }


@pytest.mark.parametrize("addition", ["token", "repeated token"])
def test_what_is_expanded_to_a_sharded_batch_is_expanded_by_each_rank(addition: str) -> None:
    """Sliced after it is expanded, its gradient would be gathered, over the entire batch."""
    data = {"ids": {"dp": Shard(0)}}
    make, give = lambda: Embedded(addition), lambda: (tokens(4, 8),)
    case = Case("embedded", make, give, {}, mesh="dp=2", inputs=data)
    num_trained, of_loss = 8, 1
    assert counts(case) == ({}, {REDUCE: num_trained + of_loss})


def test_a_value_that_several_ops_need_replicated_is_gathered_once() -> None:
    plan = {"up": Colwise()}
    case = Case("shared", Shared, lambda: (drawn(4, 8),), plan)
    assert counts(case) == ({GATHER: 1}, {GATHER: 1})


def test_the_gradient_of_a_value_with_several_sharded_uses_is_reduced_once() -> None:
    plan = {f"layers.{i}": Colwise() for i in range(3)}
    case = Case("shared", Shared, lambda: (drawn(4, 8),), plan, outputs={0: Shard(1)})
    forward, both = counts(case)
    assert forward == {}
    assert both == {REDUCE: 2}  # of the loss, and of h's gradient


def test_a_sharded_batch_costs_one_reduction_per_gradient() -> None:
    data = {"x": {"dp": Shard(0)}}
    case = Case("data", Mlp, lambda: (drawn(4, 8),), {}, mesh="dp=2", inputs=data)
    num_parameters, of_loss = 4, 1
    assert counts(case) == ({}, {REDUCE: num_parameters + of_loss})


def test_sharded_weights_are_gathered_once_and_their_gradients_reduce_scattered_once() -> None:
    data, every = {"x": {"dp": Shard(0)}}, {"**": {"dp": Shard(0)}}
    case = Case("data", Mlp, lambda: (drawn(4, 8),), every, mesh="dp=2", inputs=data)
    assert counts(case) == ({GATHER: 4}, {GATHER: 4, SCATTER: 4, REDUCE: 1})


def test_two_axes_cost_what_each_costs_alone() -> None:
    plan = {f"last.{name}": style for name, style in PAIR.items()}
    data = {"x": {"dp": Shard(0)}}
    make = lambda: After(Mlp(), 8)  # noqa: E731
    case = Case("both", make, lambda: (drawn(4, 8),), plan, mesh="dp=2,tp=2", inputs=data)
    num_parameters, of_loss = 6, 1
    assert counts(case) == ({REDUCE: 1}, {REDUCE: 2 + num_parameters + of_loss})


def test_rows_of_an_embedding_and_rows_of_a_head_are_one_reduction_each() -> None:
    plan = {"embed": Rowwise(), "head": Rowwise()}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(12, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(F.relu(self.embed(ids)))

    case = Case("rows", Model, lambda: (tokens(2, 5),), plan)
    assert counts(case)[0] == {REDUCE: 2}


def llama(plan: dict[str, Any], num_layers: int) -> Case:
    named = {f"lm.{name}": style for name, style in plan.items()}
    text = lambda: (tokens(2, 8), tokens(2, 8))  # noqa: E731
    return Case("llama", lambda: Loss(Llama(num_layers)), text, named)
