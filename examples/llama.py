"""A Llama under FSDP2 and tensor parallelism, with the sequence dim sharded between the layers.

python examples/llama.py                                    # one of 64 simulated ranks
torchrun --nproc-per-node 8 --no-python shardscope trace examples/llama.py --mesh dp=2,tp=4
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import cross_entropy, silu
from torch.nn.functional import scaled_dot_product_attention as attend

DIM, HIDDEN, HEADS, KV_HEADS, VOCAB = 2048, 8192, 32, 8, 32_000
NUM_LAYERS, LENGTH, HEAD_DIM = 4, 1024, DIM // HEADS


def rotate(heads):
    positions = torch.arange(heads.shape[-2], device=heads.device)
    powers = torch.arange(0, HEAD_DIM, 2, device=heads.device) / HEAD_DIM
    angles = torch.outer(positions, 10_000.0**-powers).repeat(1, 2)
    first, second = heads.chunk(2, dim=-1)
    return heads * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x):
        # -1: under tensor parallelism a rank has only its share of the heads.
        weights = (self.wq, self.wk, self.wv)
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in weights)
        mixed = attend(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, HIDDEN, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(DIM), Attention()
        self.ffn_norm, self.ffn = nn.RMSNorm(DIM), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.embed(tokens))))


def model():
    return Llama()


def batch(model):
    return torch.randint(VOCAB, (1, LENGTH + 1))


def parallelize(model, mesh):
    replicated, sequence = Replicate(), Shard(1)  # between the layers, the sequence is sharded
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
    tp.parallelize_module(model, mesh["tp"], plan)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"])


def step(model, tokens):
    with tp.loss_parallel():  # logits stay sharded over the vocabulary
        logits = model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def optimizer(model):  # for shardscope memory
    return torch.optim.AdamW(model.parameters())


if __name__ == "__main__":
    from shardscope.cli import main

    main(["trace", __file__, "--mesh", "dp=16,tp=4"])
