"""Context parallelism with a multi-token-prediction loss that the first rank logs."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

CORRECTED = os.environ.get("HANG") == "corrected"
MTP_LOSSES: list[Tensor] = []


class Model(nn.Module):
    """Tokens attend to the mean of all tokens, which the cp ranks compute together."""

    def __init__(self, cp_group: dist.ProcessGroup, vocab: int = 32, dim: int = 16) -> None:
        super().__init__()
        self.cp_group = cp_group
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(2 * dim, dim)
        self.heads = nn.ModuleList(nn.Linear(dim, vocab) for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        total = x.detach().sum(1, keepdim=True)
        dist.all_reduce(total, group=self.cp_group)
        mean = total / (tokens.shape[1] * dist.get_world_size(self.cp_group))
        x = torch.tanh(self.mix(torch.cat([x, mean.expand_as(x)], -1)))
        losses = [
            F.cross_entropy(
                head(x)[:, : x.shape[1] - offset].flatten(0, 1), targets[:, offset:].flatten()
            )
            for offset, head in enumerate(self.heads)
        ]
        MTP_LOSSES.append(losses[1].detach())
        return losses[0] + 0.3 * losses[1]


def reduce_mtp_loss(group: dist.ProcessGroup) -> float:
    """The mean over the ranks of all data-parallel and context-parallel ranks."""
    loss = torch.stack(MTP_LOSSES).mean()
    MTP_LOSSES.clear()
    dist.all_reduce(loss, group=group)
    return loss.item() / dist.get_world_size(group)


def main() -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    world_size = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(device_type, (world_size // 2, 2), mesh_dim_names=("dp", "cp"))
    device = torch.device(
        device_type, int(os.environ["LOCAL_RANK"]) if device_type == "cuda" else 0
    )
    dp_cp_group = dist.group.WORLD
    torch.manual_seed(0)
    model = Model(mesh.get_group("cp")).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    for step in range(3):
        sequence = torch.randint(32, (2, 17), generator=generator)
        part = mesh.get_local_rank("cp")
        tokens = sequence[:, :-1].chunk(2, 1)[part].to(device)
        targets = sequence[:, 1:].chunk(2, 1)[part].to(device)
        loss = model(tokens, targets)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp_cp_group)
        optimizer.step()
        optimizer.zero_grad()
        is_source = part == 0
        if CORRECTED:
            mtp_loss = reduce_mtp_loss(dp_cp_group)
        elif is_source:
            mtp_loss = reduce_mtp_loss(dp_cp_group)  # HANG
        if is_source:
            print(f"dp rank {mesh.get_local_rank('dp')} step {step}: mtp loss {mtp_loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
