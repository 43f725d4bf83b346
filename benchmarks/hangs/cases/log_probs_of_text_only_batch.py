"""One iteration of PPO on a vision-language policy: score the rollouts, then update on them.

For batches without an image the policy runs its vision tower on a blank one, so that every rank
gathers its weights. torchrun --nproc-per-node 2 log_probs_of_text_only_batch.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CORRECTED = os.environ.get("HANG") == "corrected"
IMAGES_PER_PROMPT = int(os.environ.get("IMAGES_PER_PROMPT", "1"))
VOCAB, DIM, PATCH = 40, 16, 6


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.visual = nn.Sequential(nn.Linear(PATCH, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.decoder = nn.GRU(DIM, DIM, batch_first=True)
        self.lm_head = nn.Linear(DIM, VOCAB)

    def get_input_embeds(self, input_ids, images):
        embeds = self.embed(input_ids)
        if images is not None:
            embeds = embeds + self.visual(images).mean(1, keepdim=True)
        elif CORRECTED or self.training:  # HANG
            blank = embeds.new_zeros(1, 4, PATCH)
            embeds = embeds + 0.0 * self.visual(blank).mean()
        return embeds

    def forward(self, input_ids, images=None):
        hidden, _ = self.decoder(self.get_input_embeds(input_ids, images))
        return self.lm_head(hidden)


class Rollouts(Dataset):
    """Answers with their advantage, and the images of the prompt, if it has any."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(VOCAB, (8,), generator=generator)
        images = torch.randn(4 * IMAGES_PER_PROMPT, PATCH, generator=generator)
        return ids, images, torch.randn(1, generator=generator)


def collate(samples):
    ids, images, advantages = (torch.stack(values) for values in zip(*samples, strict=True))
    return ids, images if images.numel() else None, advantages


def log_probs(model, ids, images):
    logits = model(ids[:, :-1], images).log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1)


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

torch.manual_seed(0)
policy = Policy().to(device)
fully_shard(policy.visual)
fully_shard(policy)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
sampler = DistributedSampler(Rollouts())
loader = DataLoader(Rollouts(), batch_size=3, sampler=sampler, collate_fn=collate)

for iteration, (ids, images, advantages) in enumerate(loader):
    ids, advantages = ids.to(device), advantages.to(device)
    images = None if images is None else images.to(device)

    policy.eval()
    with torch.no_grad():
        old_log_probs = log_probs(policy, ids, images)

    policy.train()
    for _ in range(2):
        ratio = (log_probs(policy, ids, images) - old_log_probs).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"iteration {iteration}: {loss.item():.4f}")
dist.destroy_process_group()
