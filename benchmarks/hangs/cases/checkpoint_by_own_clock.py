"""Save every few minutes of training time, measured on each rank."""

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class TimedCheckpoint:
    """Saves if `train_time_interval` has passed since the last check that saved."""

    def __init__(self, folder: Path, train_time_interval: timedelta, device: torch.device) -> None:
        self.folder, self.interval, self.device = folder, train_time_interval, device
        self.last_checked = time.monotonic()

    def is_due(self) -> bool:
        is_due = time.monotonic() - self.last_checked >= self.interval.total_seconds()
        if os.environ.get("HANG") == "corrected":
            flag = torch.tensor(int(is_due), device=self.device)
            dist.broadcast(flag, src=0)
            is_due = bool(flag)
        return is_due

    def on_train_batch_end(self, model: nn.Module, step: int) -> None:
        if not self.is_due():
            return  # HANG
        state = {name: p.full_tensor().cpu() for name, p in model.state_dict().items()}
        if dist.get_rank() == 0:
            torch.save(state, self.folder / f"step-{step}.pt")
            time.sleep(float(os.environ.get("UPLOAD_SECONDS", "0")))
        self.last_checked = time.monotonic()


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)).to(device)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    interval = timedelta(seconds=float(os.environ.get("SAVE_EVERY_SECONDS", "900")))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = TimedCheckpoint(Path(folder), interval, device)
        for step in range(int(os.environ.get("STEPS", "4"))):
            x = torch.randn(4, 8, generator=generator).to(device)
            loss = (model(x) - x.sort(-1).values).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.on_train_batch_end(model, step)
            if rank == 0:
                print(f"step {step}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
