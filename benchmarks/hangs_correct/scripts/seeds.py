"""Random numbers that differ between ranks, and do not decide about collectives."""

import argparse
import random
import time

import torch
from common import batches, finish, mlp, setup
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

SOURCES = ["dropout", "shuffle", "time", "layer-scale", "agreed-layer-drop", "augmentation"]


class Model(nn.Module):
    def __init__(self, source, shared):
        super().__init__()
        self.source, self.shared = source, shared
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 1)
        self.blocks = nn.ModuleList(mlp(12, 12, 12) for _ in range(3))
        self.dropout = nn.Dropout(0.3 if source == "dropout" else 0.0)

    def forward(self, x):
        x = self.dropout(self.first(x))
        for block in self.blocks:
            if self.source == "agreed-layer-drop":
                if self.shared.random() < 0.4:  # a generator with the same seed on every rank
                    continue
                x = x + block(x)
            elif self.source == "layer-scale":
                x = x + float(random.random() < 0.6) * block(x)
            else:
                x = x + block(x)
        return self.last(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", choices=SOURCES, default="dropout")
    args = parser.parse_args()
    rank, _, device = setup()
    net = Model(args.source, random.Random(3)).to(device)
    is_sharded = args.source in ("layer-scale", "agreed-layer-drop")
    if is_sharded:
        for block in net.blocks:
            fully_shard(block)
    model = fully_shard(net) if is_sharded else DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seed = int(time.time() * 1000) if args.source == "time" else rank
    torch.manual_seed(seed)
    random.seed(seed)
    for x, y in batches(4, rank):
        if args.source == "shuffle":
            order = list(range(len(x)))
            random.shuffle(order)
            x, y = x[order], y[order]
        if args.source == "augmentation" and random.random() < 0.5:
            x = x.flip(0)
            y = y.flip(0)
        loss = (model(x.to(device)) - y.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish("done")


if __name__ == "__main__":
    main()
