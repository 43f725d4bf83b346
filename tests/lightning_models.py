"""What tests train with Lightning; it is imported here, and not where tests are collected."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardscope import trace
from shardscope.comm.trace import Trace
from trained_models import leaving_torch_alone, make_batches, make_net

with leaving_torch_alone():
    import lightning.pytorch as pl
    import pytorch_lightning

__all__ = [
    "Learner",
    "TakingTurns",
    "TwoPlayers",
    "fit",
    "pl",
    "pytorch_lightning",
    "train_by_hand",
]


class Learner(pl.LightningModule):
    """The net with a loss, which it remembers."""

    def __init__(self, net: torch.nn.Module | None = None, *, fail_at: int = -1) -> None:
        super().__init__()
        self.net = make_net() if net is None else net
        self.losses: list[float] = []
        self._fail_at = fail_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).pow(2).mean()
        self.losses.append(loss.item())
        if batch_idx == self._fail_at:
            raise ZeroDivisionError("no such batch")
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(model: pl.LightningModule, *callbacks: Any, validate: bool = False, **options: Any) -> Any:
    resume = options.pop("ckpt_path", None)
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "max_steps": 4,
            "max_epochs": -1,
            "callbacks": list(callbacks),
            **options,
        }
    )
    loader = DataLoader(make_batches(), batch_size=2)
    trainer.fit(model, loader, loader if validate else None, ckpt_path=resume)
    return trainer


class TwoPlayers(Learner):
    """Steps two optimizers in each batch, by hand."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class TakingTurns(TwoPlayers):
    """Steps one of its two optimizers in each batch."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx % 2]
        self.manual_backward(Learner.training_step(self, batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


def train_by_hand(model: Learner, *, num_steps: int, batches_per_step: int = 1) -> Trace:
    """The same loop, with a plain trace around the last step; accumulation is with validation."""
    optimizer = model.configure_optimizers()
    batches = iter(DataLoader(make_batches(), batch_size=2))
    traced = trace(model)
    for step in range(num_steps):
        for _ in range(batches_per_step):
            batch = next(batches)
            with traced if step == num_steps - 1 else nullcontext():
                (model.training_step(batch, 0) / batches_per_step).backward()
            if batches_per_step > 1:
                with torch.no_grad():
                    model.validation_step(batch, 0)
        optimizer.step()
        optimizer.zero_grad()
    return traced
