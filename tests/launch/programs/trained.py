"""Programs that train a small network on several ranks: right ones, and with silent mistakes.

The first argument names how the network is parallel, where its data comes from, what its loop does,
and mistakes, which begin with `bad_`.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ways = sys.argv[1].split("+")
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
vocabulary, length, rows = 32, 6, 4
torch.manual_seed(0)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        self.num_calls = getattr(self, "num_calls", 0) + self.training
        if "bad_later" in ways and self.num_calls == 2 and size > 1:
            x = x * 1.5
        return self.head(x + self.down(self.up(x).relu()))


class Texts(Dataset):
    """Texts of which each has another number of tokens that count, from few to all."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(
            vocabulary, (length,), generator=torch.Generator().manual_seed(index)
        )
        labels = tokens.clone()
        if "padded" in ways:
            labels[1 + index % length :] = -100
        return {"tokens": tokens, "labels": labels}


model = Network()
early = torch.optim.AdamW(model.parameters(), lr=1e-2)
num_data, data_rank = size, rank
if "fsdp" in ways:
    for module in (model.up, model.down):
        fully_shard(module)
    fully_shard(model)
elif "hsdp" in ways:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
elif "tp" in ways:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    num_data, data_rank = 1, 0
elif "zero" not in ways and size > 1:
    model = DistributedDataParallel(model)
parameters = list(model.parameters())
if "bad_early" in ways:
    optimizer = early
elif "sgd" in ways:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
else:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
num_accumulated = 2 if "accumulated" in ways else 1
if "global" in ways:  # a number of samples for each step, as nanoGPT and torchtitan have it
    num_accumulated = 4 // num_data


def batches():
    """The batches of this rank."""
    if "loader" in ways:
        replicas = {"num_replicas": 1, "rank": 0} if "bad_sampler" in ways else {}
        replicas = replicas or {"num_replicas": num_data, "rank": data_rank}
        sampler = DistributedSampler(Texts(), **replicas, shuffle=True, seed=3)
        loader = DataLoader(Texts(), rows, sampler=sampler)
        while True:
            for batch in loader:
                yield batch["tokens"], batch["labels"]
    elif "slices" in ways:
        data = torch.randint(vocabulary, (64, length), generator=torch.Generator().manual_seed(1))
        for step in range(20):
            start = (step * num_data + data_rank) * rows
            yield data[start : start + rows], data[start : start + rows].flip(1)
    elif "sharded" in ways:  # each rank takes its part of a global batch
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            data = torch.randint(vocabulary, (16, length), generator=generator)
            data = data[data_rank::num_data]
            yield data, data.flip(1)
    else:
        generator = torch.Generator().manual_seed(0 if "bad_seed" in ways else data_rank)
        for _ in range(20):
            data = torch.randint(vocabulary, (rows, length), generator=generator)
            labels = data.flip(1)
            if "masked" in ways:
                labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
            yield data, labels


def compute_loss(logits, labels):
    if "counted" not in ways and "bad_sum" not in ways:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    count = (labels != -100).sum().float()
    if "bad_sum" not in ways:
        dist.all_reduce(count)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss * num_data / count


def clip():
    if "clipped" in ways:
        nn.utils.clip_grad_norm_(parameters, 0.5)
    elif "by_hand" in ways:
        squares = [p.grad.to_local().square().sum() for p in parameters]
        squared = torch.stack(squares).sum()
        if "bad_norm" not in ways:
            dist.all_reduce(squared)
        factor = (0.05 / squared.sqrt()).clamp(max=1.0)
        for p in parameters:
            p.grad.mul_(factor)
    elif "bad_clip" in ways and rank == 0:
        nn.utils.clip_grad_norm_(parameters, 0.5)


source = batches()
for _ in range(3):
    total = torch.zeros(())
    for index in range(num_accumulated):
        tokens, labels = next(source)
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = index == num_accumulated - 1
        loss = compute_loss(model(tokens), labels) / (
            1 if "bad_accumulation" in ways else num_accumulated
        )
        loss.backward()
        total += loss.detach()
    if "zero" in ways:
        for p in parameters:
            dist.all_reduce(p.grad)
            p.grad /= size
    clip()
    optimizer.step()
    for _ in range(size if "bad_scheduler" in ways else 1):
        scheduler.step()
    optimizer.zero_grad()
    if "reduced" in ways:
        dist.all_reduce(total)
        print(total.item() / size, total.square().item())
    else:
        print(f"loss {total.item():.4f}")
if "saved" in ways and rank == 0:
    model.eval()
    with torch.no_grad():
        model(tokens)
dist.destroy_process_group()
