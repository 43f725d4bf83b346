"""What the processes of a run exchange: the request, and the events of each rank's process."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shardscope._torch.process_groups.collective_inputs import GroupInputs
from shardscope.launch.decisions import Change

HELPER = "helper"
"""The instrument of a rank that only runs because others wait for what it sends."""
MAIL = "mail"
"""The folder, in the scratch folder, of objects that ranks send each other."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One process: the program as one rank, observed by `instrument`, several joined by "+"."""

    rank: int
    instrument: str

    @property
    def is_helper(self) -> bool:
        """Whether nothing is recorded."""
        return self.instrument == HELPER

    @property
    def stem(self) -> str:
        """The name of its files in the scratch folder."""
        return f"rank{self.rank}-{self.instrument}"


class Lanes(msgspec.Struct, frozen=True):
    """Which ranks send objects, such as shapes of a pipeline's stages, also for all others.

    Those with index 0 along all axes of a mesh with these sizes but `kept`.
    """

    sizes: tuple[int, ...]
    kept: tuple[int, ...]

    def find_sender(self, rank: int) -> int:
        """The rank that sends for a rank."""
        sender, stride = 0, 1
        for axis in reversed(range(len(self.sizes))):
            rank, index = divmod(rank, self.sizes[axis])
            sender += stride * (index if axis in self.kept else 0)
            stride *= self.sizes[axis]
        return sender


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the warm process needs to run the program.

    With `is_shown`, the first job prints to the terminal; others print to files in `scratch`. A job
    counts as waiting if it hardly uses the processor for `patience_s` seconds. With `has_data`, the
    jobs are all ranks of the cluster and run at once, on data. `lockstep` is the address of the
    coordinator to which ranks report their collectives; they do not if it is empty. `changes` is
    what is changed where the program decides; if it is None, decisions are not noted.
    `group_inputs` is what others give to the collectives of a rank, by rank. After `max_ops` ops,
    if not 0, the program is ended. `lanes` are of a world in which few ranks run. With
    `skips_checkpoints`, no checkpoint is written, not even to `scratch`.
    """

    script: str
    args: tuple[str, ...]
    is_module: bool
    num_nodes: int
    num_per_node: int
    num_steps: int
    gpu: str
    scratch: str
    jobs: tuple[Job, ...]
    num_parallel: int
    is_shown: bool = True
    patience_s: float = 60
    has_data: bool = False
    lockstep: str = ""
    changes: tuple[Change, ...] | None = None
    group_inputs: dict[int, tuple[GroupInputs, ...]] = {}
    max_ops: int = 0
    lanes: Lanes | None = None
    skips_checkpoints: bool = False


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How the program of a job ended.

    `failure` says why it failed, in words that follow the rank; None if it did not.
    `is_consequence` says that it failed because another rank had left the group. `is_done` says
    that we have ended it, because it has finished all steps or nothing more was to be observed.
    `num_calls` is how often its models were called, and `commands` are the first programs that it
    has started.
    """

    num_steps: int = 0
    is_done: bool = False
    num_calls: int = 0
    commands: tuple[str, ...] = ()
    failure: str | None = None
    is_consequence: bool = False


class StepsEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A job has finished this many steps."""

    job: Job
    num_steps: int


class Reason(StrEnum):
    """Why we have ended a job, or not started it."""

    WAITED = "waited"
    """It waited for something that does not come."""
    INTERRUPTED = "interrupted"
    """The user has interrupted the run."""
    NOT_STARTED = "not started"
    """The run has ended before."""


class JobEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A job's process has ended; `ending` is None if it died before it could report.

    `place` is the program's line at which it was ended or died, if known. `output` is the end of
    what the program has printed, if that was not shown. `reason` is why it was ended, if it was.
    """

    job: Job
    ending: Ending | None
    num_steps: int = 0
    signal: int | None = None
    place: str | None = None
    reason: Reason | None = None
    output: str = ""


class Busy(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A job has computed for a while without a step."""

    job: Job
    place: str
    seconds: int


class RequestEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All jobs of a request have ended."""


Event = StepsEnded | JobEnded | Busy
"""What the warm process reports of jobs."""
