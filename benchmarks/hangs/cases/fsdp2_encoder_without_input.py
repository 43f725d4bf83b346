# Two inputs per sample, the second one optional: y = head(trunk(x0) + encoder(x1)).
# torchrun --nproc-per-node 2 fsdp2_encoder_without_input.py [--second-input 0.8]
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument(
    "--second-input",
    type=float,
    default=float(os.environ.get("SECOND_INPUT", 1.0)),
    help="share of the samples that have the second input",
)
args = parser.parse_args()
corrected = os.environ.get("HANG") == "corrected"


class CombinedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 24))
        self.trunk = nn.Sequential(nn.Linear(8, 24), nn.GELU())
        self.head = nn.Linear(24, 1)

    def forward(self, x0, x1=None):
        hidden = self.trunk(x0)
        if x1 is not None:
            hidden = hidden + self.encoder(x1)  # HANG
        elif corrected:
            dummy = x0.new_zeros(1, 12)
            hidden = hidden + 0.0 * self.encoder(dummy).sum()
        return self.head(hidden)


class Samples(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x0 = torch.randn(8, generator=generator)
        has_second = torch.rand((), generator=generator) < args.second_input
        return x0, torch.randn(12, generator=generator) if has_second else None


def collate(samples):
    """Samples without the second input have zeros, unless it is missing from the entire batch."""
    x0 = torch.stack([first for first, _ in samples])
    x1 = None
    if any(second is not None for _, second in samples):
        x1 = torch.stack([torch.zeros(12) if s is None else s for _, s in samples])
    return (x0, x1), x0.sum(-1, keepdim=True)


local_rank = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl")
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")

torch.manual_seed(1234)
model = CombinedModel().to(device)
fully_shard(model.encoder)
fully_shard(model.trunk)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()

dataset = Samples()
sampler = DistributedSampler(dataset)
dataloader = DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=collate)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for (x0, x1), y in dataloader:
        y_pred = model(x0.to(device), None if x1 is None else x1.to(device))
        loss = criterion(y_pred, y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {loss.item():.4f}", flush=True)

dist.destroy_process_group()
