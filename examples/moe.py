"""A mixture of experts: experts on their own ranks, tokens sent to them by all-to-all.

python examples/moe.py                                      # one of 32 simulated ranks
torchrun --nproc-per-node 8 --no-python shardscope trace examples/moe.py --mesh dp=2,ep=4
"""

import torch
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

DIM, HIDDEN, NUM_EXPERTS, NUM_LAYERS, NUM_TOKENS = 1024, 4096, 32, 4, 2048
CAPACITY = 2 * NUM_TOKENS // NUM_EXPERTS  # tokens that an expert takes of one rank


class Experts(nn.Module):
    """Each expert is two matrices; `group` has the ranks among which experts are sharded."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, HIDDEN) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, DIM) / HIDDEN**0.5)
        self.group = None

    def forward(self, x):
        up, down = (
            weight.to_local() if hasattr(weight, "to_local") else weight
            for weight in (self.up, self.down)
        )
        x = self.exchange(x)  # from every rank, the tokens for my experts
        x = x.unflatten(0, (-1, len(up))).transpose(0, 1).flatten(1, 2)
        x = torch.bmm(functional.silu(torch.bmm(x, up)), down)
        x = x.unflatten(1, (-1, CAPACITY)).transpose(0, 1).flatten(0, 1)
        return self.exchange(x)  # and back to where they came from

    def exchange(self, x):
        if self.group is None:
            return x
        return collectives.all_to_all_single_autograd(x, None, None, self.group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x):
        h = self.norm(x)
        weights = self.router(h).softmax(-1)
        chosen = functional.one_hot(weights.argmax(-1), NUM_EXPERTS)
        position = (chosen.cumsum(0) - 1) * chosen  # of a token among those of its expert
        slots = torch.arange(CAPACITY, device=x.device)
        sent = ((position.unsqueeze(-1) == slots) & chosen.bool().unsqueeze(-1)).to(x.dtype)
        results = self.experts(torch.einsum("tes,td->esd", sent, h))
        return x + torch.einsum("tes,te,esd->td", sent, weights, results)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def model():
    return Mixture()


def batch(model):
    return torch.randn(NUM_TOKENS, DIM)


def parallelize(model, mesh):
    for block in model.blocks:
        experts = block.experts
        experts.group = mesh["ep"].get_group()
        for name in ("up", "down"):
            sharded = distribute_tensor(getattr(experts, name), mesh["ep"], [Shard(0)])
            setattr(experts, name, nn.Parameter(sharded))
        # Every rank has tokens of its own: experts are shared along dp, all else along both.
        fully_shard(experts, mesh=mesh["dp"])
        # They get gradients of all ranks' tokens, and FSDP would average over dp alone.
        experts.set_gradient_divide_factor(mesh.size())
        experts.set_force_sum_reduction_for_comms(True)  # which gloo can do
        fully_shard(block, mesh=mesh["dp", "ep"])
    fully_shard(model, mesh=mesh["dp", "ep"])


if __name__ == "__main__":
    from shardscope.cli import main

    main(["trace", __file__, "--mesh", "dp=4,ep=8"])
