"""Expert parallelism that averages expert gradients over their replicas only."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.silent.case import Case, is_buggy
from benchmarks.silent.correct_by_hand import AllToAll, keep_part
from benchmarks.silent.decoder import Config, Decoder, MoE, cross_entropy, make_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

CASE = Case(
    source="classic",
    summary="Experts are on the ranks of ep and replicated over dp; every rank has other samples. "
    "The gradient of an expert already has the tokens of all ranks of ep, so that the mean over "
    "samples divides by both axes; dividing by dp leaves it twice as large.",
    mesh={"dp": 2, "ep": 2},
    causes=("double_reduction", "scaled"),
    locations=("layers.*.moe.experts", "layers.*.moe"),
    batch_axes=("dp", "ep"),
)
CONFIG = Config(num_layers=1, num_experts=4)
BUGGY = is_buggy()


class ExchangedExperts(nn.Module):
    """Sends the tokens, sorted by expert, to the ranks that have these experts, and back."""

    def __init__(self, experts: nn.Module, group) -> None:
        super().__init__()
        self.experts, self.group = experts, group
        for name in ("w1", "w2", "w3"):
            keep_part(experts, name, 0, group)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        size = dist.get_world_size(self.group)
        counts_here = torch.empty_like(counts)
        dist.all_to_all_single(counts_here, counts, group=self.group)
        sent = counts.view(size, -1).sum(1).tolist()
        received = counts_here.view(size, -1).sum(1).tolist()
        arrived = AllToAll.apply(tokens, sent, received, self.group)
        expert = torch.arange(len(counts) // size).repeat(size).repeat_interleave(counts_here)
        order = expert.argsort(stable=True)
        results = self.experts(arrived[order], counts_here.view(size, -1).sum(0))
        back = torch.empty_like(results).index_copy(0, order, results)
        return AllToAll.apply(back, received, sent, self.group)


def model() -> nn.Module:
    return Decoder(CONFIG)


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    return make_batch(CONFIG)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def full_name(name: str, mesh: DeviceMesh) -> str:
    return name.replace("experts.experts", "experts")


def parallelize(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    for module in list(model.modules()):
        if isinstance(module, MoE):
            module.experts = ExchangedExperts(module.experts, mesh.get_group("ep"))
    return model


def reduce_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average gradients over all samples."""
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        divisor = mesh.size()
        if "experts" not in name:
            dist.all_reduce(parameter.grad, group=mesh.get_group("ep"))
        elif BUGGY:
            divisor = mesh["dp"].size()
        parameter.grad /= divisor  # BUG


def train_step(model, batch, optimizer, mesh=None):
    tokens, labels = batch
    optimizer.zero_grad()
    cross_entropy(model(tokens), labels).backward()
    if mesh is not None:
        reduce_gradients(model, mesh)
    optimizer.step()
