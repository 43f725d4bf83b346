"""The surroundings of a program that runs with data: its ranks are processes of this machine."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import final

import torch

from shardscope._torch.checkpoints import redirected_checkpoints, skipped_checkpoints
from shardscope._torch.cuda.on_host import cuda_on_host
from shardscope._torch.process_groups.gloo import joined_by_gloo
from shardscope.launch.cluster import Cluster
from shardscope.launch.files import ScratchFiles, set_scratch_environment
from shardscope.launch.program import launched_in_place
from shardscope.launch.rank_process import (
    describe_times,
    explain_join,
    name_running_line,
    set_environment,
)
from shardscope.launch.request import MAIL, Job, Request
from shardscope.record import Gap

_MAX_WAIT_SECONDS = 20


@final
class DataRank:
    """A rank that computes: process groups are gloo's, and its GPU is this machine's CPU."""

    def __init__(self, request: Request, job: Job) -> None:
        self._cluster = Cluster(request.num_nodes, request.num_per_node)
        self._rank = job.rank
        self._gpu = request.gpu
        self._scratch = request.scratch  # where the ranks share the files that they write
        self._own_scratch = str(Path(request.scratch, job.stem))
        self._jobs = request.jobs
        self._instrument = job.instrument
        self._skips_checkpoints = request.skips_checkpoints
        self._differences: Counter[tuple[str, str, str]] = Counter()
        self._joined = (job.rank, self._cluster.size)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Provide the environment, the GPUs and the process groups until the context ends."""
        environment = dict(os.environ)
        mail = str(Path(self._scratch, MAIL))
        meeting = Path(mail, self._instrument)  # processes with another instrument are no ranks
        meeting.mkdir(exist_ok=True)
        num_per_node = self._cluster.num_per_node
        os.environ.update(self._cluster.environment(self._rank))
        set_scratch_environment(self._own_scratch)
        torch.set_num_threads(1)  # as torchrun does
        with ExitStack() as stack:
            stack.callback(set_environment, environment)
            stack.enter_context(
                cuda_on_host(num_per_node, self._gpu, on_difference=self._note_difference)
            )
            stack.enter_context(
                joined_by_gloo(
                    self._rank,
                    self._cluster.size,
                    num_per_node=num_per_node,
                    folder=str(meeting),
                    on_join=self._note_rank,
                )
            )
            stack.enter_context(launched_in_place(self._rank % num_per_node))
            if self._skips_checkpoints:
                stack.enter_context(skipped_checkpoints(_ignore, skips_data=True))
            else:
                stack.enter_context(redirected_checkpoints(self._note_skip))
            stack.enter_context(ScratchFiles(self._scratch, unchanged=mail).redirected())
            yield

    def find_gaps(self) -> Iterator[Gap]:
        """Where the CPU did something else than a GPU would, or something was left out."""
        for (place, what, difference), count in self._differences.items():
            fact = f"{what} was called {describe_times(count)}: {difference}"
            yield Gap(place=place, rank=self._rank, fact=fact)
        yield from explain_join(self._joined, (self._rank, self._cluster.size))

    def wait_for_others(self) -> None:
        """Wait until the other ranks have ended too: they may still receive what this rank sent."""
        files = [Path(self._scratch, f"{job.stem}.ending.json") for job in self._jobs]
        until = time.monotonic() + _MAX_WAIT_SECONDS
        while time.monotonic() < until and not all(file.exists() for file in files):
            time.sleep(0.01)

    def _note_rank(self, rank: int, size: int) -> None:
        self._joined = (rank, size)

    def _note_skip(self, what: str) -> None:
        self._differences[name_running_line("checkpoints"), what, "nothing was saved"] += 1

    def _note_difference(self, what: str, difference: str) -> None:
        self._differences[name_running_line("devices"), what, difference] += 1


def _ignore(what: str) -> None:
    """Checkpoints that the user asked to skip are no gaps."""
