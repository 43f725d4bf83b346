"""Expert parallelism with all-to-all: one expert per rank, tokens are sent to it and back."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

KEEP_GRAPH = os.environ.get("HANG") == "corrected"


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send_counts, receive_counts):
        ctx.counts = send_counts, receive_counts
        out = x.new_empty(sum(receive_counts), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receive_counts, send_counts)
        return out

    @staticmethod
    def backward(ctx, grad):
        send_counts, receive_counts = ctx.counts
        out = grad.new_empty(sum(send_counts), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), send_counts, receive_counts)
        return out, None, None


class ExpertParallelMoE(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.num_experts = dist.get_world_size()
        self.router = nn.Linear(dim, self.num_experts)
        self.expert = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def run_expert(self, tokens):
        if tokens.shape[0] == 0:
            return tokens if KEEP_GRAPH else torch.empty_like(tokens).detach()  # HANG
        return self.expert(tokens)

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        send = torch.bincount(chosen, minlength=self.num_experts)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send)
        send, receive = send.tolist(), receive.tolist()
        out = self.run_expert(AllToAll.apply(x[order], send, receive))
        out = AllToAll.apply(out, receive, send)
        return x + torch.zeros_like(x).index_copy(0, order, out) * scores[:, None]


class Model(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.inp, self.moe, self.out = (
            nn.Linear(dim, dim),
            ExpertParallelMoE(dim),
            nn.Linear(dim, 3),
        )

    def forward(self, x):
        return self.out(self.moe(self.inp(x)))


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = Model().to(device)
    with torch.no_grad():  # a router that has collapsed sends all tokens to the first expert
        model.moe.router.bias[0] += float(os.environ.get("ROUTER_BIAS", "0"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(192, 12)
    dataset = TensorDataset(x, x[:, :3].argmax(-1))
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            if "expert" not in name:
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
                p.grad /= dist.get_world_size()
        optimizer.step()
        print(f"step {step} rank {rank} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
