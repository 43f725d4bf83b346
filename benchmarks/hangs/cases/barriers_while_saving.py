"""Data-parallel engine whose save_checkpoint creates the files of all ranks one after the other."""

import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
from torch import nn


class Engine:
    """Model, optimizer and gradient averaging; `zero` shards the optimizer's state."""

    def __init__(self, model: nn.Module, *, zero: bool) -> None:
        self.model, self.zero = model, zero
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for p in model.parameters():
            dist.broadcast(p.data, src=0)

    def step(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.optimizer.step()

    def _create_files(self, folder: pathlib.Path) -> None:
        """Create the files in the order of ranks: parallel creation had trouble on some disks."""
        for rank in range(dist.get_world_size()):
            if rank == dist.get_rank():
                (folder / f"rank_{rank}.pt").parent.mkdir(parents=True, exist_ok=True)
            dist.barrier()  # HANG

    def save_checkpoint(self, folder: pathlib.Path) -> None:
        """Save; only ZeRO's optimizer has state on every rank."""
        if self.zero or os.environ.get("HANG") != "corrected":
            self._create_files(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0 or self.zero:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, folder / f"rank_{dist.get_rank()}.pt")


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1)).to(device)
    engine = Engine(model, zero=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, 5):
            x = torch.randn(8, 10, generator=generator).to(device)
            engine.step((model(x) - x.sum(-1, keepdim=True)).square().mean())
            if step % 2 == 0 and dist.get_rank() == 0:
                engine.save_checkpoint(pathlib.Path(folder) / f"global_step{step}")
    print(f"rank {dist.get_rank()} is done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
