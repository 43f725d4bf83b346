"""What a program finds in the process of a simulated rank: values, devices, groups, files."""

from __future__ import annotations

import copy
import io
import os
import shutil
import sqlite3
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from older_torch import IS_OLDER
from shardscope.attribution.failures import describe_failure
from shardscope.errors import WorldError
from shardscope.launch.cluster import Cluster
from shardscope.launch.instruments import find_models
from shardscope.launch.rank_process import SimulatedRank
from shardscope.launch.request import Job, Request
from shardscope.launch.steps import StepCounter, StepsDone
from shardscope.record import Axis, MemoryKind, Recording, RunInfo
from shardscope.shard.memory.memory import ObservedSteps

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own")


def make_request(scratch: Path, **changes: object) -> Request:
    options: dict[str, object] = {
        "script": "train.py", "args": (), "is_module": False, "num_nodes": 2, "num_per_node": 4,
        "num_steps": 2, "gpu": "h100", "scratch": str(scratch), "jobs": (), "num_parallel": 1,
    }  # fmt: skip
    return Request(**{**options, **changes})  # type: ignore[arg-type]


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedRank]:
    before = dict(os.environ)
    scratch, work = tmp_path / "scratch", tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    simulated = SimulatedRank(make_request(scratch), Job(rank=6, instrument="trace"))
    with simulated.entered():
        yield simulated
    assert os.environ == before


def read_facts(rank: SimulatedRank) -> list[str]:
    return [gap.fact for gap in rank.find_gaps()]


@no_gpu
class TestValues:
    def test_tensors_on_the_cpu_have_data(self, rank: SimulatedRank) -> None:
        indices = torch.randint(0, 10, (4,))
        assert all(0 <= int(index) < 10 for index in indices)
        assert torch.stack([torch.tensor(1.0), torch.tensor(2.0)]).sum().item() == 3.0
        assert read_facts(rank) == []

    def test_parameters_have_none_and_keep_their_identity_when_moved(
        self, rank: SimulatedRank
    ) -> None:
        model = nn.Linear(4, 4)
        weight = model.weight
        assert model.cuda().weight is weight
        assert weight.is_cuda

    def test_small_tensors_stay_readable_on_the_gpu(self, rank: SimulatedRank) -> None:
        assert torch.tensor([1, 2]).cuda().tolist() == [1, 2]
        assert read_facts(rank) == []

    def test_an_unknown_value_is_one_and_reported_with_its_line(self, rank: SimulatedRank) -> None:
        loss = torch.randn(8, device="cuda").mean()
        assert loss.item() == 1.0
        assert f"{loss:.2f}" == "1.00"
        assert loss.cpu().numpy() == 1.0
        assert torch.randn(2, 2, device="cuda").tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert {gap.place.partition(":")[0].rpartition("/")[2] for gap in rank.find_gaps()} == {
            "test_simulated_rank.py"
        }

    def test_numbers_are_finite(self, rank: SimulatedRank) -> None:
        loss = torch.randn(8, device="cuda").mean()
        assert not torch.isnan(loss)
        assert torch.isfinite(loss)
        assert not (~torch.isfinite(torch.randn(1000, device="cuda"))).any()

    def test_experts_get_equally_many_tokens(self, rank: SimulatedRank) -> None:
        chosen = torch.randn(64, 8, device="cuda").topk(2).indices
        assert torch.histc(chosen.float(), bins=8, min=0, max=7).tolist() == [16.0] * 8
        assert torch.bincount(chosen.flatten(), minlength=8).tolist() == [16] * 8
        routing = torch.zeros(64, 8, dtype=torch.bool, device="cuda").scatter_(-1, chosen, True)
        assert routing.sum(dim=0).view(4, 2).sum(dim=1).tolist() == [32] * 4
        assert all("as many tokens as any other" in fact for fact in read_facts(rank))

    def test_known_values_survive_collectives(self, rank: SimulatedRank) -> None:
        dist.init_process_group("nccl")
        flag = torch.tensor([0], device="cuda")
        dist.broadcast(flag, src=0)
        assert flag.item() == 0
        count = torch.tensor([3], device="cuda")
        dist.all_reduce(count)
        assert count.item() == 24  # the other seven ranks are assumed to have the same

    def test_what_is_overwritten_is_not_known_any_more(self, rank: SimulatedRank) -> None:
        dist.init_process_group("nccl")
        loss = torch.randn(1, device="cuda")
        gathered = [torch.zeros(1, device="cuda") for _ in range(8)]
        dist.all_gather(gathered, loss)
        received, copied = (torch.zeros(1, device="cuda") for _ in range(2))
        dist.recv(received, src=0)
        copied.copy_(loss).div_(8)
        assert [tensor.item() for tensor in (*gathered, received, copied)] == [1.0] * 10
        overflow = (~torch.isfinite(loss)).float()
        dist.all_reduce(overflow)
        assert overflow.item() == 0

    @pytest.mark.skipif(IS_OLDER, reason="torch 2.11 makes no lazy layers in a fake tensor mode")
    def test_lazy_layers_get_parameters_without_data(self, rank: SimulatedRank) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LazyLinear(2))
        model(torch.ones(3, 4))
        model = model.cuda()
        model(torch.ones(3, 4).cuda()).sum().backward()
        gradients = {name: tuple(p.grad.shape) for name, p in model.named_parameters()}
        assert gradients["2.weight"] == (2, 8)

    def test_threads_make_tensors_without_data_too(self, rank: SimulatedRank) -> None:
        model, results = nn.Linear(4, 4).cuda(), []
        thread = threading.Thread(target=lambda: results.append(model(torch.ones(2, 4).cuda())))
        thread.start()
        thread.join()
        assert [result.device.type for result in results] == ["cuda"]

    def test_a_copied_model_is_independent(self, rank: SimulatedRank) -> None:
        model = nn.Linear(4, 4).cuda()
        average = copy.deepcopy(model)
        assert average.weight is not model.weight
        assert average.weight.requires_grad
        assert isinstance(average.weight, nn.Parameter)

    def test_addresses_tell_tensors_apart(self, rank: SimulatedRank) -> None:
        parameters = [nn.Parameter(torch.randn(3, 5)).cuda() for _ in range(50)]
        assert len({parameter.data_ptr() for parameter in parameters}) == 50
        assert parameters[0].view(15).data_ptr() == parameters[0].data_ptr()


@no_gpu
class TestMemory:
    def test_what_the_program_keeps_on_the_host_is_not_counted(self, rank: SimulatedRank) -> None:
        dist.init_process_group("nccl")
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
        fully_shard(model, offload_policy=CPUOffloadPolicy())
        steps = ObservedSteps(model)
        with steps.watching():
            with torch.autograd.graph.save_on_cpu():
                loss = model(torch.randn(4096, 256, device="cuda")).sum()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= parameter.grad
            steps.end_step()
        steps.report_gaps()
        result = steps.make_result(None)
        assert result.recording.gaps == ()
        assert result.recording.findings == ()  # it has no optimizer that was left out
        kinds = {use.kind for use in result.profile.at_peak}
        assert MemoryKind.PARAMETERS not in kinds
        assert MemoryKind.GATHERED in kinds

    def test_models_have_the_names_of_their_own_classes(self, rank: SimulatedRank) -> None:
        dist.init_process_group("nccl")
        wrapped = DistributedDataParallel(nn.Bilinear(2, 2, 2).cuda())
        sharded = fully_shard(nn.Bilinear(8, 8, 8).cuda())
        models = find_models([wrapped])
        assert isinstance(models, dict)
        names = {id(model): name for name, model in models.items()}
        assert {names[id(wrapped)], names[id(sharded)]} == {"Bilinear0", "Bilinear1"}


@no_gpu
class TestChecks:
    """A check of values goes the way that does not raise; nothing is known about the values."""

    def test_assertions_and_checks_hold(self, rank: SimulatedRank) -> None:
        x = torch.rand(8, device="cuda")
        if not (x >= 0).all():
            raise ValueError(f"negative: {x.min().item()}")
        if not (x <= 1).all():
            raise ValueError("too large")
        if (x > 5).any() or (x < -5).any():
            raise ValueError("out of range")
        if x.sum() < 0:
            raise ValueError("negative")
        facts = [gap.fact for gap in rank.find_gaps()]
        assert sum("the branch that raises was not taken" in fact for fact in facts) == 4

    def test_a_choice_without_an_error_gets_the_stand_in(self, rank: SimulatedRank) -> None:
        x = torch.rand(8, device="cuda")
        assert ("yes" if x.sum() > 3 else "no") == "no"
        assert bool((x > 3).any()) is False
        assert all("stand-in" in gap.fact for gap in rank.find_gaps())

    def test_distributions_accept_their_parameters(self, rank: SimulatedRank) -> None:
        scores = torch.rand(8, 4, device="cuda")
        for distribution in (
            torch.distributions.Categorical(torch.softmax(scores, -1)),
            torch.distributions.Normal(scores, scores.exp()),
        ):
            sample = distribution.sample()
            assert distribution.log_prob(sample).device.type == "cuda"


class TestFailures:
    def test_the_cause_is_named_without_codes_of_the_terminal(self) -> None:
        error = ImportError("Could not import \x1b[1mmodel\x1b[0m.")
        error.__cause__ = OSError("The library is missing.")
        assert describe_failure(error) == (
            "ImportError: Could not import model, because of OSError: The library is missing"
        )

    def test_a_long_error_of_ours_keeps_its_remedy(self) -> None:
        error = WorldError(f"A fact {'with many words ' * 20}ends here. This is the remedy.")
        assert describe_failure(error).endswith("ends here. This is the remedy")


@no_gpu
class TestDataParallel:
    def test_it_calls_its_model_on_one_gpu(self, rank: SimulatedRank) -> None:
        model = nn.DataParallel(nn.Linear(4, 2).cuda(), device_ids=[0])
        assert model(torch.rand(3, 4)).shape == (3, 2)
        assert model(torch.rand(3, 4)).is_cuda

    def test_several_gpus_are_refused_with_a_remedy(self, rank: SimulatedRank) -> None:
        with pytest.raises(WorldError, match="--nproc-per-node 1 gives the program a single GPU"):
            nn.DataParallel(nn.Linear(4, 2).cuda())


@no_gpu
class TestKnownValues:
    def test_random_states_that_ranks_share_can_be_restored(self, rank: SimulatedRank) -> None:
        dist.init_process_group("nccl")
        generator = torch.Generator().manual_seed(3)
        before = generator.get_state()
        state = before.to("cuda")
        dist.broadcast(state, 0)
        generator.set_state(state.cpu())
        assert torch.equal(generator.get_state(), before)

    def test_inference_mode_makes_views_of_tensors_from_outside(self, rank: SimulatedRank) -> None:
        labels, weight = torch.rand(8, device="cuda"), nn.Linear(4, 4).cuda().weight
        with torch.inference_mode():
            assert labels[None].shape == (1, 8)
            assert not (weight.t() * 2).requires_grad
        assert torch.is_grad_enabled()

    def test_tensors_move_off_the_meta_device_in_compiled_graphs(self, rank: SimulatedRank) -> None:
        moved = torch.ops.prims.device_put.default(
            torch.ones(2, device="meta"), torch.device("cuda")
        )
        assert moved.is_cuda

    def test_small_masks_can_be_indexed(self, rank: SimulatedRank) -> None:
        mask = torch.tensor([[True, True], [True, False]]).to("cuda")
        rows = torch.arange(2, device="cuda")[:, None]
        columns = torch.arange(2, device="cuda")[None]
        assert mask[rows, columns].shape == (2, 2)


class CountingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.num_calls = 0

    def forward(self, x: torch.Tensor, *, reduces: bool = False) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        y = self.linear(x)
        if reduces:
            dist.all_reduce(y)
        return {"logits": y, "loss": y.sum()}


@no_gpu
class TestEvaluations:
    @pytest.fixture
    def model(self, rank: SimulatedRank) -> Iterator[CountingModel]:
        counter = StepCounter(1, on_start=lambda models: None, on_step=lambda: None)
        with counter.watching():  # what watches module calls
            yield CountingModel().cuda()

    def test_calls_with_the_same_shapes_are_not_run_again(
        self, rank: SimulatedRank, model: CountingModel
    ) -> None:
        with torch.no_grad():
            results = [model(torch.rand(3, 4, device="cuda")) for _ in range(10)]
            assert model.num_calls == 2
            assert {tuple(result["logits"].shape) for result in results} == {(3, 2)}
            assert len({id(result["loss"]) for result in results}) == 10
            model(torch.rand(5, 4, device="cuda"))
        assert model.num_calls == 3
        (gap,) = (gap for gap in rank.find_gaps() if gap.place == "evaluation")
        assert gap.fact.startswith("8 calls of CountingModel without gradients")

    def test_calls_with_gradients_or_other_arguments_are_run(self, model: CountingModel) -> None:
        for _ in range(5):
            model.eval()(torch.rand(3, 4, device="cuda"))
        assert model.num_calls == 5

    def test_calls_that_are_recorded_are_run(
        self, rank: SimulatedRank, model: CountingModel
    ) -> None:
        dist.init_process_group("nccl")
        with torch.no_grad():
            for _ in range(5):
                model(torch.rand(3, 4, device="cuda"), reduces=True)
            assert model.num_calls == 2
            rank.evaluations.is_training = True
            for _ in range(5):
                model(torch.rand(3, 4, device="cuda"), reduces=True)
        assert model.num_calls == 7

    def test_writes_to_parameters_are_steps_of_a_program_without_optimizers(
        self, rank: SimulatedRank
    ) -> None:
        model = nn.Linear(4, 2).cuda()
        counter = StepCounter(2, on_start=lambda models: None, on_step=lambda: None)

        def iterate() -> None:
            for _ in range(3):  # gradients are accumulated
                model(torch.rand(3, 4, device="cuda")).sum().backward()
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.1)

        with counter.watching():
            iterate()
            iterate()
            with pytest.raises(StepsDone):
                iterate()
        assert counter.num_steps == 2


@no_gpu
class TestCluster:
    def test_environment_is_that_of_torchrun(self, rank: SimulatedRank) -> None:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        assert [os.environ[name] for name in names] == ["6", "2", "8", "4", "1"]

    def test_gpus_are_those_of_the_host(self, rank: SimulatedRank) -> None:
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 4
        assert torch.cuda.get_device_name() == "NVIDIA H100 80GB HBM3"
        assert torch.cuda.get_device_capability() == (9, 0)

    def test_groups_are_made_when_the_program_asks(self, rank: SimulatedRank) -> None:
        assert not dist.is_initialized()
        dist.init_process_group("nccl", init_method="tcp://10.0.0.1:29500")
        assert (dist.get_rank(), dist.get_world_size()) == (6, 8)
        assert dist.get_backend() == "nccl"
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        assert dist.get_backend() == "gloo"

    def test_stores_answer_without_other_ranks(self, rank: SimulatedRank) -> None:
        for store in (dist.TCPStore("10.0.0.1", 29500, 8, False), dist.FileStore("store", 8)):
            store.set("key", "value")
            assert (store.get("key"), store.add("count", 1)) == (b"value", 1)

    def test_torchrun_and_spawn_run_the_function_of_this_rank(self, rank: SimulatedRank) -> None:
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=4)
        assert elastic_launch(config, lambda word: word.upper())("ran") == {2: "RAN"}
        ranks: list[int] = []
        processes = multiprocessing.spawn(ranks.append, nprocs=4, join=False)
        assert processes.join()
        assert ranks == [2]

    def test_a_mesh_makes_the_group_and_selects_the_gpu(self, rank: SimulatedRank) -> None:
        mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
        assert list(mesh.get_coordinate() or ()) == [3, 0]
        assert torch.cuda.current_device() == 2

    def test_a_group_of_another_size_is_reported(self, rank: SimulatedRank) -> None:
        dist.init_process_group("nccl", rank=1, world_size=2)
        assert read_facts(rank) == [
            "the program joined as rank 1 of 2, although it was started as rank 6 of 8"
        ]

    def test_roles_are_the_last_ranks_of_each_axis(self) -> None:
        run = RunInfo(
            torch_version="", shardscope_version="", world_size=8, ranks=(),
            axes=(Axis(name="pp", size=4), Axis(name="tp", size=2)),
        )  # fmt: skip
        assert Cluster(1, 8).find_roles(Recording(run=run)) == (0, 1, 6)


class TestFiles:
    def test_files_are_written_to_scratch_and_read_from_there(
        self, rank: SimulatedRank, tmp_path: Path
    ) -> None:
        os.makedirs("out/step1")
        Path("out/step1/log.txt").write_text("first\n")
        with open("out/step1/log.txt", "a") as file:
            file.write("second\n")
        assert Path("out/step1/log.txt").read_text() == "first\nsecond\n"
        os.replace("out/step1/log.txt", "out/last.txt")
        assert sorted(os.listdir("out")) == ["last.txt", "step1"]
        assert [entry.name for entry in os.scandir("out") if entry.is_file()] == ["last.txt"]
        assert not os.path.exists("out/step1/log.txt")
        with pytest.raises(FileExistsError):
            os.mkdir("out")
        with pytest.raises(FileNotFoundError):
            open("missing/file.txt", "w")  # noqa: SIM115

    def test_folders_databases_links_and_archives_are_redirected(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        work = tmp_path / "work"
        (work / "data" / "deep").mkdir(parents=True)
        (work / "data" / "deep" / "a.txt").write_text("a")
        monkeypatch.chdir(work)
        request = make_request(tmp_path / "scratch")
        with SimulatedRank(request, Job(rank=0, instrument="trace")).entered():
            shutil.rmtree("data")
            assert not os.path.exists("data/deep/a.txt")
            os.makedirs("runs/first")
            os.chdir("runs/first")
            assert os.getcwd() == str(work / "runs" / "first")
            Path("log.txt").write_text("x")
            assert Path("../first/log.txt").read_text() == "x"
            os.chdir("../..")
            database = sqlite3.connect("runs.db")
            database.execute("create table losses (loss)")
            database.close()
            with tarfile.open("all.tar", "w") as archive:
                archive.add("runs")
            os.symlink("runs", "latest")
            assert os.listdir("latest/first") == ["log.txt"]
            with pytest.raises(FileExistsError):
                os.open("all.tar", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            with pytest.raises(OSError, match="not empty"):
                os.rmdir("runs")
            assert sorted(os.listdir()) == ["all.tar", "latest", "runs", "runs.db"]
        assert [file.name for file in work.rglob("*")] == ["data", "deep", "a.txt"]

    def test_the_users_files_do_not_change(self, tmp_path: Path) -> None:
        work = tmp_path / "work"
        work.mkdir()
        (work / "config.txt").write_text("original")
        (work / "old.txt").write_text("old")
        request = make_request(tmp_path / "scratch")
        with SimulatedRank(request, Job(rank=0, instrument="trace")).entered():
            with open(work / "config.txt", "a") as file:
                file.write(" changed")
            os.remove(work / "old.txt")
            assert (work / "config.txt").read_text() == "original changed"
            assert os.listdir(work) == ["config.txt"]
            torch.save({"step": 1}, work / "state.pt")
            assert torch.load(work / "state.pt") == {"step": 1}
        assert sorted(os.listdir(work)) == ["config.txt", "old.txt"]
        assert (work / "config.txt").read_text() == "original"

    def test_a_skipped_checkpoint_can_be_loaded(self, rank: SimulatedRank) -> None:
        model = nn.Linear(4, 2).cuda()
        torch.save({"model": model.state_dict(), "step": torch.tensor(7)}, "state.tmp")
        os.replace("state.tmp", "state.pt")
        state = torch.load("state.pt", map_location={"cuda:6": "cpu"}, weights_only=True)
        assert state["step"].item() == 7
        model.load_state_dict(state["model"])
        on_gpu = torch.load("state.pt", map_location="cuda")["model"]["weight"]
        assert (tuple(on_gpu.shape), on_gpu.device.type) == ((2, 4), "cuda")
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        assert torch.load(buffer, weights_only=False) is model

    def test_checkpoints_are_skipped_if_the_user_asks_for_it(self, tmp_path: Path) -> None:
        request = make_request(tmp_path / "scratch", skips_checkpoints=True)
        simulated = SimulatedRank(request, Job(rank=0, instrument="trace"))
        with simulated.entered():
            torch.save({"step": 1}, tmp_path / "state.pt")
            torch.distributed.checkpoint.save({"weight": torch.ones(2)}, checkpoint_id="folder")
            assert os.path.getsize(tmp_path / "state.pt") < 100
            assert torch.load(tmp_path / "state.pt") == {"step": 1}
            assert not os.path.exists("folder")
        assert not (tmp_path / "state.pt").exists()
        assert list(simulated.find_gaps()) == []
