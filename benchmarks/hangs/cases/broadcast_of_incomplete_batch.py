"""Curriculum sampler: rank 0 draws the samples of a global batch and sends their indices to all."""

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class CurriculumSampler:
    """Easy samples first. Every rank takes its part of the indices that rank 0 has drawn."""

    def __init__(self, num_samples, micro_batch, device):
        self.num_samples, self.micro_batch, self.device = num_samples, micro_batch, device
        self.global_batch = micro_batch * dist.get_world_size()
        self.drawn, self.rng = 0, random.Random(1234)

    def __iter__(self):
        while self.drawn < self.num_samples:
            yield self.next_global_batch()

    def next_global_batch(self):
        count = min(self.global_batch, self.num_samples - self.drawn)
        if dist.get_rank() == 0:
            indices = list(range(self.drawn, self.drawn + count))
            self.rng.shuffle(indices)
            if os.environ.get("HANG") == "corrected":
                indices += [-1] * (self.global_batch - count)
            batch = torch.tensor(indices, device=self.device)
        else:
            batch = torch.empty(self.global_batch, dtype=torch.long, device=self.device)
        dist.broadcast(batch, src=0)  # HANG
        self.drawn += count
        batch = batch[batch >= 0]
        assert len(batch.unique()) == len(batch) <= self.num_samples, "an index was drawn twice"
        assert int(batch.max()) < self.num_samples, "an index is out of range"
        own = batch.tensor_split(dist.get_world_size())[dist.get_rank()]
        return own.cpu()


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    num_samples = 21
    x = torch.randn(num_samples, 5).sort(0).values
    y = x.square().sum(-1, keepdim=True)
    model = DDP(nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 1)).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, indices in enumerate(CurriculumSampler(num_samples, 4, device)):
        prediction = model(x[indices].to(device))
        loss = nn.functional.mse_loss(prediction, y[indices].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: {len(indices)} samples, loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
