"""Fine-tune a sharded model and let rank 0 save it."""

import itertools
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

CORRECTED = os.environ.get("HANG") == "corrected"


class MLP(nn.Module):
    def __init__(self, sizes=(20, 64, 64, 5)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


def full_state_dict(model):
    """The full parameters, on the CPU."""
    return {name: p.full_tensor().cpu() for name, p in model.state_dict().items()}


def save_checkpoint(model, folder, step):
    path = Path(folder) / f"step-{step}.pt"
    if CORRECTED:
        state = full_state_dict(model)
        if dist.get_rank() == 0:
            torch.save(state, path)
    elif dist.get_rank() == 0:
        torch.save(full_state_dict(model), path)  # HANG


def main(num_steps=4, save_every=2):
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = MLP().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)

    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, num_steps + 1):
            x = torch.randn(16, 20, generator=generator).to(device)
            y = torch.randint(5, (16,), generator=generator).to(device)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}")
            if step % save_every == 0:
                save_checkpoint(model, folder, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
