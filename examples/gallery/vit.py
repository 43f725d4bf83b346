"""A ViT-B/16 under DistributedDataParallel: shardscope trace vit.py --mesh dp=8."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

DIM, NUM_LAYERS, NUM_HEADS, PATCH, SIZE, NUM_CLASSES = 768, 12, 12, 16, 224, 1000
BATCH_SIZE = 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return self.down(gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(DIM), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(DIM), Mlp()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, PATCH, stride=PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.positions = nn.Parameter(torch.zeros(1, (SIZE // PATCH) ** 2 + 1, DIM))
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, NUM_CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def model():
    return VisionTransformer()


def batch(model):
    return torch.randn(BATCH_SIZE, 3, SIZE, SIZE)


def parallelize(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group())


def step(model, images):
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    for _ in range(2):  # DDP lays out its buckets after the first step
        model.zero_grad()
        cross_entropy(model(images), labels).backward()


def optimizer(model):
    return torch.optim.AdamW(model.parameters())
