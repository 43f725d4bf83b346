# Speech encoder with layer drop (Fan et al. 2019) and a fully sharded backbone.
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

CORRECTED = os.environ.get("HANG") == "corrected"


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class EncoderLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.fc = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.fc(x)


class Encoder(nn.Module):
    def __init__(self, dim=16, num_layers=4, layer_drop=0.5):
        super().__init__()
        self.layers = nn.ModuleList(
            FSDP(EncoderLayer(dim), device_id=device) for _ in range(num_layers)
        )
        self.layer_drop = layer_drop
        self.project = nn.Linear(dim, 10)

    def forward(self, x):
        for layer in self.layers:
            is_dropped = self.training and np.random.random() < self.layer_drop
            if CORRECTED:
                out = layer(x)
                x = x + (0.0 if is_dropped else 1.0) * (out - x)
            elif not is_dropped:  # HANG
                x = layer(x)
        return self.project(x).mean(1)


def get_batch(batch_size=4, num_frames=12):
    features = torch.randn(batch_size, num_frames, 16)
    return features.to(device), torch.randint(10, (batch_size,)).to(device)


if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    set_seed(1)
    encoder = Encoder().to(device)
    model = FSDP(encoder, device_id=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    set_seed(1 + dist.get_rank())  # each rank augments its data in another way
    for update in range(4):
        x, target = get_batch()
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print("update", update, "loss", round(loss.item(), 3))
    dist.destroy_process_group()
