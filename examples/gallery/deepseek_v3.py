"""DeepSeek-V3 with expert parallelism: shardscope trace deepseek_v3.py --mesh dp=8,ep=64.

Published sizes: 61 layers, 671 billion parameters, 256 experts of which 8 are chosen for a token.
Every expert is assumed to get the same number of tokens; multi-token prediction is left out.
"""

import torch
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

DIM, NUM_LAYERS, NUM_DENSE_LAYERS, HIDDEN_DIM, VOCAB_SIZE = 7168, 61, 3, 18_432, 129_280
NUM_EXPERTS, NUM_CHOSEN, EXPERT_DIM, SEQ_LEN = 256, 8, 2048, 4096
NUM_HEADS, Q_RANK, KV_RANK, NOPE_DIM, ROPE_DIM, VALUE_DIM = 128, 1536, 512, 128, 64, 128


class LatentAttention(nn.Module):
    """Queries, keys and values are projected from low-rank latents."""

    def __init__(self):
        super().__init__()
        self.q_down = nn.Linear(DIM, Q_RANK, bias=False)
        self.q_norm = nn.RMSNorm(Q_RANK)
        self.q_up = nn.Linear(Q_RANK, NUM_HEADS * (NOPE_DIM + ROPE_DIM), bias=False)
        self.kv_down = nn.Linear(DIM, KV_RANK + ROPE_DIM, bias=False)
        self.kv_norm = nn.RMSNorm(KV_RANK)
        self.kv_up = nn.Linear(KV_RANK, NUM_HEADS * (NOPE_DIM + VALUE_DIM), bias=False)
        self.out = nn.Linear(NUM_HEADS * VALUE_DIM, DIM, bias=False)

    def forward(self, x):
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
        latent, rope = self.kv_down(x).split((KV_RANK, ROPE_DIM), dim=-1)
        heads = self.kv_up(self.kv_norm(latent)).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
        key, value = heads.split((NOPE_DIM, VALUE_DIM), dim=-1)
        shared = rope.unsqueeze(1).expand(-1, NUM_HEADS, -1, -1)  # one position key for all heads
        key = torch.cat((key, shared), dim=-1)
        mixed = scaled_dot_product_attention(q, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden_dim):
        super().__init__()
        self.gate = nn.Linear(DIM, hidden_dim, bias=False)
        self.up = nn.Linear(DIM, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, DIM, bias=False)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """The routed experts; `group` has the ranks among which they are sharded."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.empty(NUM_EXPERTS, DIM, EXPERT_DIM))
        self.up = nn.Parameter(torch.empty(NUM_EXPERTS, DIM, EXPERT_DIM))
        self.down = nn.Parameter(torch.empty(NUM_EXPERTS, EXPERT_DIM, DIM))
        self.group = None

    def forward(self, x):
        """From (experts, tokens of this rank for each, DIM) to (experts × tokens, DIM)."""
        gate, up, down = (
            weight.to_local() if hasattr(weight, "to_local") else weight
            for weight in (self.gate, self.up, self.down)
        )
        num_local, num_tokens = len(gate), x.shape[1]
        x = self.exchange(x.flatten(0, 1))  # from every rank, the tokens for these experts
        x = x.view(-1, num_local, num_tokens, DIM).transpose(0, 1).flatten(1, 2)
        x = torch.bmm(silu(torch.bmm(x, gate)) * torch.bmm(x, up), down)
        x = x.view(num_local, -1, num_tokens, DIM).transpose(0, 1).flatten(0, 2)
        return self.exchange(x)

    def exchange(self, x):
        if self.group is None:
            return x
        return collectives.all_to_all_single_autograd(x, None, None, self.group)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        self.shared, self.experts = FeedForward(EXPERT_DIM), Experts()

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).sigmoid().topk(NUM_CHOSEN)
        order = chosen.flatten().argsort()  # the tokens of expert 0 first
        sent = tokens[order // NUM_CHOSEN].view(NUM_EXPERTS, -1, DIM)
        results = self.experts(sent)
        weights = (weights / weights.sum(-1, keepdim=True)).flatten()[order]
        combined = torch.zeros_like(tokens).index_add(
            0, order // NUM_CHOSEN, (results * weights.unsqueeze(-1)).type_as(tokens)
        )
        return self.shared(x) + combined.view_as(x)


class Block(nn.Module):
    def __init__(self, *, is_dense):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(DIM), LatentAttention()
        self.ffn_norm = nn.RMSNorm(DIM)
        self.ffn = FeedForward(HIDDEN_DIM) if is_dense else Mixture()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class DeepSeekV3(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, DIM)
        self.layers = nn.Sequential(
            *(Block(is_dense=index < NUM_DENSE_LAYERS) for index in range(NUM_LAYERS))
        )
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB_SIZE, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.embed(tokens))))


def model():
    return DeepSeekV3()


def batch(model):
    return torch.randint(VOCAB_SIZE, (1, SEQ_LEN + 1))


def parallelize(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, block in enumerate(model.layers):
        if isinstance(block.ffn, Mixture):
            shard_experts(block.ffn.experts, mesh, policy)
        model.layers[index] = checkpoint_wrapper(block)
        fully_shard(model.layers[index], mesh=mesh["dp", "ep"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp", "ep"], mp_policy=policy)


def shard_experts(experts, mesh, policy):
    """Give each rank of `ep` its experts, and shard those over `dp`."""
    experts.group = mesh["ep"].get_group()
    for name, weight in list(experts.named_parameters()):
        sharded = distribute_tensor(weight, mesh["ep"], [Shard(0)])
        setattr(experts, name, nn.Parameter(sharded))
    # A rank has 4 experts: FSDP shards a feature dim, which `dp` divides.
    fully_shard(experts, mesh=mesh["dp"], mp_policy=policy, shard_placement_fn=lambda _: Shard(1))
    # Experts get gradients of all ranks' tokens, and FSDP would average over dp alone.
    experts.set_gradient_divide_factor(mesh.size())


def step(model, tokens):
    logits = model(tokens[:, :-1])
    cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()


def optimizer(model):
    return torch.optim.AdamW(model.parameters())
