"""Train a classifier with a mixture of experts under FSDP; each expert is a unit of its own.

Launch: torchrun --nproc-per-node 2 fsdp_experts_without_tokens.py
TOPIC=sports gives a rank samples of one topic only.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CORRECTED = os.environ.get("HANG") == "corrected"
TOPICS = {"all": [0, 1, 2, 3], "sports": [2]}[os.environ.get("TOPIC", "all")]


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


class MoE(nn.Module):
    def __init__(self, dim, num_experts):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, 2 * dim) for _ in range(num_experts))
        nn.init.eye_(self.gate.weight)

    def forward(self, x):
        weights, selected = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.where(selected == index)[0]
            if rows.numel() > 0:  # HANG
                out[rows] = weights[rows, None] * expert(x[rows])
        return out


class Net(nn.Module):
    def __init__(self, dim=16, num_classes=4):
        super().__init__()
        self.moe = MoE(dim, num_experts=4)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        return self.head(x + self.moe(x))


class Articles(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        topic = TOPICS[index // 2 % len(TOPICS)]
        x = 0.3 * torch.randn(16, generator=torch.Generator().manual_seed(index))
        x[topic] += 4.0
        return x, topic


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    policy = ModuleWrapPolicy({MoE} if CORRECTED else {Expert})
    model = FSDP(Net().to(device), auto_wrap_policy=policy, device_id=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = Articles()
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
