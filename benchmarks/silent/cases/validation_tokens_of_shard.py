"""Validation that counts its labels after the sequences are divided over context parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import Gather, all_gather
from benchmarks.silent.decoder import IGNORED, Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

CASE = Case(
    source="torchtitan e2fea3ff0",
    summary="The validation counts labels of the part of the sequence that a rank has, and sums "
    "the counts over the data ranks only, while losses are summed over cp too. The validation "
    "loss is too large by about the size of cp; training is right.",
    mesh={"dp": 2, "cp": 2},
    causes=("missing_reduction", "scaled"),
    locations=("*validation*",),
    batch_axes=("dp",),
)
CONFIG = Config()
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, has_padding=True)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    group = mesh.get_group("cp")

    def gather_keys_and_values(_: nn.Module, inputs):
        q, k, v, mask, scale = inputs
        k, v = (Gather.apply(x.contiguous(), 1, group) for x in (k, v))
        return q, k, v, mask, scale

    for layer in model.layers.values():
        layer.attention.inner_attention.register_forward_pre_hook(gather_keys_and_values)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by all labels
    return model


def shard_sequence(batch, mesh: DeviceMesh | None):
    """What the model takes of a batch on this rank, and the labels."""
    tokens, labels = batch
    if mesh is None:
        return (tokens,), labels
    rank, size = mesh.get_local_rank("cp"), mesh["cp"].size()
    positions = torch.arange(tokens.shape[1]).chunk(size)[rank]
    mask = positions[:, None] >= all_gather(positions, 0, mesh.get_group("cp"))[None, :]
    return (tokens.chunk(size, 1)[rank], positions, mask), labels.chunk(size, 1)[rank]


def count_labels(labels: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The number of labels of all data ranks."""
    count = (labels != IGNORED).sum()
    if mesh is not None:
        dist.all_reduce(count, group=mesh.get_group("dp"))
    return count


@torch.no_grad()
def validate(model: nn.Module, batch, mesh: DeviceMesh | None) -> Tensor:
    model.eval()
    count = count_labels(batch[1], mesh)
    inputs, labels = shard_sequence(batch, mesh)
    if BUGGY:
        count = count_labels(labels, mesh)  # BUG
    loss = cross_entropy(model(*inputs), labels, reduction="sum")
    if mesh is not None:
        dist.all_reduce(loss)
    model.train()
    return loss / count


def train_step(model, batch, optimizer, mesh=None):
    optimizer.zero_grad()
    count = count_labels(batch[1], mesh)
    inputs, labels = shard_sequence(batch, mesh)
    loss = cross_entropy(model(*inputs), labels, reduction="sum") / count
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    loss = loss.detach()
    if mesh is not None:
        dist.all_reduce(loss)
    return {"loss": loss, "validation_loss": validate(model, batch, mesh)}
