"""Fine-tune on conversations with FSDP2; samples with too few supervised tokens are skipped."""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ACCUMULATION_STEPS = 2
MIN_LOSS_TOKENS = 4
CORRECTED = os.environ.get("HANG") == "corrected"


class Conversations(Dataset):
    """Token ids and a mask of the tokens of the answer, which ANSWER_TOKENS limits."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        mask = torch.ones(16, dtype=torch.bool)
        if index // 2 == 1:
            mask[int(os.environ.get("ANSWER_TOKENS", "12")) :] = False
        return torch.randint(64, (16,), generator=generator), mask


class DataFetcher:
    """Micro-batches of a sample each, without those that have too few tokens to learn."""

    def __init__(self) -> None:
        dataset = Conversations()
        sampler = DistributedSampler(dataset, shuffle=False)
        self.loader = DataLoader(dataset, batch_size=1, sampler=sampler)

    def should_skip(self, mask: Tensor) -> bool:
        return int(mask.sum()) < MIN_LOSS_TOKENS

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for tokens, mask in self.loader:
            if self.should_skip(mask):
                if not CORRECTED:
                    continue  # HANG
                mask = torch.zeros_like(mask)
            yield tokens, mask


class Decoder(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.head = nn.Linear(dim, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return self.head(x)


def masked_loss(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    weights = mask[:, 1:].flatten().float()
    return (losses * weights).sum() / weights.sum().clamp(min=1)


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

torch.manual_seed(0)
model = Decoder().to(device)
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

num_updates = 0
for micro_step, (tokens, mask) in enumerate(DataFetcher(), 1):
    tokens, mask = tokens.to(device), mask.to(device)
    loss = masked_loss(model(tokens), tokens, mask) / ACCUMULATION_STEPS
    loss.backward()
    if micro_step % ACCUMULATION_STEPS == 0:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        num_updates += 1
        if dist.get_rank() == 0:
            print(f"update {num_updates}: norm {norm.item():.3f}")
dist.destroy_process_group()
