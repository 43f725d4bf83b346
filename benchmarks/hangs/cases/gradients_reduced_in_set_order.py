"""ZeRO-2 by hand: gradients are reduce-scattered as they get ready in backward."""

import os

import torch
import torch.distributed as dist
from torch import nn

CORRECTED = os.environ.get("HANG") == "corrected"


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))


class GradReducePipeline:
    """Keeps the names of parameters whose gradients are ready, and reduces them."""

    def __init__(self, model):
        self.params = dict(model.named_parameters())
        self.ready = set()
        self.shards = {}
        for name, param in self.params.items():
            param.register_post_accumulate_grad_hook(lambda _, name=name: self.ready.add(name))

    def reduce_ready(self):
        names = sorted(self.ready) if CORRECTED else list(self.ready)  # HANG
        self.ready.clear()
        world_size = dist.get_world_size()
        for name in names:
            grad = self.params[name].grad.flatten()
            padded = nn.functional.pad(grad, (0, -len(grad) % world_size))
            shard = padded.new_empty(len(padded) // world_size)
            dist.reduce_scatter_tensor(shard, padded, op=dist.ReduceOp.SUM)
            self.shards[name] = shard / world_size
            self.params[name].grad = None

    @torch.no_grad()
    def step(self, lr):
        for name, shard in sorted(self.shards.items()):
            full = shard.new_empty(len(shard) * dist.get_world_size())
            dist.all_gather_into_tensor(full, shard)
            param = self.params[name]
            param -= lr * full[: param.numel()].view_as(param)
        self.shards.clear()


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(Block(8), Block(8), nn.Linear(8, 4)).to(device)
    pipeline = GradReducePipeline(model)
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        x = torch.randn(2, 6, 8, generator=generator).to(device)
        loss = model(x).logsumexp(-1).mean()
        loss.backward()
        pipeline.reduce_ready()
        pipeline.step(lr=0.05)
        if rank == 0:
            print(f"step {step}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
