"""Every call of the table of the simulated GPU, in the process of a simulated rank."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from shardscope._torch.cuda.calls import CALLS, Kind, make_page
from shardscope.attribution.failures import suggest_remedy
from shardscope.errors import WorldError
from shardscope.launch.api import run
from shardscope.launch.rank_process import SimulatedRank
from shardscope.launch.request import Job, Request

PROGRAM = Path(__file__).parent / "programs" / "measured.py"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "simulated-gpu.md"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own")

OTHERS = {"torch.version", "torch.autograd.profiler"}  # modules of which few names matter here

# Arguments of the calls that need some.
ARGUMENTS: dict[str, Any] = {
    "torch.cuda.can_device_access_peer": (0, 1),
    "torch.cuda.device": (1,),
    "torch.cuda.use_mem_pool": (None,),
    "torch.cuda.device_of": lambda: (torch.ones(2, device="cuda"),),
    "torch.cuda.set_device": (1,),
    "torch.cuda.StreamContext": (None,),
    "torch.cuda.set_stream": lambda: (torch.cuda.Stream(),),
    "torch.cuda.stream": (None,),
    "torch.cuda.set_sync_debug_mode": ("warn",),
    "torch.cuda.set_per_process_memory_fraction": (0.5,),
    "torch.cuda.manual_seed": (3,),
    "torch.cuda.manual_seed_all": (3,),
    "torch.cuda.set_rng_state": lambda: (torch.cuda.get_rng_state(),),
    "torch.cuda.set_rng_state_all": lambda: (torch.cuda.get_rng_state_all(),),
    "torch.cuda.check_error": (0,),
    "torch.cuda.cudaStatus": (),
    "torch.cuda.amp.GradScaler": (),
    "torch.cuda.amp.autocast": (),
    "torch.cuda.amp.custom_bwd": (print,),
    "torch.cuda.amp.custom_fwd": (print,),
    "torch.cuda.nvtx.range": ("step",),
    "torch.accelerator.device_index": (1,),
    "torch.accelerator.set_device_idx": (1,),
    "torch.accelerator.set_device_index": (1,),
    "torch.accelerator.set_stream": lambda: (torch.cuda.Stream(),),
    "torch.backends.cuda.SDPAParams": lambda: (*(torch.ones(1, 1, 2, 4),) * 3, None, 0.0, 1, 0),
    "torch.backends.cuda.cuFFTPlanCache": (0,),
    "torch.backends.cuda.cuFFTPlanCacheAttrContextProp": (print, print),
    "torch.backends.cudnn.is_acceptable": lambda: (torch.ones(2),),
    **{
        f"torch.backends.cuda.{name}": (True,)
        for name in (
            "allow_fp16_bf16_reduction_math_sdp", "enable_cudnn_sdp", "enable_flash_sdp",
            "enable_math_sdp", "enable_mem_efficient_sdp",
        )
    },
}  # fmt: skip


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[SimulatedRank]:
    request = Request(
        script="train.py", args=(), is_module=False, num_nodes=2, num_per_node=4, num_steps=2,
        gpu="h100", scratch=str(tmp_path), jobs=(), num_parallel=1,
    )  # fmt: skip
    simulated = SimulatedRank(request, Job(rank=6, instrument="trace"))
    with simulated.entered():
        yield simulated


def list_calls(*kinds: Kind) -> Iterator[tuple[str, Any]]:
    """The names of the table that this torch has, and what is there now."""
    for module_name, calls in CALLS.items():
        module = importlib.import_module(module_name)
        for name, call in calls.items():
            if call.kind in kinds and hasattr(module, name):
                yield f"{module_name}.{name}", getattr(module, name)


def is_error(value: Any) -> bool:
    """Whether it is a class of exceptions, which programs catch and torch raises."""
    return isinstance(value, type) and issubclass(value, Exception)


@pytest.mark.filterwarnings("ignore")  # of deprecated names, by torch
@no_gpu
class TestTable:
    def test_calls_that_are_answered_have_a_result(self, rank: SimulatedRank) -> None:
        switches = {
            name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
            for name in ("cudnn", "flash", "math", "mem_efficient")
        }
        for name, value in list_calls(Kind.ANSWERED, Kind.NOTHING):
            if not callable(value) or name == "torch.cuda._lazy_init" or is_error(value):
                continue
            arguments = ARGUMENTS.get(name, ())
            try:
                value(*(arguments() if callable(arguments) else arguments))
            except Exception as error:
                raise AssertionError(f"{name} raised {error!r}") from error
        for name, is_enabled in switches.items():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(is_enabled)

    def test_calls_that_are_refused_say_their_name(self, rank: SimulatedRank) -> None:
        for name, value in list_calls(Kind.REFUSED):
            with pytest.raises(WorldError) as error:
                value(*ARGUMENTS.get(name, ()))
            assert str(error.value).startswith(f"{name}() was called in a simulated world"), name
        with pytest.raises(WorldError, match=r"cufft_plan_cache\.max_size"):
            _ = torch.backends.cuda.cufft_plan_cache.max_size
        with pytest.raises(WorldError, match="cudaStreamCreate"):
            torch.cuda.cudart().cudaStreamCreate(0)

    def test_measurements_are_nan_and_reported(self, rank: SimulatedRank) -> None:
        names = []
        for name, value in list_calls(Kind.UNKNOWN):
            names.append(name)
            assert value() != value(), name
        start, end = torch.cuda.Event(enable_timing=True), torch.Event(enable_timing=True)
        start.record()
        assert start.elapsed_time(end) != 0
        facts = " ".join(gap.fact for gap in rank.find_gaps())
        assert all(f"{name}()" in facts for name in (*names, "torch.cuda.Event.elapsed_time"))
        assert all(__file__.rpartition("/")[2] in gap.place for gap in rank.find_gaps())

    def test_every_public_name_is_in_the_table(self) -> None:
        known = {name for calls in CALLS.values() for name in calls}
        for module_name in (
            *CALLS.keys() - OTHERS,
            "torch.cuda.random",
            "torch.accelerator.memory",
        ):
            module = importlib.import_module(module_name)
            missing = {
                name
                for name in getattr(module, "__all__", ())
                if name not in known and not isinstance(getattr(module, name), ModuleType)
            }
            assert missing <= {"amp_definitely_not_available", "SUPPORTED"}, module_name


def test_the_page_lists_what_the_table_has() -> None:
    assert PAGE.read_text() == make_page(), (
        "run python -m shardscope._torch.cuda.calls > docs/reference/simulated-gpu.md"
    )


@no_gpu
class TestTensors:
    def test_addresses_types_and_pinned_memory(self, rank: SimulatedRank) -> None:
        x, host = torch.ones(4, 4, device="cuda"), torch.ones(2)
        assert x.data_ptr() == x.untyped_storage().data_ptr() == x[:2].data_ptr() > 0
        assert (
            x.untyped_storage().data_ptr() != torch.ones(4, 4).cuda().untyped_storage().data_ptr()
        )
        assert host.untyped_storage().data_ptr() == host.data_ptr()
        assert (x.type(), x.half().type(), host.type()) == (
            "torch.cuda.FloatTensor", "torch.cuda.HalfTensor", "torch.FloatTensor",
        )  # fmt: skip
        assert host.type("torch.cuda.HalfTensor").device == x.device
        assert x.type(torch.FloatTensor).device.type == "cpu"
        assert isinstance(x, torch.cuda.FloatTensor)
        assert not isinstance(host, torch.cuda.FloatTensor)
        assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
        assert torch.cuda.FloatTensor(2, 3).shape == (2, 3)
        assert host.pin_memory().is_pinned()
        assert torch.empty(2, pin_memory=True).is_pinned()
        assert torch.tensor([1], pin_memory=True).tolist() == [1]
        assert not torch.ones(2).is_pinned()
        assert x.copy_(torch.ones(4, 4, pin_memory=True), non_blocking=True).is_cuda
        assert x.share_memory_() is x

    def test_what_another_library_would_read_is_refused(self, rank: SimulatedRank) -> None:
        x = torch.ones(4, device="cuda")
        for export in (torch.to_dlpack, torch.from_dlpack, torch.Tensor.__dlpack__):
            with pytest.raises(WorldError, match=r"dlpack.*another library cannot read"):
                export(x)
        assert torch.from_dlpack(torch.ones(2)).tolist() == [1.0, 1.0]
        assert not hasattr(x, "__cuda_array_interface__")
        with pytest.raises(TypeError, match=r"call \.cpu\(\) first"):
            x.numpy()
        assert x.cpu().numpy().tolist() == [1.0] * 4

    def test_checkpoints_are_read_with_data_and_moved(
        self, rank: SimulatedRank, tmp_path: Path
    ) -> None:
        file = tmp_path / "tokens.pt"
        torch.save({"tokens": torch.arange(3)}, file)
        assert torch.load(file)["tokens"].tolist() == [0, 1, 2]
        for location in ("cuda:1", torch.device("cuda", 1), {"cpu": "cuda:1"}):
            assert torch.load(file, map_location=location)["tokens"].device.index == 1
        moved = torch.load(file, map_location=lambda storage, _: storage.cuda(1))["tokens"]
        assert (moved.device.index, moved.tolist()) == (1, [0, 1, 2])
        kept = torch.load(file, map_location=lambda storage, _: storage)["tokens"]
        assert kept.device.type == "cpu"

    def test_seeds_are_remembered(self, rank: SimulatedRank) -> None:
        torch.manual_seed(5)
        state, states = torch.cuda.get_rng_state(), torch.cuda.get_rng_state_all()
        assert (torch.cuda.initial_seed(), len(states), state.device.type) == (5, 4, "cpu")
        with torch.random.fork_rng(devices=range(4)):
            torch.cuda.manual_seed_all(2**63 + 1)
            assert torch.cuda.initial_seed() == 2**63 + 1
            torch.cuda.set_rng_state(torch.cuda.get_rng_state(1), 2)
        assert torch.cuda.initial_seed() == 5
        torch.cuda.seed_all()
        torch.cuda.set_rng_state_all(states)
        assert torch.cuda.initial_seed() == 5

    def test_memory_grows_and_shrinks_with_tensors_of_each_device(
        self, rank: SimulatedRank
    ) -> None:
        assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved() == 0
        model = nn.Linear(1024, 1024, bias=False)
        assert torch.cuda.memory_allocated() == 0
        model.cuda()
        assert torch.cuda.memory_allocated() == torch.accelerator.memory_allocated() == 4 << 20
        other = torch.empty(3 << 20, dtype=torch.uint8, device="cuda:2")
        assert torch.cuda.memory_allocated(2) == 3 << 20
        storage = other.untyped_storage()
        storage.resize_(0)
        assert (torch.cuda.memory_allocated(2), torch.cuda.memory_reserved(2)) == (0, 20 << 20)
        free, total = torch.cuda.mem_get_info(2)
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info(2) == (free + (20 << 20), total)
        assert torch.cuda.memory_reserved() == 20 << 20
        del model, other, storage
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0

    @pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
    def test_triton_kernels_are_skipped_and_reported(self, rank: SimulatedRank) -> None:
        triton = importlib.import_module("triton")

        def double(x_ptr: Any, n: Any) -> None: ...

        kernels = [
            triton.jit(double),
            triton.autotune([triton.Config({}, num_warps=4)], key=["n"])(triton.jit(double)),
        ]
        known = torch.tensor([3], device="cuda")
        for kernel in kernels:
            kernel[(1,)](known, 1)
        assert known.item() == 1  # not 3: the kernels may have written to it
        facts = [gap.fact for gap in rank.find_gaps()]
        assert any("the Triton kernel double was launched 2 times" in fact for fact in facts)


class TestRemedies:
    def explain(self, call: Callable[[], object]) -> str:
        with pytest.raises(Exception) as error:
            call()
        return suggest_remedy(error.value, has_data=False)

    @no_gpu
    def test_code_that_needs_a_gpu_is_explained(self, rank: SimulatedRank) -> None:
        x = torch.ones(4, device="cuda")
        if find_spec("flash_attn") is None:
            assert "switch them off by an option" in self.explain(
                lambda: importlib.import_module("flash_attn")
            )
        if find_spec("triton") is None:
            assert "Install it (pip install triton)" in self.explain(
                lambda: importlib.import_module("triton")
            )
        assert "cannot be pickled" in self.explain(lambda: pickle.dumps(x))
        library = torch.library.Library("shardscope_test", "DEF")
        library.define("f(Tensor a) -> Tensor")
        library.impl("f", lambda a: a + 1, "CUDA")
        assert "register_fake" in self.explain(lambda: torch.ops.shardscope_test.f(x))
        twice = torch.library.custom_op(
            "shardscope_test::twice",
            lambda a: a * 2,
            mutates_args=(),
            schema="(Tensor a) -> Tensor",
        )
        assert "register_fake" in self.explain(lambda: twice(x))


@no_gpu
@pytest.mark.usefixtures("forked_launches")
def test_a_program_is_answered_what_the_memory_profile_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(str(PROGRAM), num_per_node=2)
    assert result.failures == ()
    profile = result.recording.memory[0]
    peaks = [int(line.split()[1]) for line in capfd.readouterr().out.splitlines() if "PEAK" in line]
    assert peaks == [profile.first_peak_bytes, profile.peak_bytes]
    facts = {gap.place.rpartition("/")[2]: gap.fact for gap in result.recording.gaps}
    assert "torch.cuda.Event.elapsed_time()" in facts["measured.py:28"]
