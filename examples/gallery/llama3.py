"""Llama 3 with FSDP2, tensor parallelism and activation checkpointing, in bf16.

`make_target(config, …)` returns what a TARGET file defines, for llama3_8b.py and llama3_405b.py.
Sizes are those that Meta published.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu


@dataclass(frozen=True)
class Config:
    """The sizes that make one Llama differ from another."""

    dim: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    num_kv_heads: int = 8
    vocab_size: int = 128_256
    seq_len: int = 8192


LLAMA3_8B = Config(dim=4096, num_layers=32, num_heads=32, hidden_dim=14_336)
LLAMA3_405B = Config(dim=16_384, num_layers=126, num_heads=128, hidden_dim=53_248)


def rotate(heads):
    """Apply rotary position embeddings to (batch, heads, sequence, head dim)."""
    head_dim = heads.shape[-1]
    positions = torch.arange(heads.shape[-2], device=heads.device)
    powers = torch.arange(0, head_dim, 2, device=heads.device) / head_dim
    angles = torch.outer(positions, 500_000.0**-powers).repeat(1, 2)
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (heads * angles.cos() + rotated * angles.sin()).type_as(heads)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.wq = nn.Linear(config.dim, config.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x):
        # -1: under tensor parallelism a rank has only its share of the heads.
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        mixed = scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=True
        )
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(config.dim), Attention(config)
        self.ffn_norm, self.ffn = nn.RMSNorm(config.dim), FeedForward(config)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.Sequential(*(Block(config) for _ in range(config.num_layers)))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.embed(tokens))))


def apply_tensor_parallel(model, mesh):
    """Shard heads, hidden features and the vocabulary; between the layers shard the sequence."""
    replicated, sequence = Replicate(), Shard(1)
    gather = tp.PrepareModuleInput(input_layouts=sequence, desired_input_layouts=replicated)
    plan = {
        "embed": tp.RowwiseParallel(input_layouts=replicated, output_layouts=sequence),
        "layers.*.*norm": tp.SequenceParallel(),
        "layers.*.attention": gather,
        "layers.*.attention.w[qkv]": tp.ColwiseParallel(),
        "layers.*.attention.wo": tp.RowwiseParallel(output_layouts=sequence),
        "layers.*.ffn": gather,
        "layers.*.ffn.gate": tp.ColwiseParallel(),
        "layers.*.ffn.up": tp.ColwiseParallel(),
        "layers.*.ffn.down": tp.RowwiseParallel(output_layouts=sequence),
        "norm": tp.SequenceParallel(),
        "head": tp.ColwiseParallel(input_layouts=sequence, use_local_output=False),
    }
    tp.parallelize_module(model, mesh, plan)


def make_target(config, *, batch_size):
    """The functions of a TARGET: model, batch, parallelize, step, optimizer."""

    def model():
        return Llama(config)

    def batch(model):
        return torch.randint(config.vocab_size, (batch_size, config.seq_len + 1))

    def parallelize(model, mesh):
        if "tp" in mesh.mesh_dim_names:
            apply_tensor_parallel(model, mesh["tp"])
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for index, block in enumerate(model.layers):
            model.layers[index] = checkpoint_wrapper(block)
            fully_shard(model.layers[index], mesh=mesh["dp"], mp_policy=policy)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)

    def step(model, tokens):
        with tp.loss_parallel():  # logits stay sharded over the vocabulary
            logits = model(tokens[:, :-1])
            cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()

    def optimizer(model):
        return torch.optim.AdamW(model.parameters())

    return model, batch, parallelize, step, optimizer
