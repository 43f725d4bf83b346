"""One rank of a Lightning training with DDP: `python lightning_rank.py FOLDER`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from shardscope.plugins.lightning import ShardscopeCallback


def main(folder: Path) -> None:
    """Train for four steps and record the third: in the second DDP forms its buckets anew."""
    import lightning.pytorch as pl

    class Learner(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 8)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ShardscopeCallback(3, output=folder / "run.json.gz")],
    )
    trainer.fit(Learner(), DataLoader(list(torch.randn(16, 8)), batch_size=2))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
