"""Preference tuning on images; if the forward pass of a rank fails, all ranks end."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CORRECTED = os.environ.get("HANG") == "corrected"
IMAGE_TOKEN, VOCAB = 1, 32


def all_mean(value):
    dist.all_reduce(value)
    return value / dist.get_world_size()


class Policy(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed, self.vision = nn.Embedding(VOCAB, dim), nn.Linear(8, dim)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids, patches):
        num_tokens = int((ids == IMAGE_TOKEN).sum())
        if num_tokens != len(patches):
            raise ValueError(f"{num_tokens} image tokens, but {len(patches)} patches")
        x = self.embed(ids)
        x = x.masked_scatter((ids == IMAGE_TOKEN)[..., None], self.vision(patches))
        return self.head(x).log_softmax(-1)


class DPOTrainer:
    def __init__(self, device):
        torch.manual_seed(0)
        self.model, self.device = DDP(Policy().to(device)), device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.metrics = {}

    def log_metrics(self, margins):
        self.metrics["rewards/margins"] = all_mean(margins.detach().mean()).item()

    def forward_loss(self, ids, patches):
        log_probs = self.model(ids, patches)[:, :-1].gather(-1, ids[:, 1:, None]).sum((1, 2))
        chosen, rejected = log_probs.chunk(2)
        return chosen - rejected

    def compute_loss(self, ids, patches):
        """The loss; raises on all ranks if the forward pass of one fails."""
        error, margins = None, None
        try:
            margins = self.forward_loss(ids, patches)
            if not CORRECTED:
                self.log_metrics(margins)  # HANG
        except ValueError as e:
            error = e
        failed_anywhere = torch.tensor([float(error is not None)] * 2, device=self.device)
        dist.all_reduce(failed_anywhere)
        if failed_anywhere[0] > 0:
            raise SystemExit(f"the forward pass failed on a rank: {error}" if not CORRECTED else 0)
        if CORRECTED:
            self.log_metrics(margins)
        return -F.logsigmoid(0.1 * margins).mean()


def load_pairs(step, rank, device):
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(2, VOCAB, (4, 10), generator=generator)
    ids[:, :2] = IMAGE_TOKEN
    if step == 1:
        ids = ids[:, int(os.environ.get("CUT_PROMPT", "0")) :]  # to the maximum length
    return ids.to(device), torch.randn(8, 8, generator=generator).to(device)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    trainer = DPOTrainer(device)
    for step in range(3):
        loss = trainer.compute_loss(*load_pairs(step, rank, device))
        trainer.optimizer.zero_grad()
        loss.backward()
        trainer.optimizer.step()
        print(f"rank {rank} step {step}: {loss.item():.4f} {trainer.metrics}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
