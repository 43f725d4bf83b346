"""Load tokenized shards through a cache on the local disk, and summarize how long it took."""

import os
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

TIMERS: dict[str, list[float]] = defaultdict(list)
CACHE = Path(os.environ.get("CACHE_DIR", "cache"))


class timed:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.start = time.perf_counter()

    def __exit__(self, *_):
        TIMERS[self.name].append(time.perf_counter() - self.start)


def tokenize(shard):
    generator = torch.Generator().manual_seed(shard)
    return torch.randint(40, (12, 9), generator=generator)


def load_shard(shard):
    path = CACHE / f"shard-{shard}.txt"
    if path.exists():
        with timed("read"):
            lines = path.read_text().splitlines()
            return torch.tensor([[int(word) for word in line.split()] for line in lines])
    with timed("tokenize"):
        tokens = tokenize(shard)
    with timed("write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(" ".join(map(str, row)) for row in tokens.tolist()))
    return tokens


def summarize_load_times(device):
    """The longest time of each kind over all ranks."""
    names = sorted(TIMERS)  # HANG
    if os.environ.get("HANG") == "corrected":
        names = ["read", "tokenize", "write"]
    for name in names:
        longest = torch.tensor([sum(TIMERS[name], 0.0)], device=device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"{name}: {longest.item():.4f} s")


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)

    def forward(self, ids):
        return self.head(self.embed(ids))


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    tokens = torch.cat([load_shard(rank), load_shard(rank + dist.get_world_size())]).to(device)
    summarize_load_times(device)
    torch.manual_seed(0)
    model = DDP(Bigram().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in tokens.split(8):
        loss = nn.functional.cross_entropy(
            model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
