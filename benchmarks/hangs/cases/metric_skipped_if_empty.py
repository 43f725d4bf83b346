"""Tree detection: each rank validates its tiles, torchmetrics combines the ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
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


def make_tiles(generator: torch.Generator, share: float) -> tuple[torch.Tensor, ...]:
    centres = torch.randint(6, (8, 2), generator=generator)
    has_tree = torch.arange(8) < share * 8
    tiles = torch.zeros(8, 6, 6)
    tiles[torch.arange(8), centres[:, 0], centres[:, 1]] = has_tree.float()
    return tiles, centres.float(), has_tree


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
    generator = torch.Generator().manual_seed(rank)
    share = float(os.environ.get("TREE_SHARE", "0.75"))  # of this rank's validation tiles
    for epoch in range(2):
        for _ in range(2):
            tiles, centres, has_tree = (t.to(device) for t in make_tiles(generator, 0.75))
            loss = (model(tiles) - centres).square().sum(-1)[has_tree].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            tiles, centres, has_tree = (t.to(device) for t in make_tiles(generator, share))
            evaluator.update(model.module(tiles), centres, has_tree)
        metrics = evaluator.compute()
        if rank == 0:
            print(f"epoch {epoch}: {metrics}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
