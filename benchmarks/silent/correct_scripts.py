"""Correct programs with a training step of their own: what trainers do beside the common step.

A `Script` has one function for both versions, which gets no mesh on the single device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from benchmarks.silent import correct_models as models
from benchmarks.silent.correct_layouts import Layout, list_blocks
from benchmarks.silent.correct_models import Batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim import LBFGS, SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

Mesh = DeviceMesh | None
Step = Callable[..., Any]


class _ScriptLayout(Layout):
    """What a script says of its mesh."""

    def __init__(self, script: Script) -> None:
        super().__init__(script.mesh)
        self.batch_axes, self.batch_dim = script.data, script.batch_dim
        self._script = script

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        parallel = self._script.parallelize(model, mesh)
        return model if parallel is None else parallel

    def sharded_axes(self, name: str) -> dict[str, int]:
        return self._script.sharded(name)


@final
@dataclass(frozen=True, eq=False)
class Script:
    """A training program whose step is a function of its own."""

    name: str
    step: Step  # (model, batch, trainer, mesh=None)
    model: Callable[[], nn.Module] = models.MLP
    batch: Callable[[int, int], Batch] = models.make_vectors
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module | None] = lambda model, _: model
    optimizer: Callable[[nn.Module], Any] = lambda model: SGD(model.parameters(), lr=0.1)
    mesh: Mapping[str, int] = field(default_factory=lambda: {"dp": 2})
    data: tuple[str, ...] = ("dp",)
    batch_dim: int = 0
    batch_size: int = 8
    sharded: Callable[[str], dict[str, int]] = lambda _: {}
    precision: torch.dtype | None = None

    @property
    def layout(self) -> Layout:
        """The mesh and how the model is parallelized."""
        return _ScriptLayout(self)

    @property
    def family(self) -> Any:
        """That nothing is random."""
        return SimpleNamespace(is_random=False)

    def make_model(self) -> nn.Module:
        """The model, always with the same weights."""
        torch.manual_seed(7)
        return self.model()

    def make_batches(self) -> list[Batch]:
        """The batches of two steps."""
        return [self.batch(self.batch_size, seed) for seed in (1, 2)]

    def make_trainer(self, model: nn.Module) -> Any:
        """The optimizer, or an object with it."""
        return self.optimizer(model)

    @property
    def train_step(self) -> Step:
        """The step of a single device."""
        return self.step

    @property
    def rank_step(self) -> Step:
        """The step of a rank."""
        return self.step


def ddp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Replicas over all ranks."""
    return DistributedDataParallel(model, **options)


def fsdp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shards of blocks and the root over all ranks."""
    for layer in list_blocks(model):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def summed(value: Tensor, mesh: Mesh, axis: str = "dp") -> Tensor:
    """The sum over an axis, as a new tensor; on the single device the value."""
    value = value.detach().clone()
    if mesh is not None:
        dist.all_reduce(value, group=mesh.get_group(axis))
    return value


def averaged(value: Tensor, mesh: Mesh, axis: str = "dp") -> Tensor:
    """The mean over an axis."""
    return summed(value, mesh, axis) / (1 if mesh is None else mesh[axis].size())


def reduce_gradients(model: nn.Module, mesh: Mesh, axis: str = "dp") -> None:
    """Average all gradients by hand."""
    for parameter in model.parameters():
        if mesh is not None and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=mesh.get_group(axis))
            parameter.grad /= mesh[axis].size()


def squares(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of regression."""
    return models.sum_squares(model(batch), batch).mean()


def entropies(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of language modelling."""
    return models.cross_entropies(model(batch), batch).mean()


def plain_step(
    model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None, *, loss_of: Any = squares
) -> Tensor:
    """Forward, backward, and a step of the optimizer."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return averaged(loss, mesh)


token_step = partial(plain_step, loss_of=entropies)


def by_hand_step(
    model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None, *, loss_of: Any = squares
) -> Tensor:
    """The same with gradients that are averaged by hand."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    reduce_gradients(model, mesh)
    optimizer.step()
    return averaged(loss, mesh)


# Scaling, clipping and schedules.


def with_scaler(make: Callable[[Any], Any]) -> Callable[[nn.Module], Any]:
    """An optimizer with a scaler of gradients."""
    return lambda model: SimpleNamespace(
        optimizer=make(model.parameters()), scaler=torch.amp.GradScaler("cpu", init_scale=64.0)
    )


def scaler_step(model: nn.Module, batch: Batch, trainer: Any, mesh: Mesh = None) -> Tensor:
    trainer.optimizer.zero_grad()
    loss = squares(model, batch)
    trainer.scaler.scale(loss).backward()
    trainer.scaler.unscale_(trainer.optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    trainer.scaler.step(trainer.optimizer)
    trainer.scaler.update()
    return averaged(loss, mesh)


def clip_each_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Clip each gradient by the norm of its weight, as adaptive gradient clipping does."""
    optimizer.zero_grad()
    loss = squares(model, batch)
    loss.backward()
    for parameter in model.parameters():
        norm, largest = parameter.grad.norm(), parameter.detach().norm() * 0.05 + 1e-3
        if isinstance(norm, DTensor):
            norm, largest = norm.full_tensor(), largest.full_tensor()
        parameter.grad.mul_((largest / norm).clamp(max=1.0))
    optimizer.step()
    return averaged(loss, mesh)


def centered_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Subtract the mean of each gradient of a matrix from its columns."""
    optimizer.zero_grad()
    loss = squares(model, batch)
    loss.backward()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
    optimizer.step()
    return averaged(loss, mesh)


def scheduled(make: Callable[[Any], Any], kind: str) -> Callable[[nn.Module], Any]:
    """An optimizer with a schedule."""

    def build(model: nn.Module) -> Any:
        optimizer = make(model.parameters())
        schedules = {
            "cosine": lambda: CosineAnnealingLR(optimizer, 4),
            "one_cycle": lambda: OneCycleLR(optimizer, 0.1, total_steps=6),
            "sequence": lambda: SequentialLR(
                optimizer,
                [LinearLR(optimizer, 0.1, total_iters=1), CosineAnnealingLR(optimizer, 3)],
                [1],
            ),
        }
        return SimpleNamespace(optimizer=optimizer, schedule=schedules[kind](), num_steps=0)

    return build


def scheduled_step(model: nn.Module, batch: Batch, trainer: Any, mesh: Mesh = None) -> Any:
    loss = plain_step(model, batch, trainer.optimizer, mesh)
    trainer.schedule.step()
    trainer.num_steps += 1
    return {"loss": loss.item(), "lr": trainer.schedule.get_last_lr()[0]}


# Several passes in a step.


def closure_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """An optimizer that evaluates the loss several times."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = squares(model, batch)
        loss.backward()
        reduce_gradients(model, mesh)
        return averaged(loss, mesh)

    return optimizer.step(closure).detach()


def sharpness_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Take the gradient at weights that are moved along the gradient (SAM)."""
    optimizer.zero_grad()
    squares(model, batch).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    moves = [p.grad * (0.05 / norm) for p in model.parameters()]
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.add_(move)
    optimizer.zero_grad()
    loss = squares(model, batch)
    loss.backward()
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.sub_(move)
    optimizer.step()
    return averaged(loss, mesh)


def penalty_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """A penalty of the gradient with respect to the inputs, by a backward through backward."""
    optimizer.zero_grad()
    x = batch["x"].clone().requires_grad_()
    losses = models.sum_squares(model({**batch, "x": x}), batch)
    (gradient,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    loss = losses.mean() + 0.1 * gradient.square().sum(-1).mean()
    loss.backward()
    reduce_gradients(model, mesh)
    optimizer.step()
    return averaged(loss, mesh)


def uneven_micro_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Micro-batches of different sizes, whose losses are divided by all valid samples."""
    optimizer.zero_grad()
    count, size = summed(batch["mask"].sum(), mesh), 1 if mesh is None else mesh.size()
    total = torch.zeros(())
    sizes = [1, len(batch["x"]) - 1]
    for micro in zip(*(tensor.split(sizes) for tensor in batch.values()), strict=True):
        part = dict(zip(batch, micro, strict=True))
        losses = models.sum_squares(model(part), part)
        loss = (losses * part["mask"]).sum() / count
        (loss * size).backward()
        total = total + loss.detach()
    optimizer.step()
    return summed(total, mesh)


class TwoNetworks(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def two_optimizers(model: Any) -> Any:
    """An optimizer for each network."""
    return SimpleNamespace(
        generator=Adam(model.generator.parameters(), lr=0.01),
        critic=RMSprop(model.critic.parameters(), lr=0.01),
    )


def adversarial_step(model: Any, batch: Batch, trainer: Any, mesh: Mesh = None) -> Any:
    """The critic learns first, with generated samples that are detached, then the generator."""
    trainer.critic.zero_grad()
    real, noise = batch["x"], batch["x"].flip(-1)
    fake = model.generator(noise)
    critic_loss = (
        F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(fake.detach())).mean()
    )
    critic_loss.backward()
    reduce_gradients(model.critic, mesh)
    trainer.critic.step()
    trainer.generator.zero_grad()
    generator_loss = F.softplus(-model.critic(fake)).mean()
    generator_loss.backward()
    reduce_gradients(model.generator, mesh)
    trainer.generator.step()
    return {"critic": averaged(critic_loss, mesh), "generator": averaged(generator_loss, mesh)}


# Losses over all ranks.


class Towers(nn.Module):
    """Two encoders whose outputs are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 6), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(batch["x"]), dim=-1), F.normalize(
            self.right(batch["x"].flip(-1)), dim=-1
        )


def contrastive_step(model: Any, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Each sample against the samples of all ranks, whose gradients go back to their ranks."""
    from benchmarks.silent.correct_by_hand import Gather

    optimizer.zero_grad()
    left, right = model(batch)
    rank = 0 if mesh is None else mesh.get_rank()
    all_right, all_left = right, left
    if mesh is not None:
        all_right, all_left = (Gather.apply(x, 0, mesh.get_group("dp")) for x in (right, left))
    labels = torch.arange(len(left)) + rank * len(left)
    scale = model.module.scale if isinstance(model, DistributedDataParallel) else model.scale
    loss = F.cross_entropy(left @ all_right.T * scale, labels)
    loss = loss + F.cross_entropy(right @ all_left.T * scale, labels)
    loss.backward()
    reduce_gradients(model, mesh)
    optimizer.step()
    return averaged(loss, mesh)


def normalized_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Any:
    """Weights of samples that are standardized over all ranks, as advantages are."""
    optimizer.zero_grad()
    rewards = batch["y"].sum(-1)
    count = summed(torch.tensor(float(len(rewards)), dtype=rewards.dtype), mesh)
    mean = summed(rewards.sum(), mesh) / count
    deviation = (summed((rewards - mean).square().sum(), mesh) / count).sqrt()
    advantages = (rewards - mean) / (deviation + 1e-6)
    logits = model(batch).log_softmax(-1)
    loss = -(logits[:, 0] * advantages).mean()
    loss.backward()
    optimizer.step()
    return averaged(loss, mesh), mean, deviation


def weighted_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Cross entropy with weights of classes, divided by the weights of all ranks."""
    optimizer.zero_grad()
    labels, weights = batch["y"].argmax(-1), torch.tensor([1.0, 2.0, 0.5, 1.5]).to(batch["y"])
    total = summed(weights[labels].sum(), mesh)
    size = 1 if mesh is None else mesh.size()
    loss = F.cross_entropy(
        model(batch), labels, weight=weights, reduction="sum", label_smoothing=0.0
    )
    (loss / total * size).backward()
    optimizer.step()
    return summed(loss, mesh) / total


def smoothed_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Smoothed labels, some of which are ignored, divided by the labels of all ranks."""
    optimizer.zero_grad()
    labels = batch["labels"].masked_fill(batch["mask"] == 0, -100)
    count = summed((labels != -100).sum(), mesh)
    size = 1 if mesh is None else mesh.size()
    logits = model(batch).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=0.1) / count
    (loss * size).backward()
    optimizer.step()
    return summed(loss, mesh)


def chunked_step(model: Any, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """The loss of parts of the sequence one after another, of logits that are split."""
    optimizer.zero_grad()
    logits = model(batch)
    parts = zip(logits.split(3, 1), batch["labels"].split(3, 1), strict=True)
    losses = [F.cross_entropy(a.flatten(0, 1), b.flatten(), reduction="sum") for a, b in parts]
    loss = torch.stack(losses).sum() / batch["labels"].numel()
    loss.backward()
    optimizer.step()
    return averaged(loss, mesh)


def packed_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """The mean over documents of the mean over their tokens; documents are of all ranks."""
    optimizer.zero_grad()
    losses = models.cross_entropies(model(batch), batch) * batch["mask"]
    each = losses.sum(1) / batch["mask"].sum(1)
    number = summed(torch.tensor(len(each)), mesh)
    loss = each.sum() / number
    (loss * (1 if mesh is None else mesh.size())).backward()
    optimizer.step()
    return summed(loss, mesh)


# What a step keeps: averages, buffers, counters.


def with_average(model: nn.Module) -> Any:
    """An optimizer, and an averaged copy of the model."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return SimpleNamespace(optimizer=AdamW(model.parameters(), lr=0.01), average=average)


def averaged_step(model: nn.Module, batch: Batch, trainer: Any, mesh: Mesh = None) -> Any:
    loss = plain_step(model, batch, trainer.optimizer, mesh)
    trainer.average.update_parameters(model)
    with torch.no_grad():
        evaluation = squares(trainer.average, batch)
    return loss, averaged(evaluation, mesh)


class Momentum(nn.Module):
    """An encoder, its slow copy, and a queue of the last outputs of the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Linear(8, 4)
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(16, 4))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            keys = self.slow(batch["x"].flip(-1))
        return self.fast(batch["x"]), keys


def queue_step(model: Any, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Compare with the keys of earlier steps; those of all ranks enter the queue."""
    from benchmarks.silent.correct_by_hand import all_gather

    optimizer.zero_grad()
    queries, keys = model(batch)
    loss = (queries - keys).square().mean() + 0.1 * (queries @ model.queue.T).square().mean()
    loss.backward()
    reduce_gradients(model, mesh)
    optimizer.step()
    with torch.no_grad():
        keys = keys if mesh is None else all_gather(keys, 0, mesh.get_group("dp"))
        model.queue.copy_(torch.cat([keys, model.queue])[: len(model.queue)])
        for slow, fast in zip(model.slow.parameters(), model.fast.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
    return averaged(loss, mesh)


class Codebook(nn.Module):
    """Vectors are replaced by the nearest of a codebook, which follows their means."""

    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, batch: Batch) -> Tensor:
        x = self.encode(batch["x"])
        nearest = (x[:, None] - self.codes).square().sum(-1).argmin(-1)
        codes = self.codes[nearest]
        if self.training:
            self.follow(x.detach(), nearest)
        return self.decode(x + (codes - x).detach())

    def follow(self, x: Tensor, nearest: Tensor) -> None:
        """Move the codes towards the means of the vectors of all ranks."""
        hits = F.one_hot(nearest, len(self.codes)).to(x.dtype)
        numbers, sums = hits.sum(0), hits.T @ x
        if self.group is not None:
            dist.all_reduce(numbers, group=self.group)
            dist.all_reduce(sums, group=self.group)
        self.counts.lerp_(numbers, 0.1)
        means = torch.where(numbers[:, None] > 0, sums / numbers[:, None].clamp(min=1), self.codes)
        self.codes.copy_(self.codes.lerp(means, 0.1))


def share_codebook(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Replicas whose codebook follows all ranks."""
    model.group = mesh.get_group("dp")
    return model


def metrics_step(model: nn.Module, batch: Batch, trainer: Any, mesh: Mesh = None) -> Any:
    """Accuracy and loss of all steps so far, from sums over ranks."""
    trainer.optimizer.zero_grad()
    logits = model(batch)
    loss = models.cross_entropies(logits, batch).mean()
    loss.backward()
    trainer.optimizer.step()
    hits = (logits.detach().argmax(-1) == batch["labels"]).sum()
    sums = summed(
        torch.stack([loss.detach() * batch["labels"].numel(), hits, hits * 0 + hits.numel()]), mesh
    )
    tokens = summed(torch.tensor(batch["labels"].numel()), mesh).item()
    trainer.hits += int(sums[1].item())
    trainer.tokens += int(tokens)
    return {
        "perplexity": float((sums[0] / tokens).exp()),
        "accuracy": trainer.hits / trainer.tokens,
    }


# Parameters in other forms.


class Teacher(nn.Module):
    """A student that learns from a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = models.MLP(), models.MLP().requires_grad_(False)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(batch)
        return self.student(batch), wanted


def distillation(model: nn.Module, batch: Batch) -> Tensor:
    """The divergence from the teacher."""
    logits, wanted = model(batch)
    return F.kl_div(
        logits.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean"
    )


def normed_mlp() -> nn.Module:
    """An MLP whose first weight is a direction and a length."""
    model = models.MLP()
    parametrizations.weight_norm(model.up)
    return model


class Skipping(nn.Module):
    """Layers of which each batch uses one, as its number says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.register_buffer("number", torch.zeros((), dtype=torch.long))

    def forward(self, batch: Batch) -> Tensor:
        layer = self.layers[int(self.number) % 2]
        self.number += 1
        return self.head(batch["x"] + layer(batch["x"]).tanh())


def warm_embeddings(model: Any) -> Any:
    """An optimizer, and a counter of steps after which embeddings are trained."""
    return SimpleNamespace(optimizer=AdamW(model.parameters(), lr=0.01), num_steps=0)


def unfreezing_step(model: Any, batch: Batch, trainer: Any, mesh: Mesh = None) -> Tensor:
    """Drop the gradients of embeddings in the first step."""
    trainer.optimizer.zero_grad()
    loss = entropies(model, batch)
    loss.backward()
    if trainer.num_steps == 0:
        for name, parameter in model.named_parameters():
            if "tok" in name:
                parameter.grad = None
    trainer.optimizer.step()
    trainer.num_steps += 1
    return averaged(loss, mesh)


def shard_second_dim(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards along the second dim where that can be divided."""

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(1 if parameter.ndim > 1 and parameter.shape[1] % mesh.size() == 0 else 0)

    return fsdp(model, mesh, shard_placement_fn=place)


def shard_group(model: Any, mesh: DeviceMesh) -> nn.Module:
    """The last norm and the head as one group."""
    for layer in list_blocks(model):
        fully_shard(layer, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_except_norms(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Shards, but norms are replicated, and their gradients averaged by hooks."""
    ignored = {p for n, p in model.named_parameters() if "norm" in n}

    def average(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=mesh.get_group("dp"))
        return gradient / mesh.size()

    for parameter in ignored:
        parameter.register_hook(average)
    return fully_shard(model, mesh=mesh, ignored_params=ignored)


def shard_and_sum(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Shards whose gradients are sums over ranks."""
    fsdp(model, mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return model


def summed_tokens_step(model: Any, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """A sum divided by the tokens of all ranks, with gradients that are summed."""
    optimizer.zero_grad()
    count = summed(batch["mask"].sum(), mesh)
    loss = (models.cross_entropies(model(batch), batch) * batch["mask"]).sum() / count
    loss.backward()
    optimizer.step()
    return summed(loss, mesh)


def late_all_reduce_step(model: Any, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Micro-batches that are reduced over replicas in the last of them only."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for index, part in enumerate(zip(*(t.chunk(2) for t in batch.values()), strict=True)):
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(index == 1)
        loss = entropies(model, dict(zip(batch, part, strict=True))) / 2
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    if mesh is not None:
        total = averaged(averaged(total, mesh, "dp"), mesh, "replicas")
    return total


# Optimizers of which each rank has a part.


def zero_redundancy(model: nn.Module) -> Any:
    """An optimizer whose state is distributed over ranks, or torch's on the single device."""
    if isinstance(model, DistributedDataParallel):
        return ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)
    return AdamW(model.parameters(), lr=0.01)


class OwnedUpdates(SGD):
    """Each rank updates its own parameters, and sends them to the others."""

    group: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        size = 1 if self.group is None else dist.get_world_size(self.group)
        rank = 0 if self.group is None else dist.get_rank(self.group)
        for index, parameter in enumerate(parameters):
            if index % size == rank:
                update = parameter.grad
                if parameter.ndim == 2:
                    update = update / (update.norm() + 1e-6)
                parameter.sub_(update, alpha=0.1)
        for index, parameter in enumerate(parameters):
            if self.group is not None:
                dist.broadcast(parameter, index % size, group=self.group)


def owned_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Average gradients, and let every rank update a part."""
    optimizer.group = None if mesh is None else mesh.get_group("dp")
    return by_hand_step(model, batch, optimizer, mesh)


class FlatAdam:
    """Adam on this rank's part of all parameters in one flat tensor (ZeRO 1)."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.moments: list[Tensor] | None = None

    @torch.no_grad()
    def step(self, mesh: Mesh) -> None:
        """Reduce-scatter gradients, update this rank's part, gather the parameters."""
        size = 1 if mesh is None else mesh.size()
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        weights = torch.cat([p.flatten() for p in self.parameters])
        padding = -len(flat) % size
        flat, weights = (F.pad(tensor, (0, padding)) for tensor in (flat, weights))
        gradient, own = flat, weights
        if mesh is not None:
            gradient = flat.new_empty(len(flat) // size)
            dist.reduce_scatter_tensor(gradient, flat / size, group=mesh.get_group("dp"))
            own = weights.chunk(size)[mesh.get_rank()].clone()
        self.moments = self.moments or [torch.zeros_like(own), torch.zeros_like(own)]
        first, second = self.moments
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient.square(), 0.01)
        own = own - 0.01 * first / (second.sqrt() + 1e-3)
        if mesh is not None:
            dist.all_gather_into_tensor(weights, own.contiguous(), group=mesh.get_group("dp"))
            own = weights
        parts = own[: len(flat) - padding].split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))


def flat_step(model: nn.Module, batch: Batch, trainer: Any, mesh: Mesh = None) -> Tensor:
    model.zero_grad()
    loss = squares(model, batch)
    loss.backward()
    trainer.step(mesh)
    return averaged(loss, mesh)


def list_scripts() -> Iterator[Script]:
    """All programs of this file."""
    adamw: Any = partial(AdamW, lr=0.01)
    fused: Any = lambda model: AdamW(model.parameters(), lr=0.01, fused=True)  # noqa: E731
    momentum: Any = partial(SGD, lr=0.05, momentum=0.9)
    gpt: dict[str, Any] = {"model": models.GPT, "batch": models.make_tokens}
    hsdp = {"replicas": 2, "dp": 2}
    yield Script("scaler/ddp", scaler_step, parallelize=ddp, optimizer=with_scaler(adamw))
    yield Script("scaler/fsdp", scaler_step, parallelize=fsdp, optimizer=with_scaler(momentum))
    yield Script("clip-each/ddp", clip_each_step, parallelize=ddp)
    yield Script("clip-each/fsdp", clip_each_step, parallelize=fsdp)
    yield Script("centered/fsdp", centered_step, parallelize=fsdp)
    yield Script("fused/ddp", plain_step, parallelize=ddp, optimizer=fused)
    yield Script("fused/fsdp", token_step, parallelize=fsdp, optimizer=fused, **gpt)
    yield Script(
        "cosine/ddp", scheduled_step, parallelize=ddp, optimizer=scheduled(adamw, "cosine")
    )
    yield Script(
        "one_cycle/fsdp", scheduled_step, parallelize=fsdp, optimizer=scheduled(adamw, "one_cycle")
    )
    yield Script(
        "sequence/hooks", scheduled_step, parallelize=ddp, optimizer=scheduled(momentum, "sequence")
    )
    yield Script(
        "closure/by-hand", closure_step, optimizer=lambda m: LBFGS(m.parameters(), 0.1, max_iter=3)
    )
    yield Script("sharpness/ddp", sharpness_step, parallelize=ddp)
    yield Script("sharpness/fsdp", sharpness_step, parallelize=fsdp)
    yield Script("penalty/by-hand", penalty_step)
    yield Script("uneven-micro/ddp", uneven_micro_step, parallelize=ddp)
    yield Script("uneven-micro/fsdp", uneven_micro_step, parallelize=fsdp, mesh={"dp": 4})
    yield Script("adversarial/by-hand", adversarial_step, TwoNetworks, optimizer=two_optimizers)
    yield Script("contrastive/by-hand", contrastive_step, Towers)
    yield Script("contrastive/by-hand4", contrastive_step, Towers, mesh={"dp": 4})
    yield Script("advantages/ddp", normalized_step, parallelize=ddp)
    yield Script("class-weights/fsdp", weighted_step, parallelize=fsdp)
    yield Script("smoothing/ddp", smoothed_step, parallelize=ddp, **gpt)
    yield Script("chunked-loss/fsdp", chunked_step, parallelize=fsdp, **gpt)
    yield Script("documents/ddp", packed_step, parallelize=ddp, batch_size=6, **gpt)
    yield Script("average/ddp", averaged_step, parallelize=ddp, optimizer=with_average)
    yield Script("queue/by-hand", queue_step, Momentum)
    yield Script("codebook/by-hand", by_hand_step, Codebook, parallelize=share_codebook)
    yield Script(
        "metrics/ddp",
        metrics_step,
        parallelize=ddp,
        optimizer=lambda m: SimpleNamespace(optimizer=adamw(m.parameters()), hits=0, tokens=0),
        **gpt,
    )
    distilled = partial(plain_step, loss_of=distillation)
    yield Script("teacher/ddp", distilled, Teacher, parallelize=ddp)
    yield Script("teacher/fsdp", distilled, Teacher, parallelize=fsdp)
    yield Script("weight_norm/ddp", plain_step, normed_mlp, parallelize=ddp)
    unused = partial(ddp, find_unused_parameters=True)
    yield Script("skipped-layers/ddp", plain_step, Skipping, parallelize=unused)
    static = partial(ddp, static_graph=True, gradient_as_bucket_view=True)
    yield Script("static-graph/ddp", token_step, parallelize=static, **gpt)
    small = partial(ddp, bucket_cap_mb=0.0005, broadcast_buffers=False)
    yield Script("small-buckets/ddp", token_step, parallelize=small, mesh={"dp": 4}, **gpt)
    yield Script(
        "unfreezing/fsdp", unfreezing_step, parallelize=fsdp, optimizer=warm_embeddings, **gpt
    )
    yield Script("second-dim/fsdp", token_step, parallelize=shard_second_dim, **gpt)
    yield Script("grouped/fsdp", token_step, parallelize=shard_group, **gpt)
    yield Script("ignored/fsdp", token_step, parallelize=shard_except_norms, **gpt)
    yield Script("summed/fsdp", summed_tokens_step, parallelize=shard_and_sum, **gpt)
    yield Script(
        "late-all-reduce/hsdp",
        late_all_reduce_step,
        parallelize=fsdp,
        mesh=hsdp,
        data=("replicas", "dp"),
        **gpt,
    )
    yield Script("zero-redundancy/ddp", plain_step, parallelize=ddp, optimizer=zero_redundancy)
    yield Script(
        "owned-updates/by-hand", owned_step, optimizer=lambda m: OwnedUpdates(m.parameters())
    )
    yield Script("flat-shards/by-hand", flat_step, optimizer=FlatAdam)


SCRIPTS: dict[str, Script] = {script.name: script for script in list_scripts()}
