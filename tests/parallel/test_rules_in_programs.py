"""Rules at work in whole programs, which are verified: against the single device, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import (
    alpha_dropout,
    cross_entropy,
    dropout,
    mse_loss,
    scaled_dot_product_attention,
)

from shardscope.parallel.api import parallelize
from shardscope.parallel.program import ParallelProgram
from shardscope.plan.placements import Shard


class Scaled(nn.Module):
    """A function of an input that a parameter scales, so that there is a gradient to compare."""

    def __init__(self, function: Callable[..., Tensor], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        self.inner = inner
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return self.function(x) if self.inner is None else self.function(self.inner, x)


def cut(
    function: Callable[..., Tensor],
    shape: tuple[int, ...],
    inputs: dict[str, Shard],
    *,
    inner: nn.Module | None = None,
    open_dim: int | None = None,
    training: bool = False,
) -> ParallelProgram:
    """The program of the function with its input cut so, verified."""
    sizes = {open_dim: 2 * torch.export.Dim("half", min=2, max=64)}
    dynamic = None if open_dim is None else {"x": sizes}
    program = torch.export.export(
        Scaled(function, inner), (torch.randn(shape),), dynamic_shapes=dynamic
    )
    mesh = ",".join(f"{axis}=2" for axis in inputs)
    return parallelize(program, mesh, None, inputs={"x": inputs}, training=training)


def kinds(program: ParallelProgram) -> list[str]:
    return [f"{one.source} -> {one.target}" for one in program.moves]


MASKED: list[Callable[[Tensor], Tensor]] = [
    lambda x: dropout(x, 0.5),
    lambda x: dropout(x.transpose(0, 1), 0.5),
    lambda x: alpha_dropout(x.permute(2, 0, 1), 0.3, True),
    lambda x: x + torch.randn_like(x.transpose(1, 2)).transpose(1, 2),
]


@pytest.mark.parametrize("function", MASKED)
@pytest.mark.parametrize("dim", [0, 2])
def test_ranks_draw_what_the_single_device_draws(
    function: Callable[[Tensor], Tensor], dim: int
) -> None:
    program = cut(
        lambda x: function(x).square().sum(), (4, 6, 8), {"tp": Shard(dim)}, training=True
    )
    assert kinds(program) == ["P -> R"]
    assert program.fallbacks == []


def test_draws_of_open_sizes() -> None:
    both = {"dp": Shard(0), "tp": Shard(2)}
    program = cut(lambda x: dropout(x.transpose(0, 1), 0.5), (4, 6, 8), both, open_dim=0)
    assert program.fallbacks == []


def test_attention_with_dropout_is_decomposed_and_not_gathered() -> None:
    def attend(x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True).square().sum()

    program = cut(attend, (2, 4, 6, 8), {"tp": Shard(1)}, training=True)
    assert (kinds(program), program.fallbacks) == (["P -> R"], [])


def test_batch_norm_over_a_sharded_batch_has_the_running_statistics_of_the_full_batch() -> None:
    def normalize(inner: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = inner(x).square().mean()
        return result

    program = cut(normalize, (4, 3, 5), {"dp": Shard(0)}, inner=nn.BatchNorm1d(3), training=True)
    assert kinds(program) == ["P -> R"] * 3
    assert program.fallbacks == []


@pytest.mark.parametrize("num_classes", [8, 7])
def test_a_vocabulary_is_never_gathered_even_if_it_does_not_divide(num_classes: int) -> None:
    def loss(x: Tensor) -> Tensor:
        target = torch.arange(6) % num_classes
        return cross_entropy(x, target.masked_fill(target == 1, -100), label_smoothing=0.1)

    program = cut(loss, (6, num_classes), {"tp": Shard(1)}, training=True)
    assert program.fallbacks == []
    gathered = [one for one in program.moves if isinstance(one.source, Shard)]
    assert gathered == []


def test_losses_with_broadcast_targets_are_sharded() -> None:
    program = cut(lambda x: mse_loss(x, 2 * x.detach()), (4, 6), {"tp": Shard(1)}, training=True)
    assert (kinds(program), program.fallbacks) == (["P -> R"], [])


def test_the_last_token_of_a_sharded_sequence_is_reduced_instead_of_gathered() -> None:
    program = cut(lambda x: x[:, -1:] + x[:, -1].unsqueeze(1), (2, 8, 4), {"tp": Shard(1)})
    assert kinds(program) == ["P -> R"]


def write(x: Tensor) -> Tensor:
    cache = torch.zeros_like(x)
    cache[:, 2:5] = x[:, :3] * 2
    cache[:, -1] = x.sum(1)
    return cache.square().sum()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_writes_to_a_sharded_tensor_are_done_on_shards(dim: int) -> None:
    program = cut(write, (4, 8, 6), {"tp": Shard(dim)}, training=True)
    assert all("scatter" not in one.origin.op for one in program.fallbacks)


def test_replicated_values_with_dynamic_sizes_can_be_sharded() -> None:
    def add(x: Tensor) -> Any:
        return x + x.new_ones(x.shape[0], 1)

    program = cut(add, (4, 6), {"tp": Shard(0)}, open_dim=0)
    assert kinds(program) == ["R -> S(0)"]


def test_a_dynamic_dim_that_is_repeated_is_sharded_in_blocks() -> None:
    program = cut(lambda x: x.repeat(2, 1), (8, 4), {"tp": Shard(0)}, open_dim=0)
    assert (kinds(program), program.fallbacks) == ([], [])
