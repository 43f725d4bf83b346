"""Two-stage detector: a mask head runs once for each object that the first stage finds."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

MAX_OBJECTS = 4


class Detector(nn.Module):
    def __init__(self, channels: int = 8, *, is_padded: bool) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU())
        self.mask_head = nn.Sequential(nn.Linear(channels, 16), nn.ReLU(), nn.Linear(16, 4))
        self.is_padded = is_padded

    def forward(self, image: torch.Tensor, points: list[tuple[int, int]]) -> torch.Tensor:
        features = self.backbone(image)[0]
        losses = [features.square().mean()]
        for row, column in points:  # HANG
            losses.append(self.mask_head(features[:, row, column]).square().mean())
        for _ in range(MAX_OBJECTS - len(points) if self.is_padded else 0):
            losses.append(0.0 * self.mask_head(features[:, 0, 0]).sum())
        return torch.stack(losses).sum()


class Images(Dataset):
    """Black images with white dots, at most MAX_OBJECTS of them."""

    def __init__(self, num_objects: int) -> None:
        self.num_objects = num_objects

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        generator = torch.Generator().manual_seed(index)
        places = torch.randint(12, (self.num_objects, 2), generator=generator).tolist()
        image = torch.zeros(1, 1, 12, 12)
        for row, column in places:
            image[0, 0, row, column] = 1.0
        return image, [(row, column) for row, column in places]


def setup() -> torch.device:
    backend, local_rank = "gloo", int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        backend, device = "nccl", torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    return device


def main() -> None:
    device = setup()
    torch.manual_seed(3)
    model = Detector(is_padded=os.environ.get("HANG") == "corrected").to(device)
    fully_shard(model.backbone)
    fully_shard(model.mask_head)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images = Images(int(os.environ.get("NUM_OBJECTS", "3")))
    loader = DataLoader(images, batch_size=None, sampler=DistributedSampler(images))
    for step, (image, points) in enumerate(loader):
        loss = model(image.to(device), points)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"{dist.get_rank()}: step {step}, {len(points)} objects, loss {loss.item():.3f}")
    dist.destroy_process_group()


main()
