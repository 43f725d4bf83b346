"""Resume training if there is a checkpoint; rank 0 reads it and sends the state to all."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CORRECTED = os.environ.get("HANG") == "corrected"


class CheckpointManager:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "train_state.pt"

    def exists(self, device: torch.device) -> bool:
        """Whether there is a checkpoint; a shared file system may answer ranks differently."""
        exists = self.path.exists()
        if CORRECTED:
            flag = torch.tensor([int(exists)], device=device)
            dist.broadcast(flag, src=0)
            exists = bool(flag.item())
        return exists

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
        """Load the latest state; returns the step to start from."""
        if not self.exists(device):
            return 0  # HANG
        objects = [None]
        if dist.get_rank() == 0:
            objects = [torch.load(self.path) if self.path.stat().st_size else {"step": 0}]
        dist.broadcast_object_list(objects, src=0)
        state = objects[0]
        if "model" in state:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        return state["step"]

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if dist.get_rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, self.path)
        dist.barrier()


def main(num_steps: int = 4) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    manager = CheckpointManager(Path(os.environ.get("CHECKPOINTS", "checkpoints")))
    start = manager.load(net, optimizer, device)
    model = DDP(net)
    generator = torch.Generator().manual_seed(rank)
    for step in range(start, num_steps):
        x = torch.randn(8, 4, generator=generator).to(device)
        loss = (model(x) - x.prod(-1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 1:
            manager.save(net, optimizer, step + 1)
    if rank == 0:
        print(f"steps {start} to {num_steps}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
