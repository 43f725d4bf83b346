"""Dropout of replicated activations with another seed on each rank of tp."""

from __future__ import annotations

import torch
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from benchmarks.silent.tensor_parallel import shard_decoder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="classic",
    summary="Each rank is seeded with its global rank, which is right for data parallelism. With "
    "tensor parallelism the activations after a row-parallel layer are copies, and drop other "
    "elements on each rank; the copies of norms and embeddings drift apart.",
    mesh={"tp": 2},
    causes=("randomness",),
    locations=("layers.*.feed_forward*", "tok_embeddings*"),
)
CONFIG = Config()
BUGGY = is_buggy()


class DecoderWithDropout(Decoder):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.tok_embeddings = nn.Sequential(self.tok_embeddings, nn.Dropout(0.1))
        for layer in self.layers.values():
            layer.feed_forward.register_forward_hook(
                lambda module, _, output: nn.functional.dropout(output, 0.1, module.training)
            )


def model() -> nn.Module:
    return DecoderWithDropout(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, 4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    shard_decoder(model, mesh.get_group("tp"))
    return model


def train_step(model, batch, optimizer, mesh=None):
    tokens, labels = batch
    rank = mesh.get_rank() if mesh is not None and BUGGY else 0
    torch.manual_seed(1234 + rank)  # BUG
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
