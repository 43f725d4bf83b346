"""What rank 0 does for all, with the collectives on every rank."""

import argparse
import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from common import batches, finish, mlp, setup
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

TASKS = [
    "log",
    "save",
    "save-full",
    "evaluate",
    "download",
    "config",
    "init",
    "metric",
    "late-barrier",
]


def share(value):
    """An object of rank 0, on every rank."""
    objects = [value if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(objects, src=0)
    return objects[0]


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def download(folder, rank):
    """Rank 0 writes a file, the others wait for it and read it."""
    path = Path(folder) / "tokens.json"
    if rank == 0:
        path.write_text(json.dumps(list(range(12))))
    dist.barrier()
    return json.loads(path.read_text())


def save_full(model, folder, step):
    """Every rank gathers, rank 0 writes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(state, Path(folder) / f"{step}.pt")


@torch.no_grad()
def evaluate(net, device):
    """On rank 0 only: the module inside DDP needs no other rank."""
    x = torch.linspace(0, 1, 48).view(8, 6).to(device)
    return net(x).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=TASKS, default="log")
    args = parser.parse_args()
    rank, _, device = setup()
    lr = share({"lr": 0.05})["lr"] if args.task == "config" else 0.05
    net = mlp(6, 12, 1).to(device)
    if args.task == "init":
        if rank == 0:
            torch.nn.init.zeros_(net[0].bias)
        for p in net.parameters():
            dist.broadcast(p.data, src=0)
    model = fully_shard(net) if args.task == "save-full" else DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    folder = share(tempfile.mkdtemp() if rank == 0 else None)
    if args.task == "download":
        download(folder, rank)
    for step, (x, y) in enumerate(batches(4, rank)):
        loss = (model(x.to(device)) - y.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.task == "log":
            mean = mean_over_ranks(loss)
            if rank == 0:
                print(f"step {step}: {mean.item():.4f}")
        elif args.task == "save" and step % 2 == 1:
            if rank == 0:
                torch.save(net.state_dict(), Path(folder) / f"{step}.pt")
            dist.barrier()
        elif args.task == "save-full" and step % 2 == 1:
            save_full(model, folder, step)
        elif args.task == "evaluate" and rank == 0:
            print(f"evaluated: {evaluate(net, device):.4f}")
        elif args.task == "metric":
            value = mean_over_ranks(loss)
            best = share(value.item() if rank == 0 else None)
            if best < 0.1:
                break
    if args.task == "late-barrier":
        dist.barrier()
    finish("done")


if __name__ == "__main__":
    main()
