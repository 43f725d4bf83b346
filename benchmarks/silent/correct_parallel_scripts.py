"""Correct programs with parallelisms that the layouts do not have, as scripts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.silent import correct_models as models
from benchmarks.silent.correct_by_hand import (
    Copy,
    Gather,
    Reduce,
    ReduceScatter,
    all_gather,
    keep_part,
    pass_along,
)
from benchmarks.silent.correct_layouts import list_blocks
from benchmarks.silent.correct_models import Batch
from benchmarks.silent.correct_scripts import (
    Mesh,
    Script,
    averaged,
    ddp,
    fsdp,
    plain_step,
    reduce_gradients,
    squares,
    summed,
    token_step,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor import Shard as Split


class SwapDims(torch.autograd.Function):
    """Exchange between ranks so that another dim is sharded, as sequence and heads are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathered: int, split: int, group: Any) -> Tensor:
        ctx.dims, ctx.group = (gathered, split), group
        return swap_dims(x, gathered, split, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gathered, split = ctx.dims
        return swap_dims(gradient, split, gathered, ctx.group), None, None, None


def swap_dims(x: Tensor, gathered: int, split: int, group: Any) -> Tensor:
    """Gather one dim and split another with an all-to-all."""
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), split)]
    received = [torch.empty_like(part) for part in parts]
    dist.all_to_all(received, parts, group=group)
    return torch.cat(received, gathered)


class HeadMixing(nn.Module):
    """Attention of this rank's heads over the full sequence (Ulysses)."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (SwapDims.apply(x, 2, 1, self.group) for x in (q, k, v))
        positions = all_gather(positions, 0, self.group)
        return SwapDims.apply(models.attend(q, k, v, positions, positions), 1, 2, self.group)


def share_heads(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Attention by heads on parts of the sequence, with parameters of FSDP."""
    for layer in list_blocks(model):
        layer.attn.mixing = HeadMixing(mesh.get_group("cp"))
    return fsdp(model, mesh)


def sequence_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Every rank has a part of each sequence, and its positions."""
    optimizer.zero_grad()
    if mesh is not None:
        rank, size = mesh.get_local_rank("cp"), mesh["cp"].size()
        order = torch.arange(batch["tokens"].shape[1]).chunk(size)[rank]
        batch = {name: tensor[:, order] for name, tensor in batch.items()}
        batch["positions"] = order.expand(len(batch["tokens"]), -1)
    loss = models.cross_entropies(model(batch), batch).mean()
    loss.backward()
    optimizer.step()
    return averaged(loss, mesh, "cp")


class CapacityMoE(models.MixtureOfExperts):
    """Experts that take at most some tokens of each sample; the rest is dropped."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weights, chosen = scores.max(-1)
        hits = nn.functional.one_hot(chosen, self.num_experts)
        place = (hits.cumsum(1) * hits).sum(-1)  # among the tokens of the sample for that expert
        weights = weights * (place <= 3)
        tokens, order = x.reshape(-1, x.shape[-1]), chosen.reshape(-1).argsort(stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=self.num_experts)
        results = self.experts(tokens[order], counts)
        results = torch.empty_like(results).index_copy(0, order, results)
        return results.view(x.shape) * weights[..., None]


class BiasedMoE(models.MixtureOfExperts):
    """A bias of the choice of experts, which follows how many tokens each expert had."""

    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(self.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.router(tokens).sigmoid()
        chosen = (scores + self.bias).topk(self.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        repeated = tokens.repeat_interleave(self.top_k, 0)
        results = self.dispatch(self.experts, repeated, chosen.reshape(-1), self.num_experts)
        if self.training:
            counts = torch.bincount(chosen.reshape(-1), minlength=self.num_experts).to(x.dtype)
            if self.group is not None:
                dist.all_reduce(counts, group=self.group)
            self.bias += 0.01 * (counts.mean() - counts).sign()
        mixed = results.view(len(tokens), self.top_k, -1) * weights[..., None]
        return mixed.sum(1).reshape(x.shape)


def with_layers(make: Any) -> nn.Module:
    """A language model with another feed-forward network."""
    model = models.GPT()
    for layer in list_blocks(model):
        layer.mlp = make()
    return model


def share_counts(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Replicas whose biases follow the tokens of all ranks."""
    for module in model.modules():
        if isinstance(module, BiasedMoE):
            module.group = mesh.get_group("dp")
    return ddp(model, mesh)


class GatheredDispatch(nn.Module):
    """Every rank gets all tokens, applies its own experts, and gets back the sums for its own."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def forward(self, experts: nn.Module, tokens: Tensor, chosen: Tensor, number: int) -> Tensor:
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        tokens, chosen = Gather.apply(tokens, 0, self.group), all_gather(chosen, 0, self.group)
        first = rank * (number // size)
        own = torch.nonzero((chosen >= first) & (chosen < first + number // size)).flatten()
        order = own[chosen[own].argsort(stable=True)]
        counts = torch.bincount(chosen[own] - first, minlength=number // size)
        results = torch.zeros_like(tokens).index_copy(0, order, experts(tokens[order], counts))
        return ReduceScatter.apply(results, 0, self.group)


def share_experts(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A part of the experts on every rank."""
    for module in model.modules():
        if isinstance(module, models.MixtureOfExperts):
            for name in ("up", "down"):
                keep_part(module.experts, name, 0, mesh.get_group("dp"))
            module.dispatch = GatheredDispatch(mesh.get_group("dp"))
    return model


def experts_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Sum all gradients but those of experts, which have the tokens of all ranks."""
    optimizer.zero_grad()
    size = 1 if mesh is None else mesh.size()
    loss = models.cross_entropies(model(batch), batch).mean() / size
    loss.backward()
    for name, parameter in model.named_parameters():
        if mesh is not None and "experts" not in name:
            dist.all_reduce(parameter.grad)
    optimizer.step()
    return summed(loss, mesh)


class Halo(torch.autograd.Function):
    """Add the neighbours' rows at both ends of a part of an image; zeros at the ends of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        above, below = exchange(x[:, :, -1:], x[:, :, :1], group)
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        above, below = exchange(gradient[:, :, -1:], gradient[:, :, :1], ctx.group)
        inner = gradient[:, :, 1:-1].clone()
        inner[:, :, :1] += above
        inner[:, :, -1:] += below
        return inner, None


def exchange(last: Tensor, first: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Rows of the rank before and of the rank after, where there are such."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    above, below = pass_along(last, 1, group), pass_along(first, -1, group)
    return above * (rank > 0), below * (rank < size - 1)


class RowConv(nn.Module):
    """A convolution of this rank's rows of images."""

    def __init__(self, conv: nn.Conv2d, group: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.group = conv.weight, conv.bias, group

    def forward(self, x: Tensor) -> Tensor:
        x = Halo.apply(x, self.group)
        return nn.functional.conv2d(x, self.weight, self.bias, padding=(0, 1))


class Images(nn.Module):
    """Two convolutions, and the mean over the image."""

    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 4)

    def forward(self, batch: Batch) -> Tensor:
        x = self.conv2(torch.tanh(self.conv1(batch["x"]))).mean((2, 3))
        if self.group is not None:
            x = Reduce.apply(x, self.group) / dist.get_world_size(self.group)
        return self.head(x)


def share_rows(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Rows of images on the ranks."""
    group = mesh.get_group("dp")
    model.conv1, model.conv2 = RowConv(model.conv1, group), RowConv(model.conv2, group)
    model.group = group
    return model


def rows_step(model: Any, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Convolutions see parts of the images, the head sees all."""
    optimizer.zero_grad()
    if mesh is not None:
        batch = {**batch, "x": batch["x"].chunk(mesh.size(), 2)[mesh.get_rank()]}
    loss = squares(model, batch)
    loss.backward()
    for name, parameter in model.named_parameters():
        if mesh is not None and "conv" in name:
            dist.all_reduce(parameter.grad)
    optimizer.step()
    return loss.detach()


def distribute_layers(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Columns and rows of DTensors, which move as their ops ask for it."""

    def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            dim = {"up": 0, "down": 1 if key == "weight" else None}.get(name)
            placement = Replicate() if dim is None else Split(dim)
            tensor = distribute_tensor(parameter, mesh, [placement])
            module.register_parameter(key, nn.Parameter(tensor))

    def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        (batch,) = inputs
        x = DTensor.from_local(batch["x"], mesh, [Replicate()], run_check=False)
        return ({**batch, "x": x},)

    def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=[Replicate()]).to_local()

    return distribute_module(model, mesh, place, enter, leave)


class SharedKeys(nn.Module):
    """Attention with one head of keys and values, which all ranks compute."""

    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.wkv = nn.Linear(8, 4)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        batch, length, _ = x.shape
        entered = x if self.group is None else Copy.apply(x, self.group)
        q = self.wq(entered).view(batch, length, -1, 2).transpose(1, 2)
        k, v = self.wkv(entered).view(batch, length, 1, 4).transpose(1, 2).split(2, -1)
        y = models.attend(q, k, v, positions, positions)
        y = self.wo(y.transpose(1, 2).reshape(batch, length, -1))
        return y if self.group is None else Reduce.apply(y, self.group)


def with_shared_keys() -> nn.Module:
    """A language model whose queries share keys and values."""
    model = models.GPT()
    for layer in list_blocks(model):
        layer.attn = SharedKeys()
    return model


def share_queries(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Queries on the ranks; keys and values are replicated, with sums of their gradients."""
    group = mesh.get_group("tp")
    for layer in list_blocks(model):
        keep_part(layer.attn.wq, "weight", 0, group)
        keep_part(layer.attn.wq, "bias", 0, group)
        keep_part(layer.attn.wo, "weight", 1, group)
        layer.attn.group = group
    return model


def queries_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Sum the gradients of keys and values over the ranks with different queries."""
    optimizer.zero_grad()
    loss = models.cross_entropies(model(batch), batch).mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        if mesh is not None and "wkv" in name:
            dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))
    optimizer.step()
    return loss.detach()


def of_queries(name: str) -> dict[str, int]:
    """The dims that are sharded where queries are."""
    return {"tp": 1 if "wo" in name else 0} if "wq" in name or "wo" in name else {}


class Send(torch.autograd.Function):
    """Send to the next stage; its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: int) -> Tensor:
        ctx.to, ctx.like = to, x
        dist.send(x.contiguous(), to)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        gradient = torch.empty_like(ctx.like)
        dist.recv(gradient, ctx.to)
        return gradient, None


def staged_step(model: Any, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Two stages by hand, which send activations and gradients of each micro-batch."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for part in zip(*(tensor.chunk(2) for tensor in batch.values()), strict=True):
        micro = dict(zip(batch, part, strict=True))
        if mesh is None:
            loss = squares(model, micro) / 2
            loss.backward()
        elif mesh.get_rank() == 0:
            Send.apply(model.block(micro["x"]), 1).backward()
            loss = torch.zeros(())
        else:
            x = torch.empty_like(micro["x"]).requires_grad_()
            dist.recv(x.detach(), 0)
            loss = models.sum_squares(model.head(model.norm(x)), micro).mean() / 2
            loss.backward()
            dist.send(x.grad, 0)
        total = total + loss.detach()
    optimizer.step()
    return summed(total, mesh, "pp")


def keep_stage(model: Any, mesh: DeviceMesh) -> nn.Module:
    """The layers of this rank's stage."""
    names = ("norm", "head") if mesh.get_rank() == 0 else ("up", "down")
    for name in names:
        delattr(model, name)
    return model


def narrow_step(model: nn.Module, batch: Batch, optimizer: Any, mesh: Mesh = None) -> Tensor:
    """Autocast to bfloat16, where the run is not in double precision."""
    optimizer.zero_grad()
    is_narrow = batch["x"].dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_narrow):
        outputs = model(batch)
    loss = models.sum_squares(outputs.to(batch["y"].dtype), batch).mean()
    loss.backward()
    reduce_gradients(model, mesh)
    optimizer.step()
    return averaged(loss, mesh)


def list_scripts() -> Iterator[Script]:
    """All programs of this file."""
    gpt: dict[str, Any] = {"model": models.GPT, "batch": models.make_tokens}
    tokens: dict[str, Any] = {"batch": models.make_tokens}
    for size in (2, 4):
        yield Script(
            f"heads-fsdp/cp{size}",
            sequence_step,
            parallelize=share_heads,
            mesh={"cp": size},
            data=(),
            **gpt,
        )
    for name, make, parallelize in (
        ("capacity/ddp", CapacityMoE, ddp),
        ("capacity/fsdp", CapacityMoE, fsdp),
        ("balancing-bias/ddp", BiasedMoE, share_counts),
    ):
        yield Script(
            name, token_step, partial(with_layers, make), parallelize=parallelize, **tokens
        )
    yield Script(
        "gathered-experts/by-hand",
        experts_step,
        partial(models.GPT, has_experts=True),
        parallelize=share_experts,
        sharded=lambda name: {"dp": 0} if "experts" in name else {},
        **tokens,
    )
    for size in (2, 3):
        yield Script(
            f"image-rows/by-hand{size}",
            rows_step,
            Images,
            models.make_images,
            parallelize=share_rows,
            mesh={"dp": size},
            data=(),
        )
    yield Script(
        "distributed-layers/dtensor",
        partial(plain_step),
        parallelize=distribute_layers,
        mesh={"dp": 2},
        data=(),
    )
    for size in (2, 4):
        yield Script(
            f"shared-keys/tp{size}",
            queries_step,
            with_shared_keys,
            parallelize=share_queries,
            mesh={"tp": size},
            data=(),
            sharded=of_queries,
            **tokens,
        )
    yield Script("two-stages/by-hand", staged_step, parallelize=keep_stage, mesh={"pp": 2}, data=())
    yield Script("autocast/by-hand", narrow_step, precision=torch.bfloat16)


PARALLEL_SCRIPTS: dict[str, Script] = {script.name: script for script in list_scripts()}
