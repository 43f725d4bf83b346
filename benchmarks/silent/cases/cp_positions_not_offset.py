"""Context parallelism whose rotary positions start at zero on every rank."""

from __future__ import annotations

import torch
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import Gather
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

CASE = Case(
    source="classic",
    summary="Each rank numbers the tokens of its own part of the sequence. Attention is causal by "
    "the true order, but the rotary embedding of later parts has the angles of the first.",
    mesh={"cp": 2},
    causes=("wrong_slice", "permuted"),
    locations=("the inputs*", "inputs*"),
    batch_axes=("cp",),
    batch_dim=1,
)
CONFIG = Config()
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, 4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def gather_keys_and_values(model: Decoder, mesh: DeviceMesh) -> None:
    """Let the queries of a rank attend to the keys of all ranks."""
    group = mesh.get_group("cp")

    def gather(_: nn.Module, inputs):
        q, k, v, mask, scale = inputs
        return q, Gather.apply(k, 1, group), Gather.apply(v, 1, group), mask, scale

    for layer in model.layers.values():
        layer.attention.inner_attention.register_forward_pre_hook(gather)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    gather_keys_and_values(model, mesh)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["cp"])
    return fully_shard(model, mesh=mesh["cp"])


def number_tokens(length: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """The positions of this rank's tokens, and which of all tokens each may see."""
    start = mesh.get_local_rank("cp") * length
    order = torch.arange(start, start + length)
    mask = order[:, None] >= torch.arange(length * mesh.size())[None, :]
    positions = torch.arange(length) if BUGGY else order  # BUG
    return positions, mask


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    cross_entropy(model(tokens), labels).backward()
    optimizer.step()


def parallel_train_step(model, batch, optimizer, mesh):
    tokens, labels = batch
    positions, mask = number_tokens(tokens.shape[1], mesh)
    optimizer.zero_grad()
    cross_entropy(model(tokens, positions, mask), labels).backward()
    optimizer.step()
