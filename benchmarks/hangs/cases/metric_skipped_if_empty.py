"""Tree detection: each rank validates its tiles, torchmetrics combines the ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics import MeanMetric, SumMetric


class Detector(nn.Module):
    """Predicts the centre of the one tree of a tile, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 2))

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        return self.net(tiles)


class Evaluator:
    def __init__(self, device: torch.device) -> None:
        self.distance = MeanMetric().to(device)
        self.num_tiles = SumMetric().to(device)
        self.num_trees = 0

    def update(
        self, predictions: torch.Tensor, centres: torch.Tensor, has_tree: torch.Tensor
    ) -> None:
        self.num_tiles.update(len(predictions))
        self.num_trees += int(has_tree.sum())
        if has_tree.any():
            errors = (predictions - centres)[has_tree]
            self.distance.update(errors.norm(dim=-1))

    def compute(self) -> dict[str, float]:
        metrics = {}
        if self.num_trees > 0 or os.environ.get("HANG") == "corrected":  # HANG
            metrics["distance"] = self.distance.compute().item()
        metrics["tiles"] = self.num_tiles.compute().item()
        self.distance.reset()
        self.num_tiles.reset()
        self.num_trees = 0
        return metrics


class Tiles(Dataset):
    """Tiles of an aerial image, of which a share has a tree."""

    def __init__(self, size: int, share: float) -> None:
        self.size, self.share = size, share

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
        row, column = torch.randint(6, (2,), generator=torch.Generator().manual_seed(index))
        has_tree = index // 2 % 4 < 4 * self.share
        tile = torch.zeros(6, 6)
        tile[row, column] = float(has_tree)
        return tile, torch.stack([row, column]).float(), has_tree


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = DDP(Detector().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    evaluator = Evaluator(device)
    train_set = Tiles(32, 0.75)
    train_loader = DataLoader(train_set, 8, sampler=DistributedSampler(train_set))
    val_set = Tiles(16, float(os.environ.get("TREE_SHARE", "0.75")))  # as this rank has it
    val_loader = DataLoader(val_set, 8, sampler=DistributedSampler(val_set, shuffle=False))
    for epoch in range(2):
        for batch in train_loader:
            tiles, centres, has_tree = (tensor.to(device) for tensor in batch)
            loss = (model(tiles) - centres).square().sum(-1)[has_tree].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for batch in val_loader:
                tiles, centres, has_tree = (tensor.to(device) for tensor in batch)
                evaluator.update(model.module(tiles), centres, has_tree)
        metrics = evaluator.compute()
        if rank == 0:
            print(f"epoch {epoch}: {metrics}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
