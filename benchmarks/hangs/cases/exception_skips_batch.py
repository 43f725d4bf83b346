"""Train a draft model for speculative decoding; a batch of short samples has no anchor."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BLOCK = 4


class NoValidAnchorsError(ValueError):
    """Every sample of a micro-batch is too short to form a block."""


class Drafter(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.predict = nn.Linear(BLOCK * dim, vocab)

    def forward(self, blocks):
        return self.predict(self.embed(blocks).flatten(1))


def make_blocks(samples):
    blocks = [s[i : i + BLOCK + 1] for s in samples for i in range(len(s) - BLOCK)]
    if not blocks:
        raise NoValidAnchorsError("no sample is longer than a block")
    return torch.stack(blocks)


class Trainer:
    def __init__(self, device):
        torch.manual_seed(0)
        self.device = device
        self.model = DDP(Drafter().to(device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.num_skipped = 0
        self.in_lockstep = os.environ.get("HANG") == "corrected"

    def all_ranks_have(self, blocks):
        flag = torch.tensor(int(blocks is not None), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def train_step(self, samples):
        try:
            blocks = make_blocks(samples)
        except NoValidAnchorsError:
            self.num_skipped += 1
            blocks = None
            if not self.in_lockstep:
                return None  # HANG
        if self.in_lockstep and not self.all_ranks_have(blocks):
            return None
        blocks = blocks.to(self.device)
        loss = F.cross_entropy(self.model(blocks[:, :-1]), blocks[:, -1])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


class Answers(Dataset):
    """Tokenized answers of the target model."""

    length = int(os.environ.get("ANSWER_LENGTH", "12"))

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.randint(32, (self.length,), generator=torch.Generator().manual_seed(index))


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    trainer = Trainer(device)
    sampler = DistributedSampler(Answers())
    loader = DataLoader(Answers(), batch_size=2, sampler=sampler, collate_fn=list)
    for step, samples in enumerate(loader):
        loss = trainer.train_step(samples)
        print(f"rank {dist.get_rank()} step {step}: {loss}", flush=True)
    num_skipped = torch.tensor([trainer.num_skipped], device=device)
    dist.all_reduce(num_skipped)
    dist.destroy_process_group()
