"""Which run this process belongs to, as which rank, and what this torch version cannot show."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shardscope._torch.private import missing_names, warn_if_untested
from shardscope.record import Axis, Gap, RankSpan, RunInfo, replace_surrogates
from shardscope.version import __version__
from shardscope.world import current_world

_FAKE_BACKEND = "fake"
_DEVICES = {"nccl": "cuda", "gloo": "cpu", "mpi": "cpu", "xccl": "xpu"}  # by backend


def read_identity() -> tuple[int, int]:
    """This process's rank and world size; before initialization, from the environment."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
        return int(rank), int(size)
    return 0, 1


def is_simulated() -> bool:
    """Whether no other rank exists: the world is simulated, or torch's fake backend is used."""
    return current_world() is not None or (
        dist.is_initialized() and str(dist.get_backend()) == _FAKE_BACKEND
    )


def describe_run(rank: int, world_size: int, axes: tuple[Axis, ...], *, instrument: str) -> RunInfo:
    """The record of the run that this process is a rank of.

    Every instrument calls this, so the warning about an untested torch version is given here.
    """
    warn_if_untested()
    return RunInfo(
        torch_version=str(torch.__version__),
        shardscope_version=__version__,
        world_size=world_size,
        ranks=(RankSpan(rank),),
        axes=axes,
        is_simulated=is_simulated(),
        command=_describe_command(),
        instruments=(instrument,),
        device_type=_find_device_type(),
    )


def _find_device_type() -> str | None:
    """The device type of the simulated world, or the one that the backend of the group implies."""
    world = current_world()
    if world is not None:
        return world.device_type
    return _DEVICES.get(str(dist.get_backend())) if dist.is_initialized() else None


def find_torch_gaps(rank: int | None = None) -> tuple[Gap, ...]:
    """A gap for each private torch name that this torch version lacks."""
    return tuple(Gap(place="torch", fact=fact, rank=rank) for fact in missing_names())


def _describe_command() -> str:
    if not sys.argv or not sys.argv[0]:
        return ""
    return replace_surrogates(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))
