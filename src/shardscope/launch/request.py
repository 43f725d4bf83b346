"""What the processes of a run exchange: the request, and the events of each rank's process."""

from __future__ import annotations

import msgspec

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


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the warm process needs to run the program.

    With `is_shown`, the first job prints to the terminal; others print to files in `scratch`.
    With `has_data`, the jobs are all ranks of the cluster and run at once, on data.
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
    has_data: bool = False


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How the program of a job ended.

    `is_observed` says that the program was ended before its first step, because nothing more was to
    be observed. `is_consequence` says that it failed because another rank had left the group.
    `failure` is a sentence about the exception that ended it, None if none did. `exit_code` is what
    the program gave `sys.exit()`, None if it did not call that.
    """

    num_steps: int = 0
    failure: str | None = None
    exit_code: int | None = None
    is_interrupted: bool = False
    is_observed: bool = False
    is_consequence: bool = False


class JobEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A job's process has ended; `ending` is None if it died before it could report."""

    job: Job
    ending: Ending | None
    signal: int | None = None
    waiting_at: str | None = None  # where it waited when it was ended for making no progress
