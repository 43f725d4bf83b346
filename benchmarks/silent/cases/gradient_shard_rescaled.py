"""Sharded gradients: the accumulated shard is scaled, and not the gradient that is reduced."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import Group, all_gather
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="Megatron-LM pull request 3023",
    summary="With ZeRO-2 the gradients of a micro-batch are scaled by 1 / ranks, and then "
    "reduce-scattered into the shard that accumulates them. The shard was scaled instead: the "
    "last micro-batch counts as many times too much as there are ranks, earlier ones do not. "
    "Adam hides the factor.",
    mesh={"dp": 2},
    causes=("scaled", "double_reduction"),
    locations=("all gradients",),
    batch_axes=("dp",),
)
CONFIG = Config()
NUM_MICRO = 2
BUGGY = is_buggy()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [getattr(parameter, "main_param", parameter) for parameter in model.parameters()]
    return torch.optim.AdamW(parameters, lr=1e-2)


def shard_gradients(model: nn.Module, group: Group) -> None:
    """Reduce gradients as soon as they are computed, and keep this rank's shard of each."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def reduce(parameter: nn.Parameter) -> None:
        bucket = parameter.grad.contiguous()
        scaled = parameter.main_grad if BUGGY else bucket
        scaled.mul_(1 / size)  # BUG
        shard = torch.empty_like(parameter.main_grad)
        dist.reduce_scatter_tensor(shard, bucket, group=group)
        parameter.main_grad += shard
        parameter.grad = None

    for parameter in model.parameters():
        shard = parameter.detach().chunk(size)[rank]
        parameter.main_param = nn.Parameter(shard)  # shares memory with the parameter
        parameter.main_grad = torch.zeros_like(shard)
        parameter.register_post_accumulate_grad_hook(reduce)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    shard_gradients(model, mesh.get_group("dp"))
    return model


def train_step(model, batch, optimizer):
    tokens, labels = batch
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def parallel_train_step(model, batch, optimizer, mesh):
    group = mesh.get_group("dp")
    total = torch.zeros(())
    for tokens, labels in zip(*(x.chunk(NUM_MICRO) for x in batch), strict=True):
        loss = cross_entropy(model(tokens), labels) / NUM_MICRO
        loss.backward()
        total += loss.detach()
    for parameter in model.parameters():
        parameter.main_param.grad = parameter.main_grad
    optimizer.step()
    for parameter in model.parameters():
        parameter.main_grad.zero_()
        with torch.no_grad():
            parameter.copy_(all_gather(parameter.main_param.detach(), 0, group))
    dist.all_reduce(total, op=dist.ReduceOp.AVG, group=group)
    return total
