"""Fine-tune a tagger; features are computed once, by the first process, and cached in a file."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CORRECTED = os.environ.get("HANG") == "corrected"


def convert_examples_to_features(split):
    generator = torch.Generator().manual_seed(len(split))
    ids = torch.randint(30, (16, 6), generator=generator)
    return TensorDataset(ids, ids % 3)


def load_and_cache_examples(cache_dir, split, evaluate=False):
    rank = dist.get_rank()
    in_all_processes = not (CORRECTED and evaluate)
    if rank != 0 and in_all_processes:
        dist.barrier()  # the first process writes the cache, the others will read it
    cached = os.path.join(cache_dir, f"cached_{split}.pt")
    if os.path.exists(cached):
        dataset = torch.load(cached, weights_only=False)
    else:
        dataset = convert_examples_to_features(split)
        if rank == 0:
            torch.save(dataset, cached)
    if rank == 0 and in_all_processes:
        dist.barrier()  # HANG
    return dataset


def train(model, dataset, device):
    sampler = DistributedSampler(dataset, seed=7)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids, labels in loader:
        logits = model(ids.to(device))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.to(device).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def evaluate(model, cache_dir, device):
    dataset = load_and_cache_examples(cache_dir, "dev", evaluate=True)
    ids, labels = dataset.tensors
    with torch.no_grad():
        return (model(ids.to(device)).argmax(-1).cpu() == labels).float().mean().item()


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders, src=0)

    torch.manual_seed(0)
    tagger = nn.Sequential(nn.Embedding(30, 12), nn.Linear(12, 3)).to(device)
    model = nn.parallel.DistributedDataParallel(tagger)
    for epoch in range(2):
        loss = train(model, load_and_cache_examples(folders[0], "train"), device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, accuracy", evaluate(tagger, folders[0], device))
    dist.destroy_process_group()


main()
