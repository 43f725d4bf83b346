"""Distributed checkpoints, full state dicts and resumption."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import any_rank, batches, finish, mlp, setup
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

KINDS = ["sharded", "full", "resume", "per-rank", "exists"]


def build(device):
    torch.manual_seed(0)
    model = mlp(6, 12, 1).to(device)
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, rank, device):
    for x, y in batches(2, rank):
        (model(x.to(device)) - y.to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, default="sharded")
    args = parser.parse_args()
    rank, _, device = setup()
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders, src=0)
    folder = folders[0]
    model, optimizer = build(device)
    train(model, optimizer, rank, device)
    if args.kind == "per-rank":
        torch.save({n: p.to_local() for n, p in model.state_dict().items()}, f"{folder}/{rank}.pt")
        dist.barrier()
    elif args.kind in ("full", "exists"):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if rank == 0:
            torch.save(state, f"{folder}/full.pt")
        dist.barrier()
        if args.kind == "exists":
            # A local disk may lack the file, so the ranks load only if it is on all of them.
            is_missing = any_rank(not os.path.exists(f"{folder}/full.pt"), device)
            full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            if not is_missing:
                loaded = torch.load(f"{folder}/full.pt") if rank == 0 else {}
                set_model_state_dict(model, loaded, options=full)
    else:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        if args.kind == "resume":
            model, optimizer = build(device)
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
    train(model, optimizer, rank, device)
    finish("done")


if __name__ == "__main__":
    main()
