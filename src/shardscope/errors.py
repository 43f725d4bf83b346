"""Every error shardscope raises on purpose.

ShardscopeError                 base; has the exit code of the command line
├── RecordingError              a recording file cannot be read or written
├── MergeError                  recordings that do not belong together
├── WorldError                  a world that cannot be made, entered or left
│   ├── CollectiveError         a collective that a real process group would refuse
│   └── RankError               one of several ranks raised an exception
├── CoverageError               the ops of a model cannot be collected or checked
├── TraceError                  a trace that cannot start
├── AuditError                  a model or tensor that cannot be audited
├── PhaseError                  a phase that cannot be timed
├── MemoryProfileError          the memory of a step cannot be estimated
├── ParallelError               a program cannot be partitioned, or not correctly
│   ├── PlanError               a plan that does not fit its program or mesh
│   └── ParityError             a comparison that cannot be made
├── DiffError                   recordings that cannot be compared as asked
├── CompileError                a function that cannot be explained or diagnosed
│   ├── BackendError            options that a debugging backend does not take
│   ├── GraphRunError           a captured graph raised an exception
│   └── WorkerError             another process did not answer a call
│       ├── RemoteError         an exception was raised there
│       ├── WorkerCrashed       the process died
│       └── WorkerHung          the process made no progress, and was ended
├── ContractError               a contract that cannot be read, recorded or checked
├── PluginError                 an optional package is not installed
├── QueryError                  a query of recordings that cannot be run
├── LaunchError                 a program that cannot be started as ranks of a cluster
├── TorchVersionError           a torch that lacks what a feature needs
├── TargetError                 a TARGET on the command line that cannot be used
└── OutputError                 an output that cannot be written

Messages are sentences: the fact, the place, the remedy.
"""

from __future__ import annotations

__all__ = [
    "AuditError",
    "BackendError",
    "CollectiveError",
    "CompileError",
    "ContractError",
    "CoverageError",
    "DiffError",
    "GraphRunError",
    "LaunchError",
    "MemoryProfileError",
    "MergeError",
    "OutputError",
    "ParallelError",
    "ParityError",
    "PhaseError",
    "PlanError",
    "PluginError",
    "QueryError",
    "RankError",
    "RecordingError",
    "RemoteError",
    "ShardscopeError",
    "TargetError",
    "TorchVersionError",
    "TraceError",
    "WorkerCrashed",
    "WorkerError",
    "WorkerHung",
    "WorldError",
]


_MAX_REPR = 160  # characters of a message


class ShardscopeError(Exception):
    """Base of all errors that are raised on purpose; `exit_code` is that of the command line."""

    exit_code = 2

    def __repr__(self) -> str:
        """The type and the beginning of the message, which may be long."""
        text = str(self)
        return f"{type(self).__name__}({text[:_MAX_REPR]!r}{'…' if len(text) > _MAX_REPR else ''})"


class RecordingError(ShardscopeError):
    """A recording file cannot be read or written."""


class MergeError(ShardscopeError):
    """Recordings that do not belong together."""


class WorldError(ShardscopeError):
    """A world that cannot be made, entered or left."""


class CollectiveError(WorldError):
    """A collective that a real process group would refuse."""


class RankError(WorldError):
    """One of several ranks raised an exception, which is `__cause__`."""

    def __init__(self, sentence: str, *, rank: int) -> None:
        super().__init__(sentence)
        self.rank = rank


class CoverageError(ShardscopeError):
    """The ops of a model cannot be collected or checked."""


class TraceError(ShardscopeError):
    """A trace that cannot start."""


class AuditError(ShardscopeError):
    """A model or tensor that cannot be audited."""


class PhaseError(ShardscopeError):
    """A phase that cannot be timed."""


class MemoryProfileError(ShardscopeError):
    """The memory of a step cannot be estimated."""


class DiffError(ShardscopeError):
    """Recordings that cannot be compared as asked."""


class CompileError(ShardscopeError):
    """A function that cannot be explained or diagnosed."""


class BackendError(CompileError):
    """Options that a debugging backend does not take."""


class GraphRunError(CompileError):
    """A captured graph raised an exception, which is `__cause__`."""


class WorkerError(CompileError):
    """Another process did not answer a call; `output` is what it printed last."""

    def __init__(self, sentence: str, *, phase: str = "", output: str = "") -> None:
        super().__init__(sentence)
        self.phase = phase
        self.output = output


class RemoteError(WorkerError):
    """Another process raised an exception, which is `__cause__` if it could be sent."""

    def __init__(self, kind: str, message: str, *, trace: str = "", phase: str = "") -> None:
        super().__init__(f"{kind}: {message}", phase=phase)
        self.kind = kind  # the full name of its type
        self.message = message
        self.trace = trace


class WorkerCrashed(WorkerError):  # noqa: N818 - what happened, not what it is
    """The process died; `end` is the name of a signal, or the exit code."""

    def __init__(self, end: str, *, phase: str = "", output: str = "") -> None:
        place = f" while {phase}" if phase else ""
        super().__init__(f"the worker process died ({end}){place}.", phase=phase, output=output)
        self.end = end


class WorkerHung(WorkerError):  # noqa: N818 - what happened, not what it is
    """The process made no progress for longer than it was given, and was ended."""

    def __init__(self, seconds: float, *, phase: str = "", output: str = "") -> None:
        place = f" while {phase}" if phase else ""
        super().__init__(
            f"the worker process made no progress for {seconds:g} s{place}, and was ended.",
            phase=phase,
            output=output,
        )
        self.seconds = seconds


class ContractError(ShardscopeError):
    """A contract that cannot be read, recorded or checked."""


class PluginError(ShardscopeError):
    """A package that a plugin, Parquet or a query needs is not installed."""


class QueryError(ShardscopeError):
    """A query of recordings that cannot be run."""


class LaunchError(ShardscopeError):
    """A program cannot be started as ranks of a simulated cluster."""


class TorchVersionError(ShardscopeError):
    """This version of torch lacks a name that a feature needs."""


class TargetError(ShardscopeError):
    """A TARGET on the command line that cannot be used; `example` is a valid one, if that helps."""

    def __init__(self, sentence: str, *, example: str = "") -> None:
        super().__init__(sentence)
        self.example = example


class OutputError(ShardscopeError):
    """An output that cannot be written."""


class ParallelError(ShardscopeError):
    """A program cannot be partitioned, or not correctly."""


class PlanError(ParallelError):
    """A plan that does not fit its program or mesh."""


class ParityError(ParallelError):
    """A comparison that cannot be made."""
