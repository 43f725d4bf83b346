"""Conditional computing: the kind of a sample selects the layers it goes through.

All layers are in one FSDP unit, so every rank gathers all of them.
Run: torchrun --nproc-per-node 2 fsdp2_parameters_used_differently.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

KINDS = ("short", "long", "table")


class Mixture(nn.Module):
    """Layers by kind of sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.by_kind = nn.ModuleDict(
            {
                "short": nn.Linear(width, width),
                "long": nn.Sequential(
                    nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
                ),
                "table": nn.Linear(width, width, bias=False),
            }
        )

    def forward(self, x: torch.Tensor, kinds: list[str]) -> torch.Tensor:
        rows = []
        for sample, kind in zip(x, kinds, strict=True):
            rows.append(self.by_kind[kind](sample))  # HANG
        return torch.stack(rows)


class Model(nn.Module):
    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, kinds: list[str]) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, kinds)
        return self.out(x)


class Samples(Dataset):
    """Samples of all kinds in turn; KINDS limits which of them this rank has."""

    kinds = os.environ.get("KINDS", ",".join(KINDS)).split(",")

    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator), self.kinds[index // 2 % len(self.kinds)]


def main() -> None:
    is_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if is_cuda else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))

    torch.manual_seed(7)
    model = Model().to(device)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if os.environ.get("HANG") == "corrected":
        model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    sampler = DistributedSampler(Samples(), mesh.size(), mesh.get_rank(), shuffle=False)
    loader = DataLoader(Samples(), batch_size=6, sampler=sampler)
    for step, (x, kinds) in enumerate(loader):
        loss = model(x.to(device), kinds).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"[{mesh.get_rank()}] step {step}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
