"""Parameters that are exchanged after DistributedDataParallel has hooked the old ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

CASE = Case(
    source="TrainCheck pytorch-104336",
    summary="The hooks that reduce gradients belong to the parameters that the model has when it "
    "is wrapped. Parameters that replace them, here those of a checkpoint (in the issue those "
    "that were moved to the host and back), have none: each rank trains its own model.",
    mesh={"dp": 2},
    causes=("lost_hook",),
    locations=("all gradients",),
    batch_axes=("dp",),
)
CONFIG = Config()
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def restore(model: nn.Module) -> None:
    """Load the weights of a checkpoint; here those that the model was made with."""
    checkpoint = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(checkpoint, assign=BUGGY)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    restore(model)  # BUG
    return wrapped


def train_step(model, batch, optimizer, mesh: DeviceMesh | None = None):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    if mesh is not None:
        dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
    return loss
