"""Updated parameters are gathered into the buffer of gradients, which is not cleared."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import Group
from benchmarks.silent.decoder import Config, Decoder, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="Megatron-LM pull request 4609",
    summary="Each rank updates some of the parameters. To save memory, the updated ones arrive in "
    "the buffer of gradients, after it was cleared for the next step. The gradients of that step "
    "are added to the parameters in the buffer.",
    mesh={"dp": 2},
    causes=("overwritten",),
    locations=("all gradients",),
    batch_axes=("dp",),
)
CONFIG = Config()
BUGGY = is_buggy()


class LayerWise:
    """Gradients in one buffer; each rank has the optimizer of every second parameter."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.group, self.size = group, dist.get_world_size(group)
        self.parameters = list(model.parameters())
        sizes = [parameter.numel() for parameter in self.parameters]
        self.gradients = torch.zeros(sum(sizes), dtype=self.parameters[0].dtype)
        parts = self.gradients.split(sizes)
        for index, (parameter, part) in enumerate(zip(self.parameters, parts, strict=True)):
            parameter.owner = index % self.size
            parameter.main_grad = part.view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self.accumulate)

    @staticmethod
    def accumulate(parameter: nn.Parameter) -> None:
        parameter.main_grad += parameter.grad
        parameter.grad = None

    def own(self) -> list[nn.Parameter]:
        rank = dist.get_rank(self.group)
        return [parameter for parameter in self.parameters if parameter.owner == rank]

    def reduce_gradients(self) -> None:
        dist.all_reduce(self.gradients, op=dist.ReduceOp.AVG, group=self.group)
        for parameter in self.own():
            parameter.grad = parameter.main_grad

    def gather_parameters(self) -> None:
        """Get the parameters that other ranks have updated, through the buffer."""
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.main_grad.copy_(parameter)
                owner = dist.get_global_rank(self.group, parameter.owner)
                dist.broadcast(parameter.main_grad, owner, group=self.group)
                parameter.copy_(parameter.main_grad)
            if not BUGGY:
                self.gradients.zero_()


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    layer_wise = getattr(model, "layer_wise", None)
    parameters = model.parameters() if layer_wise is None else layer_wise.own()
    return torch.optim.AdamW(parameters, lr=1e-2)


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    model.layer_wise = LayerWise(model, mesh.get_group("dp"))
    return model


def train_step(model, batch, optimizer):
    tokens, labels = batch
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def parallel_train_step(model, batch, optimizer, mesh):
    tokens, labels = batch
    loss = cross_entropy(model(tokens), labels)
    loss.backward()
    model.layer_wise.reduce_gradients()
    optimizer.step()
    optimizer.zero_grad()
    model.layer_wise.gradients.zero_()
    model.layer_wise.gather_parameters()  # BUG
    loss = loss.detach()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
    return loss
