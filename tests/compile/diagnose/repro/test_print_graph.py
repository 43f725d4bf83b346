"""Captured programs, printed as source, compute what they computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from repro_scripts import WRONG, assert_same, assert_tidy, capture, load
from shardscope.compile.diagnose.repro.write import write_repro
from shardscope.compile.diagnose.subgraph.subgraph import Compiler


@pytest.fixture(autouse=True)
def _own_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


class Blocks(nn.Module):
    """Convolution, norms, dropout that is off, and an embedding with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.group = nn.GroupNorm(1, 3)
        self.table = nn.Embedding(5, 3)
        self.register_buffer("scale", torch.tensor([0.5, 2.0, -1.0]))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.drop(self.group(functional.silu(self.norm(self.conv(x)))))
        h = functional.max_pool2d(h, 2) * self.scale[:, None, None]
        found = self.table(index) @ self.table.weight.T
        return {"image": h, "found": found.softmax(-1)}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (value.view(*value.shape[:2], 2, 4).transpose(1, 2) for value in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.rms(x + self.out(mixed.transpose(1, 2).reshape(x.shape)))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.sin() * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * ctx.factor, None


def indexing(x):
    y = x[:, 1:].relu() + 1
    z = torch.cat([y, -y], dim=-1)
    z[0] = 1
    z[:, ::2] += 2
    return z[None, ..., 1], z[..., None], z[[0, 2]], x[x.argmax(0)], x.T, z.mT


def arithmetic(x):
    y = (2 - x) / 3 + x**2 - (-1) ** x.round() + x // 2 + x % 3
    m = (x > 0) & ~(x >= 1) | (x < -1) ^ (x != x.abs())
    return y, m, x @ x.T, 1 / (x * x + 1), -x, abs(x), +x, float("inf") * x, x == 0, x <= 1j.real


def activations(x):
    h = functional.gelu(x, approximate="tanh")
    h = functional.leaky_relu(h, negative_slope=0.2) + functional.softplus(h) + torch.special.erf(h)
    return functional.log_softmax(h, dim=-1), torch.linalg.norm(h, dim=0), torch.fft.rfft(h).abs()


def dtypes(x):
    y = x.to(torch.bfloat16).float().to(dtype=torch.float64)
    z = torch.zeros_like(x, dtype=torch.int32) + torch.arange(x.shape[1], device=x.device)
    return y, z, x.type_as(y), torch.full((2, 3), float("-inf")), torch.ones(2, dtype=torch.bool)


def many_outputs(x):
    values, indices = x.topk(2)
    low, high = x.min(), x.max()
    first, *rest = x.split(2)
    return (
        values,
        indices,
        low,
        high,
        first,
        rest[0],
        x.max(1).values,
        torch.var_mean(x, 0)[1],
        x.unbind()[0],
    )


def modes(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T
        with torch.no_grad():
            z = y + 1
        with torch.autocast("cpu", enabled=False):
            w = x @ x.T
    with torch.no_grad():
        pass
    return y, z, w, x * 2


def in_place(x):
    y = x.clone()
    y.add_(1).mul_(2)
    y[1:].zero_()
    torch.add(x, 1, out=torch.empty_like(x))
    y += 3
    return y.sqrt_(), y


def keywords(x):
    return (
        torch.sum(input=x, dim=(0, 1), keepdim=True),
        x.std(dim=0, correction=0),
        torch.einsum("ij,kj->ik", x, x),
        functional.pad(x, (1, 2), mode="constant", value=0.5),
        torch.nn.functional.interpolate(x[None], scale_factor=2.0, mode="nearest"),
        x.clamp(min=-0.5, max=None),
        torch.where(x > 0, x, torch.tensor(0.25)),
    )


def conditional(x):
    return torch.cond(x.sum() > 0, lambda y: y.sin() + 1, lambda y: y.cos() - 1, (x,))


def checkpointed(x):
    return checkpoint(lambda y: torch.sin(y) * y, x, use_reentrant=False) + 1


def looped(x):
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))


def native(x):
    y = torch.ops.aten.add.Tensor(x, x, alpha=2)
    return torch.ops.aten.native_layer_norm(y, [4], None, None, 1e-5)


def complexes(x):
    y = torch.complex(x, x * 2) * (1 - 2j)
    return y.conj(), y.real, torch.view_as_real(y), y.abs()


SQUARE = torch.tensor([[0.1, -2.0, 3.5, 0.0], [1.0, -0.25, 1e-30, 7.0], [9.0, 0.3, -5, 2]])


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


torch.manual_seed(3)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{
        function.__name__: (function, (leaf(SQUARE),))
        for function in (activations, checkpointed, indexing, keywords, many_outputs, modes)
    },
    **{
        function.__name__: (function, (SQUARE.clone(),))
        for function in (arithmetic, complexes, conditional, dtypes, in_place, looped, native)
    },
    "autograd function": (lambda x: Doubled.apply(x, 3.0) + 1, (leaf(SQUARE),)),
    "autograd function that keeps sizes": (
        lambda x: Doubled.apply(x * 1, x.shape[0]) + 1,
        (leaf(SQUARE),),
    ),
    "blocks": (Blocks(), (torch.randn(1, 2, 4, 4), torch.tensor([0, 3]))),
    "attention": (Attention(), (torch.randn(1, 3, 8),)),
    "mlp": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (SQUARE,)),
    "transformer layer": (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (torch.randn(1, 3, 8),),
    ),
    "rng": (lambda x: x + torch.rand_like(x) + functional.dropout(x, 0.5), (SQUARE,)),
    "no inputs": (lambda: torch.arange(4).float().cumsum(0), ()),
    "constant output": (lambda x: (x + 1, 3, None, "a"), (SQUARE,)),
    "zero elements": (lambda x: (x.sum(), x * 2), (torch.empty(0, 3),)),
    "scalar": (lambda x: x * 2, (torch.tensor(1.5, requires_grad=True),)),
}


# Dynamo makes an instance of each autograd function that it sees.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_printed_program_computes_what_the_captured_one_does(name: str, tmp_path: Path) -> None:
    function, args = PROGRAMS[name]
    subgraph = capture(function, *args)
    path = write_repro(subgraph, Compiler("inductor"), WRONG, folder=tmp_path)
    assert_tidy(assert_same(subgraph, path))


def test_inductor_draws_what_eager_execution_draws(tmp_path: Path) -> None:
    function, args = PROGRAMS["rng"]
    subgraph = capture(function, *args)
    state = torch.get_rng_state()
    text = write_repro(subgraph, Compiler("inductor"), WRONG, folder=tmp_path).read_text()
    assert 'options={"fallback_random": True}' in text
    assert torch.equal(state, torch.get_rng_state())
    function, args = PROGRAMS["mlp"]
    path = write_repro(capture(function, *args), Compiler("inductor"), WRONG, folder=tmp_path)
    assert "fallback_random" not in path.read_text()


def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = op == torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_checkpoint_keeps_its_policy(tmp_path: Path) -> None:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    subgraph = capture(
        lambda x: checkpoint(lambda y: y.sin() @ y.T, x, use_reentrant=False, context_fn=contexts),
        leaf(SQUARE),
    )
    path = write_repro(subgraph, Compiler("inductor"), WRONG, folder=tmp_path)
    text = assert_same(subgraph, path)
    assert "\ndef policy(context: Any" in text
    assert "create_selective_checkpoint_contexts, policy)" in text


def nested_bodies(x):
    return torch.cond(
        x.sum() > 0,
        lambda y: torch.cond(y.mean() > 0, lambda z: z + 1, lambda z: z - 1, (y,)),
        lambda y: y.cos(),
        (x,),
    )


BODIES = {"nested": nested_bodies, "conditional": conditional, "checkpointed": checkpointed}


@pytest.mark.parametrize("name", BODIES)
def test_dynamo_takes_printed_bodies_as_it_took_the_first_ones(name: str, tmp_path: Path) -> None:
    subgraph = capture(BODIES[name], SQUARE.clone())
    path = write_repro(subgraph, Compiler("eager"), WRONG, folder=tmp_path)
    scope = load(path)
    again = capture(scope["f"], *scope["make_inputs"]())
    names = [[node.name for node in value.graph.graph.nodes] for value in (again, subgraph)]
    assert [len(name) for name in names] == [len(names[0])] * 2
    assert_same(subgraph, path)
