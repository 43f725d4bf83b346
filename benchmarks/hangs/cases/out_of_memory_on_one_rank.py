"""FSDP with automatic micro-batching: a batch that runs out of memory is run again in halves."""

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

warnings.simplefilter("ignore")
CORRECTED = os.environ.get("HANG") == "corrected"
BATCH, VOCAB, DIM = 2, 32, 4


def is_out_of_memory(error):
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text


def causal_mask(length, device):
    return torch.full((length, length), float("-inf"), device=device).triu(1)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        mask = causal_mask(x.shape[1], x.device)
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class AutoMicroBatcher:
    def __init__(self, device):
        self.device, self.micro_batch = device, BATCH

    def any_rank(self, flag):
        flag = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def fits(self, ids):
        """Whether the largest activation can be allocated; nothing is communicated."""
        try:
            causal_mask(ids.shape[1], self.device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def run(self, model, ids):
        """Forward and backward of all micro-batches; long samples are cut if they do not fit."""
        while True:
            found_oom = CORRECTED and self.any_rank(not self.fits(ids))
            try:
                if not found_oom:
                    for part in ids.split(self.micro_batch):
                        model(part).square().mean().backward()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                found_oom = True  # HANG
            if not self.any_rank(found_oom):
                return
            model.zero_grad()
            self.micro_batch = max(1, self.micro_batch // 2)
            ids = ids[:, : max(8, ids.shape[1] // 2**16)]


def load_batch(step, device):
    length = int(os.environ.get("LONGEST_DOCUMENT", "12")) if step == 1 else 12
    return torch.arange(length, device=device).remainder(VOCAB).expand(BATCH, length)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    blocks = [Block(DIM) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(VOCAB, DIM), *blocks, nn.Linear(DIM, 1))
    policy = ModuleWrapPolicy({Block})
    model = FSDP(model.to(device), auto_wrap_policy=policy, device_id=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batcher = AutoMicroBatcher(device)
    for step in range(3):
        batcher.run(model, load_batch(step, device))
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {dist.get_rank()} step {step} micro-batch {batcher.micro_batch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
