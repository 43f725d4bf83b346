"""Tensor-parallel experts on plain tensors, whose input's gradient is not summed over ranks."""

from __future__ import annotations

import torch
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import Reduce
from benchmarks.silent.decoder import Config, Decoder, GroupedExperts, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

CASE = Case(
    source="torchtitan 3ff755178",
    summary="Experts multiply plain tensors with shards of their weights. Each rank's gradient of "
    "the routed tokens comes from its shard only and is not summed, so that all parameters below "
    "the layer get a part of their gradient. The loss goes down more slowly.",
    mesh={"tp": 2},
    causes=("missing_reduction",),
    locations=("layers.*.moe.experts", "layers.*.moe"),
)
CONFIG = Config(num_experts=4, has_shared_expert=True, is_scored_before_experts=True)
SHARDED_DIMS = {"w1": 2, "w2": 1, "w3": 2}
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, 4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class LocalExperts(GroupedExperts):
    """Experts whose weights are DTensors, and that compute with this rank's part of them."""

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        if not BUGGY:
            mesh = self.w1.device_mesh
            whole = DTensor.from_local(tokens, mesh, [Replicate()])
            tokens = whole.to_local(grad_placements=[Partial()])
        w1, w2, w3 = (weight.to_local() for weight in (self.w1, self.w2, self.w3))
        parts = tokens.split(counts.tolist())
        results = [
            (nn.functional.silu(x @ w1[i]) * (x @ w3[i])) @ w2[i]  # BUG
            for i, x in enumerate(parts)
        ]
        return torch.cat(results)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    tp = mesh["tp"]
    for layer in model.layers.values():
        experts = layer.moe.experts
        experts.__class__ = LocalExperts
        for name, dim in SHARDED_DIMS.items():
            weight = distribute_tensor(getattr(experts, name).detach(), tp, [Shard(dim)])
            setattr(experts, name, nn.Parameter(weight))
        experts.register_forward_hook(lambda _, __, y: Reduce.apply(y, tp.get_group()))
        plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
        parallelize_module(layer.moe.shared_expert, tp, plan)
    return model


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()
