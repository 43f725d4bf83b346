"""Save a checkpoint and leave when the scheduler preempts the job with SIGTERM."""

import os
import signal
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class PreemptionHandler:
    def __init__(self, device):
        self.received, self.device = False, device
        signal.signal(signal.SIGTERM, self.handle)

    def handle(self, signum, frame):
        self.received = True

    def should_stop(self):
        if os.environ.get("HANG") == "corrected":
            flag = torch.tensor(int(self.received), device=self.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            return bool(flag)
        return self.received  # HANG


def save(model, path):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(state, path)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    handler = PreemptionHandler(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)).to(device)
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, int(os.environ.get("STEPS", "4")) + 1):
            x = torch.randn(8, 6, generator=generator).to(device)
            loss = (model(x) - x.cumsum(-1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
            print(f"rank {rank} step {step} loss {loss.item():.3f}", flush=True)
            if handler.should_stop():
                save(model, os.path.join(folder, f"preempted-{step}.pt"))
                print(f"rank {rank} leaves after step {step}", flush=True)
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
