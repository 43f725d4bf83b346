"""Every call of the table of the simulated GPU, in the process of a simulated rank."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shardscope._torch.cuda.calls import CALLS, Kind, make_page
from shardscope.errors import WorldError
from shardscope.launch.rank_process import SimulatedRank
from shardscope.launch.request import Job, Request

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "simulated-gpu.md"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own")

# Arguments of the calls that need some.
ARGUMENTS: dict[str, Any] = {
    "torch.cuda.can_device_access_peer": (0, 1),
    "torch.cuda.device": (1,),
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
                value()
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
            *CALLS.keys() - {"torch.version"},
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
