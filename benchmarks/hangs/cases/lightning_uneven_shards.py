"""LightningModule on an IterableDataset whose files are dealt out to the ranks."""

import os
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

warnings.filterwarnings("ignore")
FILES = [int(n) for n in os.environ.get("FILES", "8,8,8,8").split(",")]  # samples of each


def read(index, sample):
    x = torch.randn(6, generator=torch.Generator().manual_seed(100 * index + sample))
    return x, x.max()


class Files(IterableDataset):
    """Every world_size-th file, from the one with the rank's number."""

    def __iter__(self):
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for index in range(rank, len(FILES), world_size):
            for sample in range(FILES[index]):
                yield read(index, sample)


class AllSamples(Dataset):
    """The samples of all files by number; Lightning adds a DistributedSampler."""

    def __len__(self):
        return sum(FILES)

    def __getitem__(self, number):
        return read(number % len(FILES), number // len(FILES))


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x).squeeze(-1), y)
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main():
    L.seed_everything(0, verbose=False)
    dataset = AllSamples() if os.environ.get("HANG") == "corrected" else Files()
    trainer = L.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "2")),
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regressor(), DataLoader(dataset, batch_size=4))  # HANG
    print(f"rank {trainer.global_rank}: {trainer.callback_metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
