"""Lightning's ModelParallelStrategy: tensor parallelism with FSDP2."""

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def configure_model(self):
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch):
        loss = self.model(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


strategy = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=2)
trainer = lightning.Trainer(
    accelerator="cuda",
    devices=8,
    strategy=strategy,
    max_steps=20,
    logger=False,
    enable_checkpointing=True,
    log_every_n_steps=1,
)
loader = DataLoader(TensorDataset(torch.randn(256, 32)), batch_size=4)
trainer.fit(Model(), loader)
