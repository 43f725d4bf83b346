# Pipeline of three stages, of which the first has no expert layer; losses per layer are logged.
import collections
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

LAYERS = ["dd", "mm", "dm"]  # of each stage: dense or with experts
HIDDEN = 12
corrected = os.environ.get("HANG") == "corrected"
tracker = collections.defaultdict(list)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.proj(x).relu()


class Experts(nn.Module):
    def __init__(self, num_experts=4):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, num_experts, bias=False)
        self.w = nn.Parameter(torch.randn(num_experts, HIDDEN, HIDDEN) / HIDDEN)

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        tracker["load_balancing_loss"].append(probs.detach().mean(0).square().sum())
        return x + torch.einsum("ne,nd,edf->nf", probs, x, self.w)


def reduce_aux_losses(num_names=1):
    """Mean of each tracked loss over the stages that have it."""
    names = ["load_balancing_loss"] if corrected else list(tracker)  # HANG
    result = {}
    for name in names:
        values = tracker[name]
        total = torch.stack(values).sum() if values else torch.zeros((), device=device)
        packed = torch.stack([total, total.new_tensor(float(len(values)))])
        dist.all_reduce(packed)
        result[name] = (packed[0] / packed[1]).item()
    tracker.clear()
    return result


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
assert world_size == len(LAYERS)
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

torch.manual_seed(rank)
module = nn.Sequential(*(Dense() if kind == "d" else Experts() for kind in LAYERS[rank])).to(device)
stage = PipelineStage(module, rank, world_size, device)
schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(0)

for step in range(3):
    x = torch.randn(8, HIDDEN, generator=generator).to(device)
    if rank == 0:
        schedule.step(x)
    elif rank == world_size - 1:
        losses = []
        schedule.step(target=x.roll(1, -1), losses=losses)
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
    aux = reduce_aux_losses()
    if rank == world_size - 1:
        print(f"step {step} loss {torch.stack(losses).mean().item():.3f} {aux}")
dist.destroy_process_group()
