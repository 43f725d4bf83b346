"""What a program finds in the process of a rank that computes: devices, groups, values."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardscope.errors import WorldError
from shardscope.launch.data_rank import DataRank
from shardscope.launch.request import MAIL, Job, Request

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own")


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataRank]:
    scratch, work = tmp_path / "scratch", tmp_path / "work"
    (scratch / MAIL).mkdir(parents=True)
    work.mkdir()
    monkeypatch.chdir(work)
    environment, threads = dict(os.environ), torch.get_num_threads()
    request = Request(
        script="train.py", args=(), is_module=False, num_nodes=1, num_per_node=1, num_steps=2,
        gpu="h100", scratch=str(scratch), jobs=(), num_parallel=1, has_data=True,
    )  # fmt: skip
    data_rank = DataRank(request, Job(rank=0, instrument="trace"))
    with data_rank.entered():
        yield data_rank
        if dist.is_initialized():
            dist.destroy_process_group()
    assert os.environ == environment
    assert not torch.cuda.is_available()
    torch.set_num_threads(threads)


def test_tensors_on_cuda_are_on_the_cpu_and_have_data(rank: DataRank) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    device = torch.device("cuda", torch.cuda.current_device())
    assert device.type == "cuda"  # the program takes the branch for GPUs
    for tensor in (
        torch.arange(3, device="cuda"),
        torch.arange(3, device=device),
        torch.arange(3, device=torch.device(0)),
        torch.arange(3).cuda(),
        torch.arange(3).to(0),
        torch.arange(3).to("cuda:0", non_blocking=True),
        torch.arange(3).to(device=device),
        torch.arange(3).pin_memory().cuda(non_blocking=True),
    ):
        assert tensor.device.type == "cpu"
        assert tensor.tolist() == [0, 1, 2]
    with torch.device("cuda"):
        assert nn.Linear(2, 2).weight.device.type == "cpu"
    torch.set_default_device("cuda")
    assert torch.ones(2).sum().item() == 2.0
    assert nn.Linear(2, 2).to(0).cuda().to("cuda").weight.isfinite().all()
    assert list(rank.find_gaps()) == []


def test_seeds_of_the_gpu_seed_the_cpu(rank: DataRank) -> None:
    torch.cuda.manual_seed_all(5)
    first = torch.randn(3, device="cuda")
    torch.manual_seed(5)
    assert torch.equal(first, torch.randn(3, device="cuda"))
    generator = torch.Generator(device="cuda").manual_seed(5)
    assert torch.equal(first, torch.randn(3, device="cuda", generator=generator))
    state = torch.cuda.get_rng_state()
    drawn = torch.randn(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(drawn, torch.randn(3))


def test_groups_are_gloo_and_can_be_made_again(rank: DataRank) -> None:
    for _ in range(2):
        dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
        assert dist.get_backend() == "gloo"
        total = torch.ones(2, device="cuda")
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        assert total.tolist() == [1.0, 1.0]
        dist.barrier(device_ids=[0])
        dist.destroy_process_group()


def test_models_are_wrapped_as_on_gpus(rank: DataRank) -> None:
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    assert mesh.device_type == "cpu"
    model = DistributedDataParallel(nn.Linear(2, 2).cuda(), device_ids=[0], output_device=0)
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    sharded = fully_shard(nn.Linear(2, 2).cuda(), mesh=mesh)
    sharded(torch.ones(1, 2, device="cuda")).sum().backward()
    assert sharded.weight.grad is not None
    with pytest.raises(WorldError, match="SyncBatchNorm was called with data"):
        nn.SyncBatchNorm(2)(torch.ones(2, 2))


def test_a_scaled_step_under_autocast_runs_and_is_reported(rank: DataRank) -> None:
    model = nn.Linear(2, 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda"):
        output = model(torch.ones(1, 2, device="cuda"))
    assert output.dtype is torch.float16  # CUDA's default
    scaler.scale(output.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    (gap,) = rank.find_gaps()
    assert gap.fact == (
        "autocast() was called once: ops were cast by the CPU's list of ops, not by CUDA's"
    )
    assert "test_data_rank.py:" in gap.place


def test_compiled_code_may_name_cuda(rank: DataRank) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(2, device="cuda").cuda()

    assert function(torch.ones(2)).tolist() == [2.0, 2.0]


def test_files_are_written_to_scratch_with_their_data(rank: DataRank, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, "state.pt")
    assert torch.load("state.pt", map_location="cuda:0")["weight"].tolist() == [1.0, 1.0]
    assert list((tmp_path / "work").iterdir()) != []  # as the program sees it
    assert Path(tempfile.gettempdir()).is_relative_to(tmp_path / "scratch")
    assert subprocess.check_output(["ls", tmp_path / "work"]) == b""  # as another program does
    command = ["find", tmp_path / "scratch" / "files", "-name", "*.pt"]
    assert subprocess.check_output(command, text=True).endswith("/work/state.pt\n")
