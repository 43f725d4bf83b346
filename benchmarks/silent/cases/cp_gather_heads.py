"""Context parallelism that gathers keys and values along the heads instead of the sequence."""

from __future__ import annotations

import torch
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import Gather, all_gather
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

CASE = Case(
    source="torchtitan 179d9e100",
    summary="The hook around flex attention gathers keys and values along dim 2, where the "
    "sequence was before the kernel took (batch, sequence, heads, head dim). With grouped heads "
    "the shapes fit, so each rank attends to its own part of the sequence with repeated heads.",
    mesh={"cp": 2},
    causes=("wrong_dim",),
    locations=("layers.*.attention.inner_attention", "layers.*.attention"),
)
CONFIG = Config()
SEQUENCE_DIM = 1
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, 4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def apply_cp(model: Decoder, mesh: DeviceMesh) -> None:
    """Gather keys and values before the kernel of each layer."""
    group = mesh.get_group("cp")

    def gather_keys_and_values(_: nn.Module, inputs):
        q, k, v, mask, scale = inputs
        dim = 2 if BUGGY else SEQUENCE_DIM
        k, v = (Gather.apply(x.contiguous(), dim, group) for x in (k, v))  # BUG
        return q, k, v, mask[:, : k.shape[1]], scale

    for layer in model.layers.values():
        layer.attention.inner_attention.register_forward_pre_hook(gather_keys_and_values)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    apply_cp(model, mesh)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["cp"])
    return fully_shard(model, mesh=mesh["cp"])


def shard_sequence(tokens: Tensor, labels: Tensor, mesh: DeviceMesh):
    """This rank's part of the sequence, its positions, and which of all tokens each query sees."""
    rank, size = mesh.get_local_rank("cp"), mesh["cp"].size()
    positions = torch.arange(tokens.shape[SEQUENCE_DIM]).chunk(size)[rank]
    mask = positions[:, None] >= all_gather(positions, 0, mesh.get_group("cp"))[None, :]
    parts = (x.chunk(size, SEQUENCE_DIM)[rank] for x in (tokens, labels))
    return (*parts, positions, mask)


def parallel_train_step(model, batch, optimizer, mesh):
    tokens, labels, positions, mask = shard_sequence(*batch, mesh)
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens, positions, mask), labels)
    loss.backward()
    optimizer.step()
    losses = all_gather(loss.detach()[None], 0, mesh.get_group("cp"))
    return losses.mean()
