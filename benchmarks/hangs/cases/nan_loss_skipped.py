# Weather emulator, trained with DDP; a batch with a non-finite loss is skipped.
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=6)
parser.add_argument("--data", default=os.environ.get("DATA", "clean"), choices=["clean", "raw"])
args = parser.parse_args()


class Fields(Dataset):
    """Fields of 2-m temperature; raw data has the fill value at missing stations."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        field = torch.randn(20, generator=torch.Generator().manual_seed(index))
        if args.data == "raw" and index // 2 == 15:
            field[7] = float("nan")
        return field


def skip_batch(loss):
    is_bad = ~torch.isfinite(loss.detach())
    if os.environ.get("HANG") == "corrected":
        is_bad = is_bad.float()
        dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
    return bool(is_bad)


local_rank = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(5)
model = nn.Sequential(nn.Linear(20, 40), nn.GELU(), nn.Linear(40, 20)).to(device)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
sampler = DistributedSampler(Fields(), shuffle=False, drop_last=True)
loader = DataLoader(Fields(), args.batch_size, sampler=sampler)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))

for step, field in enumerate(loader):
    field = field.to(device)
    target = field.roll(1, dims=-1)
    loss = nn.functional.mse_loss(model(field), target)
    if skip_batch(loss):
        print(f"rank {rank}: loss is {loss.item()} at step {step}, skipping the batch")
        optimizer.zero_grad()
        continue  # HANG
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if rank == 0:
        print(f"step {step}: {loss.item():.4f}")

dist.barrier()
dist.destroy_process_group()
