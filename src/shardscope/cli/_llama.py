"""The demo's model: an 8B-class Llama-style decoder, its parallel plan and one training step.

It has the `trace TARGET` shape (`model`, `batch`, `parallelize`, `step`), so it is also an example.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from shardscope.errors import WorldError

__frames__ = "user's"  # stands for the user's program


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The sizes that make one Llama differ from another."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


LLAMA_8B = LlamaConfig(
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    hidden_dim=14336,
    vocab_size=128256,
    max_seq_len=8192,
)

LLAMA_TINY = LlamaConfig(
    dim=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    hidden_dim=192,
    vocab_size=256,
    max_seq_len=32,
)


def rotary_tables(
    config: LlamaConfig, *, seq_len: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's rotation angles, each (seq_len, head_dim)."""
    exponents = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
    positions = torch.arange(seq_len, device=device)
    angles = torch.outer(positions, config.rope_theta**-exponents).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (batch, heads, seq, head_dim) by its positions, in the tables' precision."""
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat((-second, first), dim=-1) * sin).type_as(heads)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one key and value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = rotate(self._split_heads(self.wq(x)), cos, sin)
        key = rotate(self._split_heads(self.wk(x)), cos, sin)
        value = self._split_heads(self.wv(x))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return cast(Tensor, self.wo(mixed.transpose(1, 2).flatten(2)))

    def _split_heads(self, x: Tensor) -> Tensor:
        # The number of heads is inferred: under tensor parallelism a rank has only its share.
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: a gated projection up, then a projection down."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.w2(functional.silu(self.w1(x)) * self.w3(x)))


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return cast(Tensor, x + self.feed_forward(self.ffn_norm(x)))


class Llama(nn.Module):
    """Token ids (batch, seq) in, logits (batch, seq, vocab) out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        # Not buffers: `to_empty` would leave those filled with garbage.
        cos, sin = rotary_tables(self.config, seq_len=tokens.shape[1], device=tokens.device)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return cast(Tensor, self.output(self.norm(x)))


def model() -> Llama:
    """The 8B model on the meta device: its shapes and nothing else."""
    with torch.device("meta"):
        return Llama(LLAMA_8B)


def batch(model: Llama, *, num_sequences: int = 1, seq_len: int | None = None) -> Tensor:
    """Random token ids for one data-parallel rank, one longer than `seq_len` for the targets."""
    length = seq_len or model.config.max_seq_len
    device = next(model.parameters()).device
    return torch.randint(model.config.vocab_size, (num_sequences, length + 1), device=device)


def parallelize(model: Llama, mesh: DeviceMesh) -> Llama:
    """Shard `model` in place: tensor parallel over axis "tp", FSDP2 over axis "dp", if present."""
    axes = mesh.mesh_dim_names or ()
    if "tp" in axes:
        _apply_tensor_parallel(model, mesh["tp"])
    if "dp" in axes:
        _apply_fully_shard(model, mesh["dp"])
    return model


def _apply_tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    _check_heads_divide(model.config, mesh.size())
    parallelize_module(model, mesh, _root_plan())
    for layer in model.layers:
        parallelize_module(layer, mesh, _block_plan())


def _check_heads_divide(config: LlamaConfig, num_ranks: int) -> None:
    if config.num_heads % num_ranks or config.num_kv_heads % num_ranks:
        raise WorldError(
            f"mesh axis 'tp' has {num_ranks} ranks, which do not divide the model's "
            f"{config.num_heads} query heads and {config.num_kv_heads} key-value heads. "
            f"Choose a tp that divides both."
        )


# Between the layers each rank holds a slice of the sequence (Shard(1)), so the residual stream
# and the norms cost a tp-th; attention and feed-forward gather it and scatter their sums.
def _root_plan() -> dict[str, ParallelStyle]:
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }


def _block_plan() -> dict[str, ParallelStyle]:
    gather_sequence = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    return {
        "attention_norm": SequenceParallel(),
        "attention": gather_sequence,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }


def _apply_fully_shard(model: Llama, mesh: DeviceMesh) -> None:
    # Inputs are not cast: the hidden states are bf16 already and the rotary tables must stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def make_optimizer(model: Llama, *, lr: float = 3e-4) -> torch.optim.Optimizer:
    """AdamW with the betas and weight decay that Llama was trained with."""
    return torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )


def compute_gradients(model: Llama, tokens: Tensor) -> Tensor:
    """Forward, loss and backward; returns the loss."""
    # The loss stays sharded over the vocabulary: gathered logits would be the largest tensor
    # (and collective) of the step. For a model without tensor parallelism this changes nothing.
    with loss_parallel():
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def train_step(model: Llama, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """One training step: gradients, clipping and update; returns the loss."""
    loss = compute_gradients(model, tokens)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def step(model: Llama, tokens: Tensor) -> Tensor:
    """One training step with a fresh optimizer."""
    return train_step(model, make_optimizer(model), tokens)
