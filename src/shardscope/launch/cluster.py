"""The cluster that a program believes it runs on: nodes, processes per node, GPUs, environment."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

from shardscope.errors import LaunchError
from shardscope.record import CollectiveKind, Recording
from shardscope.record.ranks import MAX_RANKS

_POINT_TO_POINT = (CollectiveKind.SEND, CollectiveKind.RECV)


@dataclass(frozen=True)
class Cluster:
    """`num_nodes` hosts with `num_per_node` processes each, one GPU per process."""

    num_nodes: int = 1
    num_per_node: int = 8

    def __post_init__(self) -> None:
        for option, value in (
            ("--nnodes", self.num_nodes),
            ("--nproc-per-node", self.num_per_node),
        ):
            if value < 1:
                raise LaunchError(f"{option} is {value}. Give a number of at least 1.")
        if self.size > MAX_RANKS:
            raise LaunchError(
                f"{self.num_nodes:,} nodes of {self.num_per_node:,} processes are {self.size:,} "
                f"ranks. Choose at most {MAX_RANKS:,}."
            )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.num_nodes * self.num_per_node

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that torchrun sets for a rank."""
        node, local_rank = divmod(rank, self.num_per_node)
        variables = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.size,
            "LOCAL_WORLD_SIZE": self.num_per_node,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": self.num_nodes,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": self.size,
            "ROLE_NAME": "default",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": 29500,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
        }
        if self.num_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
            variables["OMP_NUM_THREADS"] = 1
        return {name: str(value) for name, value in variables.items()}

    def find_roles(self, recording: Recording) -> tuple[int, ...]:
        """A rank for each role that the mesh of rank 0 has.

        These are all stages of a pipeline, and the last rank along each other axis, whose shards
        may be smaller. Other ranks do the same on other data.
        """
        axes = recording.run.axes
        moved = {
            collective.axis
            for collective in recording.collectives
            if collective.kind in _POINT_TO_POINT
        }
        if math.prod(axis.size for axis in axes) != self.size:
            return (0, self.size - 1) if self.size > 1 else (0,)
        strides = [math.prod(axis.size for axis in axes[index + 1 :]) for index in range(len(axes))]
        stages, last = {0}, set()
        for axis, stride in zip(axes, strides, strict=True):
            if axis.name in moved:
                stages = {rank + index * stride for rank in stages for index in range(axis.size)}
            else:
                last.add((axis.size - 1) * stride)
        return tuple(sorted(stages | last))

    def choose_ranks(self, text: str) -> tuple[int, ...]:
        """The ranks that `--ranks` names: numbers and spans such as 0,8-15, or "all"."""
        if text == "all":
            return tuple(range(self.size))
        ranks: dict[int, None] = {}
        for part in text.split(","):
            span = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
            if span is None:
                raise LaunchError(
                    f"--ranks is {text!r}. Give ranks and spans such as 0,8-15, 'roles' or 'all'."
                )
            first, last = int(span[1]), int(span[2] or span[1])
            if not first <= last < self.size:
                raise LaunchError(
                    f"--ranks names {part.strip()}, but the cluster has ranks 0 to "
                    f"{self.size - 1:,}. Choose some of those, or raise --nnodes or "
                    "--nproc-per-node."
                )
            ranks.update(dict.fromkeys(range(first, last + 1)))
        return tuple(sorted(ranks))
