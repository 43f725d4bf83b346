"""The demo's model is a Llama that trains, and that shards on any mesh it says it does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardscope.cli import _llama as llama
from shardscope.errors import WorldError


@contextmanager
def bare_fake_mesh(**axes: int) -> Iterator[DeviceMesh]:
    size = math.prod(axes.values())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()


def tiny_llama(*, device: str) -> llama.Llama:
    torch.manual_seed(0)
    with torch.device(device):
        return llama.Llama(llama.LLAMA_TINY)


def test_loss_falls_when_it_learns_one_batch() -> None:
    model = tiny_llama(device="cpu")
    optimizer = llama.make_optimizer(model)
    tokens = llama.batch(model, num_sequences=2)

    losses = [llama.train_step(model, optimizer, tokens).item() for _ in range(3)]

    assert all(math.isfinite(loss) for loss in losses)
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


def test_a_token_sees_the_past_and_not_the_future() -> None:
    model = tiny_llama(device="cpu")
    tokens = llama.batch(model)[:, :-1]
    changed = tokens.clone()
    changed[:, 16] = (tokens[:, 16] + 1) % model.config.vocab_size

    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))

    assert difference[:16].max() == 0
    assert difference[16:].min() > 0


def test_rotary_attention_depends_on_distance_alone() -> None:
    config = llama.LLAMA_TINY
    cos, sin = llama.rotary_tables(config, seq_len=32, device=torch.device("cpu"))
    query, key = torch.randn(2, config.head_dim)

    def score(query_at: int, key_at: int) -> torch.Tensor:
        turned_query = llama.rotate(query, cos[query_at], sin[query_at])
        turned_key = llama.rotate(key, cos[key_at], sin[key_at])
        return turned_query @ turned_key

    torch.testing.assert_close(score(9, 4), score(29, 24))
    assert not torch.isclose(score(9, 4), score(9, 5))


@pytest.mark.parametrize(
    "axes", [{"dp": 4, "tp": 4}, {"dp": 8, "tp": 1}, {"dp": 8}, {"tp": 2}], ids=str
)
def test_one_step_on_a_simulated_mesh_updates_sharded_parameters(axes: dict[str, int]) -> None:
    with bare_fake_mesh(**axes) as mesh:
        model = llama.parallelize(tiny_llama(device="meta"), mesh)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            optimizer = llama.make_optimizer(model)
            loss = llama.train_step(model, optimizer, llama.batch(model))

        assert loss.shape == ()
        assert len(optimizer.state) == len(list(model.parameters()))
        wq = model.layers[0].attention.wq.weight
        assert isinstance(wq, DTensor)
        assert wq.dtype == torch.float32
        assert wq.to_local().shape == (64 // math.prod(axes.values()), 64)


def test_heads_that_do_not_divide_are_refused_with_a_remedy() -> None:
    with (
        bare_fake_mesh(tp=8) as mesh,
        pytest.raises(WorldError, match=r"8 ranks.*8 query heads and 4 key-value.*divides both"),
    ):
        llama.parallelize(tiny_llama(device="meta"), mesh)


def test_the_demo_model_has_eight_billion_parameters() -> None:
    num_parameters = sum(parameter.numel() for parameter in llama.model().parameters())

    assert num_parameters == 8_030_261_248
