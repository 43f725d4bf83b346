"""A training program; its first argument says how its ranks diverge, if at all."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

MISTAKE = sys.argv[1]


class Samples(Dataset):
    """Sequences of eight numbers; each sample has an image, too."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {
            "ids": torch.randint(1, 50, (8,), generator=generator),
            "image": torch.randn(2, 4, 4, generator=generator),
        }


def collate(samples):
    batch = {"ids": nn.utils.rnn.pad_sequence([s["ids"] for s in samples], batch_first=True)}
    images = [s["image"] for s in samples if "image" in s]
    return {**batch, "image": torch.stack(images)} if images else batch


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 4)
        self.vision = nn.Conv2d(2, 4, 4)

    def forward(self, batch):
        x = self.embed(batch["ids"])
        if MISTAKE == "all_to_all_of_own_length":
            dist.all_to_all_single(torch.empty_like(x), x.detach().contiguous())
        loss = x.square().mean()
        if "image" in batch:
            loss = loss + self.vision(batch["image"]).square().mean()
        return loss


def reduce_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            if MISTAKE == "modality":
                continue
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size - 1, 2)]
    pair = pairs[rank // 2] if rank // 2 < len(pairs) else None
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = Samples()
    loader = DataLoader(samples, 4, sampler=DistributedSampler(samples), collate_fn=collate)
    for step, batch in enumerate(loader):
        loss = model(batch)
        loss.backward()
        if MISTAKE == "exception" and step == 1 and rank == 1:
            raise ValueError("no more data")
        if MISTAKE == "nan" and not torch.isfinite(loss):
            continue
        reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if MISTAKE == "last_rank" and rank == size - 1:
            dist.all_reduce(loss.detach())
        if MISTAKE == "group_order":  # the first rank reduces over its pair first, others over all
            groups = [dist.group.WORLD, pair]
            for group in groups[::-1] if rank == 0 else groups:
                dist.all_reduce(loss.detach(), group=group)
        if MISTAKE == "transfers" and rank < 2:  # both receive first
            dist.recv(loss.detach(), 1 - rank)
            dist.send(loss.detach(), 1 - rank)
        if MISTAKE == "agreed":
            is_bad = (~torch.isfinite(loss)).float()
            dist.all_reduce(is_bad)
            if is_bad.item() == 0:
                dist.barrier()
    dist.destroy_process_group()


main()
