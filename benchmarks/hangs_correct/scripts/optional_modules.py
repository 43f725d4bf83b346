"""FSDP2 and modules that not every rank needs in every step."""

import argparse

import torch
from common import finish, mlp, setup, sharded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

WAYS = ["dummy", "empty-input", "larger-unit", "replicated"]


class Multimodal(nn.Module):
    """Text always, an image sometimes."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.text, self.vision, self.head = mlp(6, 16), mlp(4, 16, 16), nn.Linear(16, 1)

    def forward(self, text, image):
        hidden = self.text(text)
        if image is None and self.way == "dummy":
            return self.head(hidden + 0.0 * self.vision(text.new_zeros(1, 4)).sum())
        if image is None and self.way == "empty-input":
            return self.head(hidden + 0.0 * self.vision(text.new_zeros(0, 4)).sum())
        if image is not None:
            hidden = hidden + self.vision(image)
        return self.head(hidden)


class Posts(Dataset):
    """A text, and for some batches an image."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        post = {"text": torch.randn(6, generator=generator), "image": torch.zeros(0)}
        if (index // 8 + index % 2) % 3 != 0:
            post["image"] = torch.randn(4, generator=generator)
        return post


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, default="dummy")
    args = parser.parse_args()
    rank, _, device = setup()
    model = Multimodal(args.way).to(device)
    fully_shard(model.text)
    if args.way in ("dummy", "empty-input"):
        fully_shard(model.vision)
    ignored = set(model.vision.parameters()) if args.way == "replicated" else None
    fully_shard(model, ignored_params=ignored)
    if args.way != "replicated":
        model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in sharded(Posts(), rank, 4):
        text, image = batch["text"].to(device), batch["image"].to(device)
        image = image if image.numel() else None
        model(text, image).square().mean().backward()
        if args.way == "replicated":
            for p in model.vision.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                torch.distributed.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    finish("done")


if __name__ == "__main__":
    main()
