"""Lightning's Trainer with DDP: logging, checkpoints, early stopping, manual optimization."""

import argparse
import os
import tempfile
import warnings

import lightning as L
import torch
from common import mlp
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
OPTIONS = ["plain", "logging", "checkpoint", "early-stopping", "manual", "timer", "gather"]


class Regressor(L.LightningModule):
    def __init__(self, option):
        super().__init__()
        self.option, self.net = option, mlp(6, 12, 1)
        self.automatic_optimization = option != "manual"

    def loss(self, batch):
        x, y = batch
        return mse_loss(self.net(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.option == "logging":
            self.log("train_loss", loss, sync_dist=True, on_epoch=True)
        if self.option == "manual":
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self):
        if self.option == "gather":
            ranks = self.all_gather(torch.tensor(self.global_rank, device=self.device))
            if self.trainer.is_global_zero:
                print("ranks", ranks.tolist())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def make_loader(size, seed):
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.sum(-1, keepdim=True)), batch_size=4)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--option", choices=OPTIONS, default="plain")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        callbacks = []
        if args.option == "checkpoint":
            callbacks.append(ModelCheckpoint(folder, monitor="val_loss", save_last=True))
        elif args.option == "early-stopping":
            callbacks.append(EarlyStopping("val_loss", patience=1))
        elif args.option == "timer":
            callbacks.append(Timer(duration={"minutes": 5}))
        trainer = L.Trainer(
            accelerator="auto",
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "2")),
            strategy="ddp",
            max_epochs=2,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=args.option == "checkpoint",
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Regressor(args.option), make_loader(22, 0), make_loader(9, 1))


if __name__ == "__main__":
    main()
