"""Tensor parallelism with spmd_types, and an exchange through symmetric memory."""

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class MLP(nn.Module):
    def __init__(self, tp: dist.ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.up = nn.Parameter(torch.randn(64, 64 // tp.size(), device="cuda"))
        self.down = nn.Parameter(torch.randn(64 // tp.size(), 64, device="cuda"))
        spmd.assert_type(self.up, {tp: spmd.S(1)})
        spmd.assert_type(self.down, {tp: spmd.S(0)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = spmd.convert(x, self.tp, src=spmd.I, dst=spmd.R)
        return spmd.all_reduce(x @ self.up @ self.down, self.tp, src=spmd.P, dst=spmd.I)


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    tp = mesh.get_group("tp")
    model = MLP(tp)
    optimizer = torch.optim.AdamW(model.parameters())
    buffer = symm_mem.empty(64, device="cuda")
    handle = symm_mem.rendezvous(buffer, tp)
    for _ in range(5):
        x = torch.randn(8, 64, device="cuda", requires_grad=True)
        model(x).sum().backward()
        torch.ops.symm_mem.multimem_all_reduce_(buffer, "sum", tp.group_name)
        handle.put_signal((tp.rank() + 1) % tp.size())
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
