"""Parallelisms by hand: explicit collectives on plain tensors, as Megatron-LM has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from benchmarks.silent.correct_layouts import FSDP, Layout, list_blocks
from benchmarks.silent.correct_models import Batch, MixtureOfExperts, attend
from benchmarks.silent.correct_steps import LossOfElements, plain_name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

Group = Any


class Copy(torch.autograd.Function):
    """The input in forward, the sum over the group in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Reduce(torch.autograd.Function):
    """The sum over the group in forward, the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Gather(torch.autograd.Function):
    """All-gather along a dim in forward, reduce-scatter in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return reduce_scatter(gradient, ctx.dim, ctx.group), None, None


class Scatter(torch.autograd.Function):
    """This rank's part along a dim in forward, all-gather in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_gather(gradient, ctx.dim, ctx.group), None, None


class ReduceScatter(torch.autograd.Function):
    """Reduce-scatter along a dim in forward, all-gather in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_gather(gradient, ctx.dim, ctx.group), None, None


class AllToAll(torch.autograd.Function):
    """Exchange rows: `given` rows for each rank, `taken` from each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: list[int], taken: list[int], group: Group) -> Tensor:
        ctx.splits, ctx.group = (given, taken), group
        return all_to_all(x, given, taken, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given, taken = ctx.splits
        return all_to_all(gradient, taken, given, ctx.group), None, None, None


class RingPass(torch.autograd.Function):
    """Send a tensor to the next rank of the group; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return pass_along(x, 1, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return pass_along(gradient, -1, ctx.group), None


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """The parts of all ranks along a dim."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part, along a dim, of the sum over the group."""
    moved = x.movedim(dim, 0).contiguous()
    part = moved.new_empty(moved.shape[0] // dist.get_world_size(group), *moved.shape[1:])
    dist.reduce_scatter_tensor(part, moved, group=group)
    return part.movedim(0, dim)


def all_to_all(x: Tensor, given: list[int], taken: list[int], group: Group) -> Tensor:
    """Exchange rows between the ranks."""
    result = x.new_empty(sum(taken), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), taken, given, group=group)
    return result


def pass_along(x: Tensor, step: int, group: Group) -> Tensor:
    """Send to the rank `step` further in the ring, and receive from the one before."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    received, sent = torch.empty_like(x), x.contiguous()
    after = dist.get_global_rank(group, (rank + step) % size)
    before = dist.get_global_rank(group, (rank - step) % size)
    messages = [
        dist.P2POp(dist.isend, sent, after, group),
        dist.P2POp(dist.irecv, received, before, group),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return received


def keep_part(module: nn.Module, name: str, dim: int, group: Group) -> None:
    """Keep this rank's part of a parameter."""
    parameter = getattr(module, name)
    part = parameter.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
    setattr(module, name, nn.Parameter(part.clone(), requires_grad=parameter.requires_grad))


class RowLinear(nn.Module):
    """A linear layer with a part of the inputs; the bias is added after the sum."""

    def __init__(self, linear: nn.Linear, group: Group, *, is_sequence: bool) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.group, self.is_sequence = group, is_sequence
        keep_part(self, "weight", 1, group)

    def forward(self, x: Tensor) -> Tensor:
        partial = F.linear(x, self.weight)
        if self.is_sequence:
            return ReduceScatter.apply(partial, 1, self.group) + self.bias
        return Reduce.apply(partial, self.group) + self.bias


class VocabularyEmbedding(nn.Module):
    """An embedding with a part of the vocabulary."""

    def __init__(self, embedding: nn.Embedding, group: Group) -> None:
        super().__init__()
        self.weight, self.group = embedding.weight, group
        keep_part(self, "weight", 0, group)

    def forward(self, tokens: Tensor) -> Tensor:
        start = dist.get_rank(self.group) * len(self.weight)
        local = tokens - start
        is_other = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill(is_other, 0), self.weight)
        return Reduce.apply(x.masked_fill(is_other[..., None], 0.0), self.group)


class VocabularyCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits of which each rank has a part of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Group) -> Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[..., None]
        sums = shifted.exp().sum(-1)
        dist.all_reduce(sums, group=group)
        size = logits.shape[-1]
        local = labels - dist.get_rank(group) * size
        is_other = (local < 0) | (local >= size)
        local = local.masked_fill(is_other, 0)
        wanted = shifted.gather(-1, local[..., None])[..., 0].masked_fill(is_other, 0.0)
        dist.all_reduce(wanted, group=group)
        ctx.save_for_backward(shifted.exp() / sums[..., None], local, is_other)
        return sums.log() - wanted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        probabilities, local, is_other = ctx.saved_tensors
        hits = F.one_hot(local, probabilities.shape[-1]).masked_fill(is_other[..., None], 0)
        return (probabilities - hits) * gradient[..., None], None, None


class Megatron(Layout):
    """Tensor parallelism on plain tensors, with sharded sequences or vocabulary, and replicas."""

    def __init__(
        self, mesh: Mapping[str, int], *, is_sequence: bool = False, has_vocabulary: bool = False
    ) -> None:
        super().__init__(mesh)
        self.is_sequence, self.has_vocabulary = is_sequence, has_vocabulary
        self.name = "megatron"
        self.name += "-sequence" if is_sequence else ""
        self.name += "-vocabulary" if has_vocabulary else ""
        self.data_axes = self.batch_axes = tuple(axis for axis in mesh if axis != "tp")

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        group = mesh.get_group("tp")
        if hasattr(model, "layers"):
            self._shard_language_model(model, group)
        else:
            self._shard_pair(model, group, model)
        return model

    def _shard_language_model(self, model: Any, group: Group) -> None:
        for layer in list_blocks(model):
            attention: Any = layer.attn
            for name in ("wq", "wk", "wv"):
                keep_part(getattr(attention, name), "weight", 0, group)
                keep_part(getattr(attention, name), "bias", 0, group)
            attention.wo = RowLinear(attention.wo, group, is_sequence=self.is_sequence)
            self._shard_pair(layer.mlp, group, layer.mlp)
            attention.register_forward_pre_hook(self._enter(group))
            layer.mlp.register_forward_pre_hook(self._enter(group))
        if self.has_vocabulary:
            model.tok = VocabularyEmbedding(model.tok, group)
            keep_part(model.head, "weight", 0, group)
        if self.is_sequence:
            for module, dim in ((model.tok, 1), (model.pos, 0)):
                module.register_forward_hook(lambda _, __, x, dim=dim: Scatter.apply(x, dim, group))
        if self.is_sequence or self.has_vocabulary:
            enter = self._enter(group) if self.has_vocabulary else self._leave(group)
            model.head.register_forward_pre_hook(enter)

    def _shard_pair(self, owner: Any, group: Group, module: nn.Module) -> None:
        keep_part(owner.up, "weight", 0, group)
        keep_part(owner.up, "bias", 0, group)
        owner.down = RowLinear(owner.down, group, is_sequence=self.is_sequence)
        if not self.is_sequence and module is owner and not hasattr(module, "head"):
            return
        if hasattr(module, "head"):  # the MLP by itself
            owner.up.register_forward_pre_hook(self._enter(group))

    def _enter(self, group: Group) -> Any:
        """A hook before column-parallel layers: the input with the right gradient."""

        def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x, *rest = inputs
            full = Gather.apply(x, 1, group) if self.is_sequence else Copy.apply(x, group)
            return (full, *rest)

        return enter

    def _leave(self, group: Group) -> Any:
        """A hook before a replicated layer: the sequence, of which all ranks use all."""

        def leave(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (GatherForAll.apply(inputs[0], 1, group), *inputs[1:])

        return leave

    def losses(
        self, outputs: Any, batch: Batch, elements: LossOfElements, mesh: DeviceMesh
    ) -> Tensor:
        if not self.has_vocabulary:
            return elements(outputs, batch)
        losses: Tensor = VocabularyCrossEntropy.apply(
            outputs, batch["labels"], mesh.get_group("tp")
        )
        return losses

    def reduce_gradients(self, model: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            if self.is_sequence and is_of_sequence(plain_name(name)):
                dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))
            for axis in self.data_axes:
                dist.all_reduce(parameter.grad, group=mesh.get_group(axis))

    def sharded_axes(self, name: str) -> dict[str, int]:
        if name.endswith(("wq.weight", "wk.weight", "wv.weight", "up.weight")):
            return {"tp": 0}
        if name.endswith(("wq.bias", "wk.bias", "wv.bias", "up.bias")):
            return {"tp": 0}
        if name.endswith(("wo.weight", "down.weight")):
            return {"tp": 1}
        is_vocabulary = name in ("tok.weight", "head.weight") and self.has_vocabulary
        return {"tp": 0} if is_vocabulary else {}


class GatherForAll(Gather):
    """All-gather in forward; this rank's part of the replicated gradient in backward."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        parts = gradient.chunk(dist.get_world_size(ctx.group), ctx.dim)
        return parts[dist.get_rank(ctx.group)].contiguous(), None, None


def is_of_sequence(name: str) -> bool:
    """Whether a replicated parameter sees only this rank's part of the sequence."""
    return "norm" in name or name.endswith(("wo.bias", "down.bias"))


class GatheredMixing(nn.Module):
    """Attention of this rank's queries to the gathered keys and values of all ranks."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        k, v = (Gather.apply(x, 2, self.group) for x in (k, v))
        return attend(q, k, v, positions, all_gather(positions, 0, self.group))


class RingMixing(nn.Module):
    """Attention to keys and values that travel around the ring of ranks."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        scores, values, of = [], [], positions
        size = dist.get_world_size(self.group)
        for step in range(size):
            hidden = positions[:, None] < of[None, :]
            product = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            scores.append(product.masked_fill(hidden, float("-inf")))
            values.append(v)
            if step < size - 1:
                k, v = RingPass.apply(torch.stack([k, v]), self.group).unbind()
                of = pass_along(of, 1, self.group)
        largest = torch.stack([part.amax(-1) for part in scores]).amax(0)[..., None].detach()
        weights = [(part - largest).exp() for part in scores]
        total = torch.stack([weight.sum(-1) for weight in weights]).sum(0)[..., None]
        mixed = [weight @ value for weight, value in zip(weights, values, strict=True)]
        return torch.stack(mixed).sum(0) / total


class ContextParallel(Layout):
    """Each rank has a part of every sequence, contiguous or zigzag, and perhaps of the batch."""

    def __init__(
        self,
        mesh: Mapping[str, int],
        *,
        is_ring: bool = False,
        is_zigzag: bool = False,
        is_sliced: bool = True,
        has_fsdp: bool = False,
    ) -> None:
        super().__init__(mesh)
        self.data_axes = tuple(mesh)
        self.batch_axes = tuple(axis for axis in mesh if axis != "cp")
        self.is_zigzag, self.is_sliced, self.has_fsdp = is_zigzag, is_sliced, has_fsdp
        self.mixing = RingMixing if is_ring else GatheredMixing
        self.is_averaging = has_fsdp
        if not is_sliced:  # parity gives each rank its part of the sequences
            self.batch_axes, self.batch_dim = ("cp",), 1
        self.name = "cp-ring" if is_ring else "cp-gather"
        self.name += "-zigzag" if is_zigzag else ""
        self.name += "-fsdp" if has_fsdp else ""
        self.name += "" if is_sliced else "-given"

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for layer in list_blocks(model):
            layer.attn.mixing = self.mixing(mesh.get_group("cp"))
        return FSDP(self.mesh).shard(model, mesh) if self.has_fsdp else model

    def split(self, batch: Batch, mesh: DeviceMesh) -> Batch:
        rank, size = mesh.get_local_rank("cp"), mesh["cp"].size()
        length = batch["tokens"].shape[1] * (1 if self.is_sliced else size)
        chunks = torch.arange(length).chunk(2 * size)
        if self.is_zigzag:
            order = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
        else:
            order = torch.cat(chunks[2 * rank : 2 * rank + 2])
        if self.is_sliced:
            batch = {name: tensor[:, order] for name, tensor in batch.items()}
        return {**batch, "positions": order.expand(len(batch["tokens"]), -1)}

    def reduce_gradients(self, model: nn.Module, mesh: DeviceMesh) -> None:
        if self.has_fsdp:
            return
        for parameter in model.parameters():
            for axis in self.data_axes:
                dist.all_reduce(parameter.grad, group=mesh.get_group(axis))


class AllToAllDispatch(nn.Module):
    """Sends tokens to the ranks of their experts, and the results back; no token is dropped."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def forward(self, experts: nn.Module, tokens: Tensor, chosen: Tensor, number: int) -> Tensor:
        size = dist.get_world_size(self.group)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=number)
        counts_here = torch.empty_like(counts)  # by rank, and by this rank's experts
        dist.all_to_all_single(counts_here, counts, group=self.group)
        given = counts.view(size, -1).sum(1).tolist()
        taken = counts_here.view(size, -1).sum(1).tolist()
        arrived = AllToAll.apply(tokens[order], given, taken, self.group)
        of_expert = torch.arange(number // size).repeat(size).repeat_interleave(counts_here)
        local = of_expert.argsort(stable=True)
        results = experts(arrived[local], counts_here.view(size, -1).sum(0))
        back = torch.empty_like(results).index_copy(0, local, results)
        returned = AllToAll.apply(back, taken, given, self.group)
        return torch.empty_like(returned).index_copy(0, order, returned)


class ExpertParallel(Layout):
    """Every rank has a part of the experts, and a part of the batch."""

    def __init__(self, mesh: Mapping[str, int], *, has_fsdp: bool = False) -> None:
        super().__init__(mesh)
        self.data_axes = self.batch_axes = tuple(mesh)
        self.is_averaging = self.has_fsdp = has_fsdp
        self.name = "ep-fsdp" if has_fsdp else "ep"

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        group = mesh.get_group("ep")
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                keep_part(module.experts, "up", 0, group)
                keep_part(module.experts, "down", 0, group)
                module.dispatch = AllToAllDispatch(group)
                if self.has_fsdp:
                    fully_shard(module.experts, mesh=mesh["dp"])
                    assert isinstance(module.experts, FSDPModule)
                    module.experts.set_gradient_divide_factor(float(mesh.size()))
        return FSDP(self.mesh).shard(model, mesh) if self.has_fsdp else model

    def reduce_gradients(self, model: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in model.named_parameters():
            if self.has_fsdp or parameter.grad is None:
                continue
            for axis in self.data_axes:
                if axis != "ep" or "experts" not in name:
                    dist.all_reduce(parameter.grad, group=mesh.get_group(axis))

    def sharded_axes(self, name: str) -> dict[str, int]:
        return {"ep": 0} if "experts" in name else {}
