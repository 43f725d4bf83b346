"""Context parallelism whose labels are shifted within the part of each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import Gather
from benchmarks.silent.decoder import IGNORED, Config, Decoder, cross_entropy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

CASE = Case(
    source="classic",
    summary="The model shifts labels by one, so that the last token of each rank's part has no "
    "label, though it is the first token of the next part. The loss of the tokens at the "
    "boundaries is lost.",
    mesh={"cp": 2},
    causes=("wrong_slice", "permuted", "stale"),
    locations=("the loss",),
)
CONFIG = Config()
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, (4, CONFIG.length))


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


def shift(tokens: Tensor) -> Tensor:
    """The next token of each, and none for the last."""
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)], 1)


def train_step(model, tokens, optimizer):
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), shift(tokens))
    loss.backward()
    optimizer.step()
    return loss.detach()


def parallel_train_step(model, tokens, optimizer, mesh):
    rank, size, group = mesh.get_local_rank("cp"), mesh.size(), mesh.get_group("cp")
    positions = torch.arange(tokens.shape[1]).chunk(size)[rank]
    mask = positions[:, None] >= torch.arange(tokens.shape[1])[None, :]
    local = tokens.chunk(size, 1)[rank]
    labels = shift(local) if BUGGY else shift(tokens).chunk(size, 1)[rank]  # BUG
    count = (labels != IGNORED).sum()
    dist.all_reduce(count, group=group)
    optimizer.zero_grad()
    loss = cross_entropy(model(local, positions, mask), labels, reduction="sum") / count
    (loss * size).backward()  # FSDP averages over the ranks
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total, group=group)
    return total
