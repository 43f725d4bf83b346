"""Multi-task learning on several data sets with DDP: a shared encoder and a head per data set."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

NUM_CLASSES = {"libri": 10, "giga": 16}


class MultiTaskModel(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, 16), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Linear(16, n) for name, n in NUM_CLASSES.items()})

    def forward(self, x: torch.Tensor, is_giga: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.encoder(x)
        rows = {"libri": ~is_giga, "giga": is_giga}
        return {n: self.heads[n](hidden[r]) for n, r in rows.items() if r.any()}  # HANG


class Utterances(Dataset):
    """Features of one data set or the other, in turn; GIGA_SHARE is the share on this rank."""

    giga_share = float(os.environ.get("GIGA_SHARE", "0.5"))

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, bool, int]:
        generator = torch.Generator().manual_seed(index)
        is_giga = index // 2 % 4 < 4 * self.giga_share
        label = torch.randint(NUM_CLASSES["giga" if is_giga else "libri"], (), generator=generator)
        return torch.randn(8, generator=generator), is_giga, int(label)


def main() -> None:
    is_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if is_cuda else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = DDP(
        MultiTaskModel().to(device),
        find_unused_parameters=os.environ.get("HANG") == "corrected",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = Utterances()
    sampler = DistributedSampler(dataset, shuffle=False)
    for step, batch in enumerate(DataLoader(dataset, batch_size=16, sampler=sampler)):
        x, is_giga, y = (tensor.to(device) for tensor in batch)
        targets = {"libri": y[~is_giga], "giga": y[is_giga]}
        outputs = model(x, is_giga)
        losses = [F.cross_entropy(logits, targets[name]) for name, logits in outputs.items()]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step}: {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
