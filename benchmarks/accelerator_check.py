"""What an accelerator does differently: the autograd engine has threads of its own there.

Runs each scenario on the CPU and on the accelerator, in simulated worlds and in a real one of one
rank (gloo, NCCL), and compares the records:
who owns a collective, in which phase and why must not depend on the device. To be run on a machine
with an accelerator: python benchmarks/accelerator_check.py
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardscope import Recording, simulate, trace

Scenario = Callable[[str, DeviceMesh], Recording]


class FeedForward(nn.Module):
    """Two linears, column- and row-parallel."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Up, gelu, down."""
        return self.down(functional.gelu(self.up(x)))


class Stack(nn.Module):
    """Residual blocks, checkpointed or not."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward() for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every block, added to what it was given."""
        for block in self.blocks:
            if self.use_reentrant is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.use_reentrant, early_stop=False)
        return x


def _tensor_parallel(model: Stack, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _record_step(model: nn.Module, device: str, num_steps: int = 1) -> Recording:
    with trace(model) as t:
        for _ in range(num_steps):
            model(torch.randn(8, 64, device=device, requires_grad=True)).sum().backward()
    return t.recording


def tensor_parallel(device: str, mesh: DeviceMesh) -> Recording:
    """All-reduces forward and backward."""
    model = Stack().to(device)
    _tensor_parallel(model, mesh["tp"])
    return _record_step(model, device)


def checkpointed(device: str, mesh: DeviceMesh) -> Recording:
    """Recompute on the engine's thread, keeping the graph of forward."""
    model = Stack(use_reentrant=False).to(device)
    _tensor_parallel(model, mesh["tp"])
    return _record_step(model, device)


def checkpointed_reentrant(device: str, mesh: DeviceMesh) -> Recording:
    """Recompute on the engine's thread, with a graph and a backward of its own."""
    model = Stack(use_reentrant=True).to(device)
    _tensor_parallel(model, mesh["tp"])
    return _record_step(model, device)


def fsdp_and_tensor_parallel(device: str, mesh: DeviceMesh) -> Recording:
    """Prefetched all-gathers and reduce-scatters beside tensor parallelism."""
    model = Stack(use_reentrant=False).to(device)
    _tensor_parallel(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return _record_step(model, device, num_steps=2)


def ddp(device: str, mesh: DeviceMesh) -> Recording:
    """Buckets reduced from the engine's thread."""
    model = DistributedDataParallel(Stack().to(device), bucket_cap_mb=0.1)
    return _record_step(model, device, num_steps=3)


def compiled(device: str, mesh: DeviceMesh) -> Recording:
    """Functional all-reduces in graphs that inductor made."""
    model = Stack().to(device)
    _tensor_parallel(model, mesh["tp"])
    return _record_step(torch.compile(model), device)


class Talkative(nn.Module):
    """Collectives of the program's own, forwards and in hooks of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.linear.weight.register_hook(lambda grad: funcol.all_reduce(grad, "sum", _everyone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A collective of each kind on what the linear makes of `x`."""
        x = self.linear(x)
        held = x.detach().clone()
        dist.all_reduce(held)
        dist.broadcast(held, 0)
        dist.all_gather([torch.empty_like(held) for _ in range(dist.get_world_size())], held)
        dist.all_to_all_single(torch.empty_like(held), held)
        dist.barrier()
        return x


def _everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def explicit_calls(device: str, mesh: DeviceMesh) -> Recording:
    """The program's own calls, and one from a hook on the engine's thread."""
    model = Talkative().to(device)
    return _record_step(model, device)


SCENARIOS: tuple[Scenario, ...] = (
    tensor_parallel,
    checkpointed,
    checkpointed_reentrant,
    fsdp_and_tensor_parallel,
    ddp,
    explicit_calls,
    compiled,
)
# The others have nothing to say in a world of one rank.
REAL_SCENARIOS = (ddp, explicit_calls)


def context_parallel_attention() -> Recording:
    """Ring attention, whose kernels only CUDA has."""
    from torch.distributed.tensor.experimental import context_parallel

    with simulate({"cp": 4}, device="cuda") as world:
        q, k, v = (
            torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        with (
            trace() as t,
            context_parallel(world.mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]),
        ):
            heads = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
            functional.scaled_dot_product_attention(*heads, is_causal=True).sum().backward()
    return t.recording


def _facts(recording: Recording) -> list[tuple[object, ...]]:
    return [
        (c.kind.value, c.group, c.phase.value, c.owner, c.trigger, c.input_bytes, c.cause)
        for c in recording.collectives
    ]


World = Callable[[str], AbstractContextManager[DeviceMesh]]


@contextmanager
def simulated_world(device: str) -> Iterator[DeviceMesh]:
    """Eight ranks, none of them real but this."""
    with simulate({"dp": 4, "tp": 2}, device=device) as world:
        yield world.mesh


@contextmanager
def real_world(device: str) -> Iterator[DeviceMesh]:
    """One rank, whose collectives NCCL or gloo really runs."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (1, 1), mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()


def compare(scenario: Scenario, device: str, world: World) -> bool:
    """Whether the accelerator's records are the CPU's; prints what differs."""
    seen = {}
    for where in ("cpu", device):
        torch._dynamo.reset()
        with world(where) as mesh:
            seen[where] = scenario(where, mesh)
    cpu, accelerator = (_facts(seen[where]) for where in ("cpu", device))
    phases = sorted({c.phase.value for c in seen[device].collectives})
    threads = sorted({c.thread or "main" for c in seen[device].collectives})
    has_lines = all(c.source is not None for c in seen[device].collectives)
    is_same = cpu == accelerator and not seen[device].gaps
    print(
        f"{scenario.__name__:26} in {world.__name__:15} "
        f"{'same' if is_same else 'DIFFERENT'}: {len(accelerator)} "
        f"collectives, phases {phases}, threads {threads}, source lines {has_lines}"
    )
    if not is_same:
        print("  gaps:", seen[device].gaps)
        for one, other in zip(cpu, accelerator, strict=False):
            if one != other:
                print("  cpu        ", one)
                print("  accelerator", other)
                break
        print("  counts", len(cpu), len(accelerator))
    return is_same


def main() -> int:
    """Run everything; 1 if something differs."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    print("torch", torch.__version__, "on", device)
    failures = 0
    simulated = [(scenario, simulated_world) for scenario in SCENARIOS]
    real = [(scenario, real_world) for scenario in REAL_SCENARIOS]
    for scenario, world in simulated + real:
        try:
            failures += not compare(scenario, device, world)
        except Exception:  # noqa: BLE001 - the next scenario still runs
            failures += 1
            print(scenario.__name__, "FAILED")
            traceback.print_exc()
    try:
        recording = context_parallel_attention()
        kinds = [(c.kind.value, c.phase.value, c.axis) for c in recording.collectives]
        print("context parallel:", kinds, "gaps", recording.gaps)
    except Exception:  # noqa: BLE001
        failures += 1
        traceback.print_exc()
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
