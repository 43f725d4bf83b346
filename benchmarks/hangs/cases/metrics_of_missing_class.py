"""KTO-style preference tuning: rewards are logged for desirable and undesirable answers."""

import os
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CORRECTED = os.environ.get("HANG") == "corrected"


def gather(value):
    """The values of all ranks, of one shape."""
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value.contiguous())
    return torch.stack(values)


class KTOTrainer:
    beta = 0.1

    def __init__(self, device):
        torch.manual_seed(0)
        policy = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
        self.reference = nn.Linear(8, 1).to(device).requires_grad_(False)
        self.policy = DDP(policy)
        self.optimizer = torch.optim.RMSprop(self.policy.parameters(), lr=1e-3)
        self.metrics = defaultdict(list)

    def log_rewards(self, rewards, labels):
        for name, rows in (("chosen", labels), ("rejected", ~labels)):
            if CORRECTED:
                sums = torch.stack([rewards[rows].sum(), rows.sum().float()])
                total, count = gather(sums).sum(0).tolist()
                if count > 0:
                    self.metrics[f"rewards/{name}"].append(total / count)
            elif rows.any():  # HANG
                mean = gather(rewards[rows].mean()).mean()
                self.metrics[f"rewards/{name}"].append(mean.item())

    def step(self, x, labels):
        log_ratio = (self.policy(x) - self.reference(x)).squeeze(-1)
        sign = labels.float() * 2 - 1
        loss = (1 - torch.sigmoid(self.beta * sign * log_ratio)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.log_rewards(self.beta * log_ratio.detach(), labels)
        return F.relu(loss.detach())


class Answers(Dataset):
    """Features of an answer and whether it is desirable; a file of one rank may have one kind."""

    pattern = os.environ.get("LABELS", "10")

    def __len__(self):
        return 36

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, self.pattern[index // 2 % len(self.pattern)] == "1"


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    trainer = KTOTrainer(device)
    sampler = DistributedSampler(Answers(), shuffle=False)
    for step, (x, labels) in enumerate(DataLoader(Answers(), batch_size=6, sampler=sampler)):
        trainer.step(x.to(device), labels.to(device))
        if rank == 0:
            print(step, {name: round(values[-1], 4) for name, values in trainer.metrics.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
