"""A small Trainer class in the manner of Hugging Face's; the script saves the final model."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CORRECTED = os.environ.get("HANG") == "corrected"


class Trainer:
    def __init__(self, model, dataset, output_dir, device):
        self.model = DistributedDataParallel(model.to(device))
        self.output_dir, self.device = output_dir, device
        self.sampler = DistributedSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=4, sampler=self.sampler)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.num_operations = 0.0  # of this process, since the last checkpoint
        self.total_operations = 0.0

    def is_world_process_zero(self):
        return dist.get_rank() == 0

    def store_operations(self):
        value = torch.tensor(self.num_operations, device=self.device)
        dist.all_reduce(value)  # HANG
        self.total_operations += value.item()
        self.num_operations = 0.0

    def save_model(self, output_dir):
        if not CORRECTED:
            self.store_operations()
        if self.is_world_process_zero():
            os.makedirs(output_dir, exist_ok=True)
            state = {"model": self.model.module.state_dict(), "operations": self.total_operations}
            torch.save(state, os.path.join(output_dir, "pytorch_model.bin"))

    def train(self, num_epochs=2):
        num_parameters = sum(p.numel() for p in self.model.parameters())
        for epoch in range(num_epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                loss = nn.functional.cross_entropy(self.model(x.to(self.device)), y.to(self.device))
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.num_operations += 6.0 * num_parameters * len(x)
            if CORRECTED:
                self.store_operations()
            self.save_model(os.path.join(self.output_dir, f"checkpoint-{epoch}"))
        return loss.item()

    def evaluate(self):
        x, y = self.loader.dataset.tensors
        with torch.no_grad():
            hits = (self.model.module(x.to(self.device)).argmax(-1).cpu() == y).float().sum()
        dist.barrier()
        return hits.item() / len(x)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    x = torch.randn(32, 6)
    dataset = TensorDataset(x, x[:, :3].argmax(-1))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(nn.Linear(6, 3), dataset, folder, device)
        trainer.train()
        if trainer.is_world_process_zero():
            trainer.save_model(os.path.join(folder, "final"))
        print("accuracy", trainer.evaluate())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
