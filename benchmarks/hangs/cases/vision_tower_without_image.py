"""Vision-language pre-training in the style of torchtitan: FSDP2 on each block of both towers.

DATASET=text trains on text only, DATASET=mixed (the default) on text with an image per sample.
    torchrun --nproc-per-node 2 vision_tower_without_image.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCAB, DIM, PATCH_DIM, NUM_PATCHES, IMAGE_TOKEN = 64, 16, 12, 4, 1
IS_TEXT = os.environ.get("DATASET", "mixed") == "text"
ALWAYS_RUN_VISION = os.environ.get("HANG") == "corrected"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.ffn = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.SiLU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        return x + self.ffn(self.norm(x))


class VisionEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Linear(PATCH_DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, patches):
        x = self.patch_embed(patches)
        for block in self.blocks:
            x = block(x)
        return x


class VLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.encoder = VisionEncoder()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.output = nn.Linear(DIM, VOCAB)

    def forward(self, tokens, pixel_values=None):
        h = self.tok_embeddings(tokens)
        if pixel_values is None and ALWAYS_RUN_VISION:
            pixel_values = h.new_zeros(0, PATCH_DIM)
        if pixel_values is not None:  # HANG
            vision = self.encoder(pixel_values)
            h = h.masked_scatter((tokens == IMAGE_TOKEN).unsqueeze(-1), vision)
            h = h + 0.0 * vision.sum()
        for layer in self.layers:
            h = layer(h)
        return self.output(h)


class Captions(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(2, VOCAB, (10,), generator=generator)
        if IS_TEXT:
            return {"tokens": tokens}
        tokens[:NUM_PATCHES] = IMAGE_TOKEN
        patches = torch.randn(NUM_PATCHES, PATCH_DIM, generator=generator)
        return {"tokens": tokens, "pixel_values": patches}


def collate(samples):
    images = [sample["pixel_values"] for sample in samples if "pixel_values" in sample]
    tokens = torch.stack([sample["tokens"] for sample in samples])
    return {"tokens": tokens, "pixel_values": torch.cat(images) if images else None}


def main():
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("fsdp",))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else "cpu"

    torch.manual_seed(42)
    model = VLM().to(device)
    for module in [*model.encoder.blocks, model.encoder, *model.layers, model]:
        fully_shard(module, mesh=mesh)
    if ALWAYS_RUN_VISION:
        model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    sampler = DistributedSampler(Captions(), mesh.size(), mesh.get_rank())
    loader = DataLoader(Captions(), batch_size=2, sampler=sampler, collate_fn=collate)
    for step, batch in enumerate(loader, 1):
        batch = {key: value if value is None else value.to(device) for key, value in batch.items()}
        logits = model(**batch)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {mesh.get_rank()} step {step} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
