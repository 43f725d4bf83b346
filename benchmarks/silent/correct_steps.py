"""Training steps of the correct programs, for a single device and for ranks, made of details."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from benchmarks.silent.correct_models import Batch, MixtureOfExperts
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR


@dataclass(frozen=True)
class Details:
    """What a training step does beside forward, backward and the step of the optimizer."""

    optimizer: str = "sgd"
    num_micro: int = 1  # micro-batches
    normalization: str = (
        "mean"  # of the loss: over samples or tokens, or "tokens" that are unmasked
    )
    clipping: str = ""  # by "norm", "total", "hand" or "value"
    schedule: str = ""
    has_average: bool = False  # of the weights, exponential
    has_z_loss: bool = False
    has_balance_loss: bool = False  # of the experts
    is_skipping: bool = (
        False  # steps with a large gradient norm, as a scaler does for infinite ones
    )
    has_evaluation: bool = False
    is_logged: bool = False  # the step returns reduced numbers

    @property
    def label(self) -> str:
        """The details that are not the default, for the name of a program."""
        names = [self.optimizer, f"micro{self.num_micro}" if self.num_micro > 1 else ""]
        names += [self.normalization if self.normalization != "mean" else "", self.clipping]
        names += [self.schedule]
        flags = ("has_average", "has_z_loss", "has_balance_loss", "is_skipping")
        flags += ("has_evaluation", "is_logged")
        names += [flag.partition("_")[2] for flag in flags if getattr(self, flag)]
        return "-".join(filter(None, names))


LossOfElements = Callable[[Tensor, Batch], Tensor]


class Ranks(Protocol):
    """What a training step of ranks needs to know of how the model is parallelized."""

    data_axes: tuple[str, ...]  # along which ranks have different samples or tokens
    is_averaging: bool  # backward averages gradients over the data axes

    def split(self, batch: Batch, mesh: DeviceMesh) -> Batch: ...
    def micro_step(self, model: nn.Module, *, is_last: bool) -> Any: ...
    def forward(self, model: nn.Module, batch: Batch, mesh: DeviceMesh) -> Any: ...
    def losses(
        self, outputs: Any, batch: Batch, elements: LossOfElements, mesh: DeviceMesh
    ) -> Any: ...
    def reduce_gradients(self, model: nn.Module, mesh: DeviceMesh) -> None: ...
    def sharded_axes(self, name: str) -> Mapping[str, int]: ...


class Muon(Optimizer):
    """Momentum whose update of matrices is orthogonalized, in full, on every rank."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(group["momentum"]).add_(parameter.grad)
                update = momentum
                if parameter.ndim == 2:
                    is_sharded = isinstance(momentum, DTensor)
                    update = orthogonalize(momentum.full_tensor() if is_sharded else momentum)
                    if is_sharded:
                        update = DTensor.from_local(
                            update, momentum.device_mesh, run_check=False
                        ).redistribute(placements=momentum.placements)
                parameter.add_(update, alpha=-group["lr"])


def orthogonalize(matrix: Tensor) -> Tensor:
    """Five steps of Newton and Schulz towards the nearest orthogonal matrix."""
    x = matrix / (matrix.norm() + 1e-3)
    for _ in range(5):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


class Adafactor(Optimizer):
    """Scales the gradients of matrices by factored second moments, which all ranks share."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, beta = self.state[parameter], group["beta"]
                squares = parameter.grad.square() + 1e-4
                if parameter.ndim < 2:
                    mean = state.setdefault("square", torch.zeros_like(parameter))
                    mean.mul_(beta).add_(squares, alpha=1 - beta)
                    scale = mean
                else:
                    for entry, dim in (("row", -1), ("column", -2)):
                        mean = squares.mean(dim, keepdim=True)
                        if isinstance(mean, DTensor):
                            mean = mean.redistribute(placements=_without_partial(mean))
                        old = state.get(entry, torch.zeros_like(mean))
                        state[entry] = old * beta + mean * (1 - beta)
                    row = state["row"]
                    scale = row * state["column"] / row.mean(-2, keepdim=True)
                parameter.sub_(parameter.grad * (scale + 1e-8).rsqrt() * group["lr"])


def _without_partial(tensor: DTensor) -> list[Any]:
    from torch.distributed.tensor import Replicate

    return [Replicate() if placement.is_partial() else placement for placement in tensor.placements]


class Trainer(SimpleNamespace):
    """The optimizers, schedulers and averaged weights of a run."""

    optimizers: list[Optimizer]


def make_trainer(model: nn.Module, details: Details) -> Trainer:
    """The optimizers of a model and what belongs to them."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    trainer = Trainer(
        optimizers=_make_optimizers(named, details.optimizer), tokens_seen=0, skipped=0
    )
    trainer.schedulers = [_make_scheduler(o, details.schedule) for o in trainer.optimizers]
    trainer.average = {n: p.detach().clone() for n, p in named} if details.has_average else {}
    return trainer


def _make_optimizers(named: list[tuple[str, nn.Parameter]], kind: str) -> list[Optimizer]:
    parameters = [parameter for _, parameter in named]
    biases = [p for n, p in named if p.ndim < 2]
    matrices = [p for n, p in named if p.ndim >= 2]
    match kind:
        case "momentum":
            return [SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)]
        case "adamw":
            return [AdamW(parameters, lr=0.01, weight_decay=0.1)]
        case "foreach":
            return [AdamW(parameters, lr=0.01, foreach=True)]
        case "unfused":
            return [AdamW(parameters, lr=0.01, fused=False, amsgrad=True)]
        case "groups":
            groups = [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "lr": 0.1}]
            return [AdamW([g for g in groups if g["params"]], lr=0.02, weight_decay=0.0)]
        case "two":
            split = ([Muon(matrices)] if matrices else []) + (
                [AdamW(biases, lr=0.01)] if biases else []
            )
            return list(split)
        case "muon":
            return [Muon(parameters)]
        case "adafactor":
            return [Adafactor(parameters)]
    return [SGD(parameters, lr=0.1)]


def _make_scheduler(optimizer: Optimizer, kind: str) -> Any:
    if kind == "warmup":
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    return StepLR(optimizer, 1, gamma=0.5) if kind == "decay" else None


def split_micro(batch: Batch, number: int) -> list[Batch]:
    """The micro-batches of a batch."""
    parts = {name: tensor.tensor_split(number) for name, tensor in batch.items() if tensor.ndim}
    return [{name: part[index] for name, part in parts.items()} for index in range(number)]


def penalties(
    model: nn.Module,
    outputs: Tensor,
    details: Details,
    ranks: Ranks | None = None,
    mesh: DeviceMesh | None = None,
) -> Tensor:
    """The mean over this rank's tokens of auxiliary losses.

    The balance of experts counts the tokens of all ranks.
    """
    if not details.has_z_loss and not details.has_balance_loss:
        return torch.zeros(())
    total = torch.zeros((), dtype=outputs.dtype)
    if details.has_z_loss:
        total = total + 1e-2 * outputs.logsumexp(-1).square().mean()
    for module in model.modules() if details.has_balance_loss else ():
        if isinstance(module, MixtureOfExperts) and module.scores is not None:
            chosen = module.scores.topk(module.top_k, -1).indices.flatten()
            counts = torch.bincount(chosen, minlength=module.num_experts).to(total.dtype)
            if ranks is not None and mesh is not None:
                sum_over_data(counts, ranks, mesh)
            shares = counts / counts.sum() * module.num_experts
            total = total + 1e-1 * (shares * module.scores.mean(0)).sum()
    return total


def single_step(elements: LossOfElements, details: Details) -> Callable[..., Any]:
    """The training step of a single device."""

    def train_step(model: nn.Module, batch: Batch, trainer: Trainer) -> Any:
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
        count = batch["mask"].sum() if details.normalization == "tokens" else None
        total = torch.zeros(())
        for micro in split_micro(batch, details.num_micro):
            outputs = model(micro)
            losses = elements(outputs, micro)
            if count is not None:
                loss = (losses * micro["mask"]).sum() / count
            else:
                loss = losses.mean() / details.num_micro
            loss = loss + penalties(model, outputs, details) / details.num_micro
            loss.backward()
            total = total + loss.detach()
        norm = clip_single(model, details)
        update(model, trainer, details, norm)
        return report(model, trainer, details, total, norm, batch, elements)

    return train_step


def clip_single(model: nn.Module, details: Details) -> Tensor | None:
    """Clip gradients as the details say; the norm, if it was computed."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    if details.clipping == "value":
        nn.utils.clip_grad_value_(parameters, 0.02)
        return None
    if details.clipping == "hand" or details.is_skipping:
        norm = torch.stack([p.grad.square().sum() for p in parameters]).sum().sqrt()
        if details.clipping:
            scale_gradients(parameters, norm)
        return norm
    return clip_with_torch(parameters, details)


def clip_with_torch(parameters: list[Tensor], details: Details) -> Tensor | None:
    """Clip with torch's functions."""
    if details.clipping == "norm":
        return nn.utils.clip_grad_norm_(parameters, 0.1)
    if details.clipping == "total":
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)
        return norm
    return None


def scale_gradients(parameters: list[Tensor], norm: Tensor) -> None:
    """Scale gradients so that their norm is at most 0.1."""
    factor = (0.1 / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        parameter.grad.mul_(factor)


def update(model: nn.Module, trainer: Trainer, details: Details, norm: Tensor | None) -> None:
    """Step the optimizers, unless the step is skipped, the schedulers and the averaged weights."""
    if details.is_skipping and norm is not None and float(norm) > trainer_limit(trainer):
        trainer.skipped += 1
        return
    for optimizer, scheduler in zip(trainer.optimizers, trainer.schedulers, strict=True):
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trainer.average:
                trainer.average[name].lerp_(parameter, 0.1)


def trainer_limit(trainer: Trainer) -> float:
    """The norm above which a step is skipped: the second step is."""
    return 1e6 if trainer.tokens_seen == 0 else 0.0


def report(
    model: nn.Module,
    trainer: Trainer,
    details: Details,
    loss: Tensor,
    norm: Tensor | None,
    batch: Batch,
    elements: LossOfElements,
) -> Any:
    """What the step of a single device returns."""
    trainer.tokens_seen += int(batch["mask"].sum())
    numbers: dict[str, Any] = {"loss": loss}
    if details.has_evaluation:
        model.eval()
        with torch.no_grad():
            numbers["evaluation"] = elements(model(batch), batch).mean()
        model.train()
    if details.is_logged:
        numbers |= {"tokens": trainer.tokens_seen, "skipped": trainer.skipped}
        if norm is not None:
            numbers["norm"] = norm
    return numbers if details.is_logged or details.has_evaluation else loss


def rank_step(ranks: Ranks, elements: LossOfElements, details: Details) -> Callable[..., Any]:
    """The training step of a rank."""

    def train_step(model: nn.Module, batch: Batch, trainer: Trainer, mesh: DeviceMesh) -> Any:
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
        batch = ranks.split(batch, mesh)
        num_data = data_size(ranks, mesh)
        is_plain = details.normalization == "mean" and ranks.is_averaging
        count = batch["mask"].sum()
        if details.normalization == "mean":
            count = torch.tensor(float(batch["mask"].numel()), dtype=count.dtype)
        if not is_plain:
            sum_over_data(count, ranks, mesh)
        scale = num_data if ranks.is_averaging else 1
        total = torch.zeros(())
        for index, micro in enumerate(split_micro(batch, details.num_micro)):
            with ranks.micro_step(model, is_last=index == details.num_micro - 1):
                outputs = ranks.forward(model, micro, mesh)
                losses = ranks.losses(outputs, micro, elements, mesh)
                if is_plain:  # the mean over ranks of means is that over all samples
                    loss = losses.mean() / details.num_micro / num_data
                elif details.normalization == "tokens":
                    loss = (losses * micro["mask"]).sum() / count
                else:
                    loss = losses.sum() / count
                share = details.num_micro * num_data
                loss = loss + penalties(model, outputs, details, ranks, mesh) / share
                (loss * scale).backward()
            total = total + loss.detach()
        ranks.reduce_gradients(model, mesh)
        norm = clip_rank(model, ranks, details, mesh)
        update(model, trainer, details, norm)
        return report_rank(model, trainer, details, total, norm, batch, elements, ranks, mesh)

    return train_step


def data_size(ranks: Ranks, mesh: DeviceMesh) -> int:
    """How many different parts of the batch there are."""
    size = 1
    for axis in ranks.data_axes:
        size *= mesh[axis].size()
    return size


def sum_over_data(tensor: Tensor, ranks: Ranks, mesh: DeviceMesh) -> Tensor:
    """Sum a tensor in place over the ranks with different samples."""
    for axis in ranks.data_axes:
        dist.all_reduce(tensor, group=mesh.get_group(axis))
    return tensor


def clip_rank(model: nn.Module, ranks: Ranks, details: Details, mesh: DeviceMesh) -> Tensor | None:
    """Clip gradients of shards as the details say; the norm, if it was computed."""
    named = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
    parameters = [parameter for _, parameter in named]
    if details.clipping == "value":
        nn.utils.clip_grad_value_(parameters, 0.02)
        return None
    if details.clipping == "hand" or details.is_skipping:
        norm = total_norm(named, ranks, mesh)
        if details.clipping:
            scale_gradients(parameters, norm)
        return norm
    norm = clip_with_torch(parameters, details)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def total_norm(named: list[tuple[str, Tensor]], ranks: Ranks, mesh: DeviceMesh) -> Tensor:
    """The norm of all gradients: squares of shards are summed over the axes that shard them."""
    sums: dict[tuple[str, ...], Tensor] = {}
    for name, parameter in named:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            axes, square = (), gradient.square().sum().full_tensor()
        else:
            axes, square = tuple(ranks.sharded_axes(plain_name(name))), gradient.square().sum()
        sums[axes] = sums[axes] + square if axes in sums else square.clone()
    axes_of_all = sorted(set(itertools.chain(*sums)) | set(getattr(ranks, "stage_axes", ())))
    total = sums.pop((), torch.zeros(()))
    if getattr(ranks, "stage_axes", ()):  # a stage has parameters of its own
        for axis in axes_of_all:
            dist.all_reduce(total, group=mesh.get_group(axis))
    for axes, square in sorted(sums.items()):
        for axis in axes:
            dist.all_reduce(square, group=mesh.get_group(axis))
        total = total + square
    return total.sqrt()


def plain_name(name: str) -> str:
    """The name of a parameter without the prefixes of wrappers."""
    for prefix in ("_checkpoint_wrapped_module.", "_orig_mod.", "module."):
        name = name.replace(prefix, "")
    return re.sub(r"^parts\.\d+\.", "", name)


def report_rank(
    model: nn.Module,
    trainer: Trainer,
    details: Details,
    loss: Tensor,
    norm: Tensor | None,
    batch: Batch,
    elements: LossOfElements,
    ranks: Ranks,
    mesh: DeviceMesh,
) -> Any:
    """What the step of a rank returns: numbers reduced over all ranks."""
    tokens = sum_over_data(batch["mask"].sum(), ranks, mesh)
    trainer.tokens_seen += int(tokens)
    loss = sum_over_data(loss.clone(), ranks, mesh)
    numbers: dict[str, Any] = {"loss": loss}
    if details.has_evaluation:
        model.eval()
        with torch.no_grad(), ranks.micro_step(model, is_last=True):
            losses = ranks.losses(ranks.forward(model, batch, mesh), batch, elements, mesh)
            sums = torch.stack([losses.sum(), torch.full_like(losses.sum(), losses.numel())])
            sum_over_data(sums, ranks, mesh)
            numbers["evaluation"] = sums[0] / sums[1]
        model.train()
    if details.is_logged:
        numbers |= {"tokens": trainer.tokens_seen, "skipped": trainer.skipped}
        if norm is not None:
            numbers["norm"] = norm
    return numbers if details.is_logged or details.has_evaluation else loss


def iterate_details(kinds: str) -> Iterator[Details]:
    """Details from short texts, such as `adamw micro2 tokens norm logged`, one per line."""
    for line in filter(None, map(str.strip, kinds.splitlines())):
        yield parse_details(line)


OPTIMIZERS = (
    "sgd", "momentum", "adamw", "foreach", "unfused", "groups", "two", "muon", "adafactor",
)  # fmt: skip
FLAGS = {
    "average": "has_average",
    "z_loss": "has_z_loss",
    "balance_loss": "has_balance_loss",
    "skipping": "is_skipping",
    "evaluation": "has_evaluation",
    "logged": "is_logged",
}


def parse_details(text: str) -> Details:
    """The details that a text of words lists."""
    fields: dict[str, Any] = {}
    for word in text.split():
        if word in OPTIMIZERS:
            fields["optimizer"] = word
        elif word.startswith("micro"):
            fields["num_micro"] = int(word.removeprefix("micro"))
        elif word == "tokens":
            fields["normalization"] = word
        elif word in ("norm", "total", "hand", "value"):
            fields["clipping"] = word
        elif word in ("warmup", "decay"):
            fields["schedule"] = word
        else:
            fields[FLAGS[word]] = True
    return Details(**fields)
