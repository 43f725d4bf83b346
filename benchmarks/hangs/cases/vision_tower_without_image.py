"""Vision-language pre-training in the style of torchtitan: FSDP2 on each block of both towers.

    torchrun --nproc-per-node 2 vision_tower_without_image.py

DATASET=text trains on text only, DATASET=mixed (the default) on text with an image per batch.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass
class Config:
    vocab: int = 64
    dim: int = 16
    patch_dim: int = 12
    num_layers: int = 2
    steps: int = 3
    image_token: int = 1
    dataset: str = os.environ.get("DATASET", "mixed")
    always_run_vision: bool = os.environ.get("HANG") == "corrected"


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        return x + self.ffn(self.norm(x))


class VisionEncoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.patch_embed = nn.Linear(config.patch_dim, config.dim)
        self.blocks = nn.ModuleList(Block(config.dim) for _ in range(config.num_layers))

    def forward(self, patches):
        x = self.patch_embed(patches)
        for block in self.blocks:
            x = block(x)
        return x


class VLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.encoder = VisionEncoder(config)
        self.layers = nn.ModuleList(Block(config.dim) for _ in range(config.num_layers))
        self.output = nn.Linear(config.dim, config.vocab)

    def forward(self, tokens, pixel_values=None):
        h = self.tok_embeddings(tokens)
        if pixel_values is None and self.config.always_run_vision:
            pixel_values = h.new_zeros(0, self.config.patch_dim)
        if pixel_values is not None:  # HANG
            vision = self.encoder(pixel_values)
            mask = (tokens == self.config.image_token).unsqueeze(-1)
            h = h.masked_scatter(mask, vision) + 0.0 * vision.sum()
        for layer in self.layers:
            h = layer(h)
        return self.output(h)


def next_batch(config, generator):
    tokens = torch.randint(2, config.vocab, (2, 10), generator=generator)
    if config.dataset == "text":
        return {"tokens": tokens, "pixel_values": None}
    tokens[:, :4] = config.image_token
    return {"tokens": tokens, "pixel_values": torch.randn(8, config.patch_dim, generator=generator)}


def main(config):
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("fsdp",))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else "cpu"

    torch.manual_seed(42)
    model = VLM(config).to(device)
    for block in [*model.encoder.blocks, model.encoder, *model.layers, model]:
        fully_shard(block, mesh=mesh)
    if config.always_run_vision:
        model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(mesh.get_rank())
    for step in range(1, config.steps + 1):
        batch = {
            k: v if v is None else v.to(device) for k, v in next_batch(config, generator).items()
        }
        logits = model(**batch)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {mesh.get_rank()} step {step} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
