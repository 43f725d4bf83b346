"""A program that trains on several ranks, in the ways that its first argument names."""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

ways = sys.argv[1].split("+")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
assert size > 1 or "--alone" in sys.argv or "single" not in ways, "needs more than one rank"


class Columns(nn.Module):
    """A slice of the rows of a linear layer's weight on each rank."""

    def __init__(self, layer):
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().chunk(size)[rank].clone())

    def forward(self, x):
        return _Copied.apply(x) @ self.weight.T


class Rows(nn.Module):
    """A slice of the columns of a linear layer's weight on each rank."""

    def __init__(self, layer):
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x):
        partial = x @ self.weight.T
        if "tp_bias" in ways:
            return _Reduced.apply(partial + self.bias)
        if "tp_without_reduction" in ways:
            return partial + self.bias
        return _Reduced.apply(partial) + self.bias


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Opaque:
    def __init__(self, loss):
        self.loss = loss


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.norm = nn.BatchNorm1d(16) if "batch_norm" in ways else nn.LayerNorm(16)
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, 40, bias=False)
        if "tied" in ways:
            self.head.weight = self.embed.weight

    def forward(self, tokens, labels=None):
        x = self.embed(tokens).flatten(0, 1)
        x = x + self.down(self.up(self.norm(x)).relu())
        if "dropout" in ways:
            x = functional.dropout(x, 0.5, self.training)
        logits = self.head(x)
        if labels is None:
            return logits
        loss = functional.cross_entropy(logits, labels.flatten())
        if "dataclass" in ways:
            return Output(loss, logits)
        return Opaque(loss) if "opaque" in ways else {"loss": loss, "logits": logits}


torch.manual_seed(rank if "unequal" in ways else 0)
is_reduced_by_hand = not {"unequal", "summed"}.isdisjoint(ways)
model = Network().cuda()
if ways[0].startswith("tp"):
    model.up, model.down = Columns(model.up), Rows(model.down)
elif ways[0] == "mesh":
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
elif ways[0].startswith("fsdp"):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if "fsdp_bf16" in ways else None
    options = {} if policy is None else {"mp_policy": policy}
    for module in (model.up, model.down):
        fully_shard(module, **options)
    fully_shard(model, **options)
elif not is_reduced_by_hand:
    model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
if ways[0] == "mesh":
    torch.manual_seed(rank // 2)  # as the other rank along tp
else:
    torch.manual_seed(0 if ways[0].startswith("tp") else rank + 1)


def run_micro_batch(count):
    tokens = torch.randint(40, (4, 6), device="cuda")
    labels = torch.randint(40, (4, 6), device="cuda")
    if "hf" in ways:
        output = model(tokens, labels=labels)
        loss = output["loss"] if isinstance(output, dict) else output.loss
        loss *= 1.0  # in place, as Trainer does
    else:
        loss = functional.cross_entropy(model(tokens).float(), labels.flatten())
    loss = loss / count
    (scaler.scale(loss) if "scaled" in ways else loss).backward()
    return loss


for _ in range(3):
    if "no_sync" in ways:
        with model.no_sync():
            loss = run_micro_batch(1)
    elif "accumulated" in ways:
        with model.no_sync():
            run_micro_batch(2)
        loss = run_micro_batch(2)
    else:
        loss = run_micro_batch(1)
    if "sent" in ways:
        dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.ones(2), (rank + 1) % size),
                dist.P2POp(dist.irecv, torch.ones(2), (rank - 1) % size),
            ]
        )
    if is_reduced_by_hand:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            if "summed" not in ways:
                parameter.grad /= size
    if "scaled" in ways:
        scaler.unscale_(optimizer)
    if ways[0] not in ("tp", "mesh"):  # the norm of whose shards would need a reduction
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    if "scaled" in ways:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
