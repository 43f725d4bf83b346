# Fabric-like loop; SIGUSR1 asks all ranks to evaluate at once (sent by a monitor on one node).
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

corrected = os.environ.get("HANG") == "corrected"
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
evaluation_is_due = False


def tell_other_ranks():
    """Let the ranks know that evaluation is due; each asks with its own flag."""
    flag = torch.tensor([int(evaluation_is_due)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def on_signal(signum, frame):
    global evaluation_is_due
    evaluation_is_due = True
    if not corrected:
        tell_other_ranks()  # HANG


signal.signal(signal.SIGUSR1, on_signal)
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(5, 10), nn.Sigmoid(), nn.Linear(10, 1)).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
generator = torch.Generator().manual_seed(rank)


def evaluate():
    x = torch.linspace(-1, 1, 40).view(8, 5).to(device)
    with torch.no_grad():
        loss = (model.module(x) - x.mean(-1, keepdim=True)).square().mean()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


for step in range(int(os.environ.get("STEPS", "4"))):
    x = torch.randn(8, 5, generator=generator).to(device)
    loss = (model(x) - x.mean(-1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"rank {rank} step {step}: {loss.item():.4f}", flush=True)
    time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
    is_due = tell_other_ranks() if corrected else evaluation_is_due
    if is_due:
        evaluation_is_due = False
        print(f"rank {rank} evaluated: {evaluate():.4f}", flush=True)
dist.destroy_process_group()
