"""LightningModule that collects its validation outputs in the global zero process."""

import os
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


class Classifier(L.LightningModule):
    def __init__(self, dim=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 16), nn.ReLU(), nn.Linear(16, 1))
        self.outputs = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.binary_cross_entropy_with_logits(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.outputs.append(self.net(x))

    def on_validation_epoch_end(self):
        outputs = torch.cat(self.outputs)
        self.outputs.clear()
        if os.environ.get("HANG") == "corrected":
            outputs = self.all_gather(outputs)
            if self.trainer.is_global_zero:
                print("predictions of all ranks:", tuple(outputs.shape))
        elif self.trainer.is_global_zero:
            outputs = self.all_gather(outputs)  # HANG
            print("predictions of all ranks:", tuple(outputs.shape))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def make_loader(num_samples, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 8, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, :1] > 0).float()), batch_size=4)


def main():
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "2")),
        strategy="ddp",
        max_epochs=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), make_loader(16, 0), make_loader(8, 1))


if __name__ == "__main__":
    main()
