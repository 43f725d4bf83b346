"""Mixtures of experts whose collectives do not depend on the routing."""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from common import finish, setup, sharded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

DISPATCHES = ["capacity", "all-to-all", "gathered", "masked-fsdp", "masked-ddp", "layer-fsdp"]
DIM, EXPERTS = 8, 4


class Exchange(torch.autograd.Function):
    """An all-to-all with own sizes, also in backward for empty tensors."""

    @staticmethod
    def forward(ctx, x, send, receive):
        ctx.sizes = send, receive
        out = x.new_empty(sum(receive), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, receive = ctx.sizes
        out = grad.new_empty(sum(send), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), send, receive)
        return out, None, None


class Experts(nn.Module):
    def __init__(self, dispatch):
        super().__init__()
        self.dispatch = dispatch
        self.num_ranks = dist.get_world_size()
        is_local = dispatch in ("capacity", "all-to-all", "gathered")
        self.num_local = EXPERTS // self.num_ranks if is_local else EXPERTS
        self.router = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(self.num_local))

    def run_local(self, tokens, owner):
        """Each token through its expert of this rank; experts without tokens get none."""
        order = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=self.num_local).tolist()
        parts = tokens[order].split(counts)
        done = torch.cat([expert(p) for expert, p in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(tokens).index_copy(0, order, done)

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).max(-1)
        return x + scores[:, None] * getattr(self, self.dispatch.split("-")[0])(x, chosen)

    def capacity(self, x, chosen, factor=2):
        """As many slots for each expert on each rank; tokens beyond are dropped."""
        size = factor * len(x) // EXPERTS
        one_hot = nn.functional.one_hot(chosen, EXPERTS)
        place = ((one_hot.cumsum(0) - 1) * one_hot).sum(-1)
        slot = torch.where(place < size, chosen * size + place, EXPERTS * size)
        slots = x.new_zeros(EXPERTS * size + 1, DIM).index_copy(0, slot, x)[:-1]
        received = dist_nn.all_to_all_single(torch.empty_like(slots), slots)
        parts = received.view(self.num_ranks, self.num_local, size, DIM).unbind(1)
        done = torch.stack([e(p) for e, p in zip(self.experts, parts, strict=True)], 1)
        back = dist_nn.all_to_all_single(torch.empty_like(slots), done.flatten(0, 2))
        return torch.cat([back, back.new_zeros(1, DIM)])[slot]

    def all(self, x, chosen):
        """All tokens to the rank of their expert, with sizes that are exchanged first."""
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        received_counts = torch.empty_like(counts)
        dist.all_to_all_single(received_counts, counts)
        send = counts.view(self.num_ranks, -1).sum(1).tolist()
        receive = received_counts.view(self.num_ranks, -1).sum(1).tolist()
        owner = torch.arange(self.num_local, device=x.device).repeat(self.num_ranks)
        owner = owner.repeat_interleave(received_counts)
        done = self.run_local(Exchange.apply(x[order], send, receive), owner)
        return torch.zeros_like(x).index_copy(0, order, Exchange.apply(done, receive, send))

    def gathered(self, x, chosen):
        """Every rank gets all tokens and returns the sums of its own experts."""
        tokens = torch.cat(dist_nn.all_gather(x))
        choices = torch.cat(dist_nn.all_gather(chosen.float())).long()
        first = dist.get_rank() * self.num_local
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            out = out + expert(tokens) * (choices == first + index)[:, None]
        out = dist_nn.all_reduce(out)
        return out.chunk(self.num_ranks)[dist.get_rank()]

    def masked(self, x, chosen):
        """Every expert runs on all tokens, and a mask chooses."""
        outputs = torch.stack([expert(x) for expert in self.experts])
        return (outputs * nn.functional.one_hot(chosen, EXPERTS).T[..., None]).sum(0)

    def layer(self, x, chosen):
        """Experts are run if they have tokens; the FSDP unit is the layer around them."""
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            if len(rows) > 0:
                out[rows] = expert(x[rows])
        return out


class Vectors(Dataset):
    """Random vectors; those of the second batch of odd ranks are all the same."""

    def __len__(self):
        return 48 * dist.get_world_size()

    def __getitem__(self, index):
        is_same = 32 <= index < 64 and index % 2 == 1
        return torch.randn(DIM, generator=torch.Generator().manual_seed(1 if is_same else index))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dispatch", choices=DISPATCHES, default="capacity")
    args = parser.parse_args()
    rank, world_size, device = setup()
    layer = Experts(args.dispatch)
    model = nn.Sequential(nn.Linear(DIM, DIM), layer, nn.Linear(DIM, 2)).to(device)
    by_hand = False
    if args.dispatch == "masked-ddp":
        model = DDP(model)
    elif args.dispatch.endswith("fsdp"):
        fully_shard(layer)
        fully_shard(model).set_reduce_scatter_unused_params(True)
    else:
        by_hand = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in sharded(Vectors(), rank, 16):
        loss = nn.functional.cross_entropy(model(x.to(device)), (x[:, 0] > 0).long().to(device))
        optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters() if by_hand else ():
            if "experts" not in name:
                dist.all_reduce(p.grad)
                p.grad /= world_size
        optimizer.step()
    finish("done")


if __name__ == "__main__":
    main()
