"""Parameters that are frozen when the model is wrapped, and trained afterwards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

CASE = Case(
    source="TrainCheck pytorch-115607 (of its class)",
    summary="A stage of training freezes parameters. In the original they stay frozen, as the "
    "compiled step does not notice the change; here DistributedDataParallel does not: it reduces "
    "the gradients of those parameters only that were trained when the model was wrapped.",
    mesh={"dp": 2},
    causes=("missing_reduction", "lost_hook"),
    locations=("tok_embeddings*", "layers.0*"),
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


def set_frozen(model: Decoder, is_frozen: bool) -> None:
    """Freeze the lower half of the model, or train it again."""
    for module in (model.tok_embeddings, model.layers["0"]):
        module.requires_grad_(not is_frozen)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    set_frozen(model, is_frozen=BUGGY)  # as in the first stage
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    set_frozen(model, is_frozen=False)  # BUG
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
