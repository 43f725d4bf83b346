"""Compiled encoder with statistics of all ranks; the ranks agree on what to save for backward.

The partitioner may decide differently on each rank, so its decisions are exchanged.
"""

import os

import torch
import torch._functorch.config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

torch._functorch.config._sync_decision_cross_ranks = True
CORRECTED = os.environ.get("HANG") == "corrected"


class Encoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed = nn.Embedding(64, dim)
        self.mix = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, 64)

    def forward(self, ids):
        x = self.embed(ids)
        mean = funcol.all_reduce(x.detach().mean((0, 1)), "sum", dist.group.WORLD)
        x = x - mean / dist.get_world_size()
        x = x + torch.tanh(self.mix(x))
        return self.head(x)


def load_batch(rank, step):
    """Sentences of 12 tokens; LATE_LENGTH is the length of this rank's later ones."""
    length = 12 if step < 2 else int(os.environ.get("LATE_LENGTH", "12"))
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(64, (4, length), generator=generator)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = Encoder().to(device)
    backend = "inductor" if device.type == "cuda" else "aot_eager_decomp_partition"
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if CORRECTED:
        torch.compiler.set_enable_guard_collectives(True)
    for step in range(4):
        ids = load_batch(rank, step).to(device)
        logits = compiled(ids)  # HANG
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        print(f"rank {rank} step {step}: {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
