"""Tensor-parallel experts whose scores' gradient is a partial sum that nothing reduces."""

from __future__ import annotations

import torch
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import Copy, Reduce, keep_part
from benchmarks.silent.decoder import Config, Decoder, MoE, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

CASE = Case(
    source="torchtitan de329200b",
    summary="The router is replicated and the experts are sharded. With scores that multiply the "
    "experts' partial outputs the gradient of the scores is partial, but is marked as replicated, "
    "so that the router's weights drift apart from rank to rank. Forward is right.",
    mesh={"tp": 2},
    causes=("missing_reduction",),
    locations=(
        "layers.*.moe",
        "layers.*.moe.router",
        "layers.*.moe.router.gate",
        "layers.*.moe.router.gate.weight",
    ),
)
CONFIG = Config(num_experts=4, has_shared_expert=False)
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG, 4)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def replicate_gate(gate: nn.Linear, mesh: DeviceMesh) -> None:
    """Make the gate's weight a DTensor, while its input and output stay plain tensors."""
    weight = distribute_tensor(gate.weight.detach(), mesh, [Replicate()])
    gate.weight = nn.Parameter(weight)

    def enter(_: nn.Module, inputs: tuple[Tensor]):
        return (DTensor.from_local(inputs[0], mesh, [Replicate()]),)

    def leave(_: nn.Module, __: object, scores: DTensor) -> Tensor:
        if BUGGY:
            return scores.to_local()  # BUG
        return scores.to_local(grad_placements=[Partial()])

    gate.register_forward_pre_hook(enter)
    gate.register_forward_hook(leave)


def shard_experts(moe: MoE, mesh: DeviceMesh) -> None:
    """Shard the hidden dim of all experts; the output of the layer is summed at its end."""
    group = mesh.get_group("tp")
    for name, dim in (("w1", 2), ("w2", 1), ("w3", 2)):
        keep_part(moe.experts, name, dim, group)
    moe.experts.register_forward_pre_hook(
        lambda _, inputs: (Copy.apply(inputs[0], group), inputs[1])
    )
    moe.register_forward_hook(lambda _, __, y: Reduce.apply(y, group))


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():
        replicate_gate(layer.moe.router.gate, mesh["tp"])
        shard_experts(layer.moe, mesh["tp"])
    return model


def train_step(model, batch, optimizer):
    tokens, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()
