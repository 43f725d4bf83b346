"""A Trainer that saves the state of the run if anything goes wrong, so that it can be resumed."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ModelCheckpoint:
    def __init__(self, folder):
        self.folder = folder

    def save(self, trainer):
        """Rank 0 chooses the file name, all ranks enter the barrier after it has been written."""
        names = [f"step={trainer.step}.ckpt"]
        dist.broadcast_object_list(names, src=0)
        if dist.get_rank() == 0:
            torch.save(trainer.model.module.state_dict(), Path(self.folder[0]) / names[0])
        dist.barrier()


class Trainer:
    def __init__(self, model, callbacks, device):
        self.model = DDP(model.to(device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.callbacks, self.device, self.step = callbacks, device, 0
        self.agree = os.environ.get("HANG") == "corrected"

    def has_failed_anywhere(self, error):
        failed = torch.tensor(int(error is not None), device=self.device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        return bool(failed)

    def run(self, dataset):
        for self.step in range(len(dataset)):
            error = None
            try:
                x, y = dataset[self.step]
            except ValueError as e:
                if not self.agree:
                    raise
                error = e
            if self.agree and self.has_failed_anywhere(error):
                raise RuntimeError("a rank could not load its batch") from error
            loss = nn.functional.mse_loss(self.model(x.to(self.device)), y.to(self.device))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def fit(self, dataset):
        try:
            self.run(dataset)
        except (ValueError, RuntimeError) as e:
            print(f"rank {dist.get_rank()}: {e}; saving before the end")
            for callback in self.callbacks:
                callback.save(self)  # HANG


class Waves:
    """Batches by number; in raw recordings one has no sample rate."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rate = None if os.environ.get("RECORDINGS") == "raw" and index == 2 else 8
        if rate is None:
            raise ValueError(f"recording {index} has no sample rate")
        t = torch.arange(16.0).view(-1, 1) / rate
        return t, torch.sin(t + dist.get_rank())


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    Trainer(model, [ModelCheckpoint(folder)], device).fit(Waves())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
