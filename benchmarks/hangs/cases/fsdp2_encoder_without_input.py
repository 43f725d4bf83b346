# Two inputs per sample, the second one optional: y = head(trunk(x0) + encoder(x1)).
# torchrun --nproc-per-node 2 fsdp2_encoder_without_input.py [--second-input 0.8]
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
parser.add_argument(
    "--second-input",
    type=float,
    default=float(os.environ.get("SECOND_INPUT", 1.0)),
    help="probability that a batch has the second input",
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


def batches(num_steps, generator):
    for _ in range(num_steps):
        x0 = torch.randn(4, 8, generator=generator)
        has_second = torch.rand((), generator=generator) < args.second_input
        x1 = torch.randn(4, 12, generator=generator) if has_second else None
        yield (x0, x1), x0.sum(-1, keepdim=True)


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

generator = torch.Generator().manual_seed(1 + dist.get_rank())
for step, ((x0, x1), y) in enumerate(batches(args.steps, generator)):
    y_pred = model(x0.to(device), None if x1 is None else x1.to(device))
    loss = criterion(y_pred, y.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: {loss.item():.4f}", flush=True)

dist.destroy_process_group()
