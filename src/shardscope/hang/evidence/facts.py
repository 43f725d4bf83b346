"""What a file says about ranks besides their calls: groups, stacks, events of logs, processes."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from shardscope.hang.evidence.calls import CallColumns, CallSignature, CallSite
from shardscope.record.recording import Gap, Stop


class FileFormat(StrEnum):
    """What a file is, by its content."""

    RECORDING = "recording"
    STREAM = "stream"
    FLIGHT_RECORDER = "Flight Recorder"
    DEBUG_SERVER = "debug server"
    NCCL_RAS = "NCCL RAS"
    NCCL_LOG = "NCCL log"
    PY_SPY = "py-spy"
    FAULTHANDLER = "faulthandler"
    TORCH_TRACE = "TORCH_TRACE"
    LOG = "log"


class EventKind(StrEnum):
    """What a log says happened to a rank."""

    EXCEPTION = "exception"
    OUT_OF_MEMORY = "out of memory"
    SIGNAL = "signal"
    EXIT = "exit"
    TIMEOUT = "timeout"  # of a collective: the rank waited in it
    CONNECTION = "connection"  # another rank's connection ended
    NETWORK = "network"
    GPU = "gpu"
    INTERRUPTED = "interrupted"  # ended from outside, as by torchrun after another rank failed
    UNREACHABLE = "unreachable"  # does not answer
    DEAD = "dead"  # declared dead by NCCL


class Frame(Struct, frozen=True, gc=False):
    """A frame of a stack."""

    function: str
    file: str
    line: int


class ThreadStack(Struct, frozen=True, gc=False):
    """The stack of a thread, innermost frame first. `is_active` is None where not recorded."""

    name: str
    frames: tuple[Frame, ...]
    is_main: bool
    is_active: bool | None = None
    exception: str = ""  # that the stack is the traceback of


class RankEvent(Struct, frozen=True, gc=False):
    """An event of a log; `time` is the text of its time, and sorts events of one log."""

    kind: EventKind
    text: str
    time: str = ""
    line: int = 0  # of the file
    frames: tuple[Frame, ...] = ()
    is_root: bool = False  # the launcher names it as the first failure


class GroupFact(Struct, frozen=True, gc=False):
    """A process group as a file names it; `ranks` are None where they are not recorded."""

    name: str  # torch's
    description: str = ""
    ranks: tuple[int, ...] | None = None
    label: str = ""  # a readable name that the file has for it
    backend: str = ""
    size: int | None = None


class CommunicatorCount(Struct, frozen=True, gc=False):
    """How many operations a rank has launched in an NCCL communicator.

    `member` is the rank in the communicator. `counts` are by kind of operation; None means that the
    source does not say, because ranks are level. `state` is that of NCCL RAS.
    """

    communicator: str
    size: int
    member: int
    counts: tuple[tuple[str, int], ...] | None = None
    state: str = ""


class CompileEvent(Struct, frozen=True, gc=False):
    """A compilation of a rank: its id, the collectives of the graph, whether a cache had it."""

    compile_id: str
    function: str = ""
    collectives: tuple[str, ...] | None = None
    is_cached: bool | None = None
    is_open: bool = False  # begun and not ended


class RankEvidence(Struct, frozen=True, kw_only=True):
    """What one file says about one rank.

    `rank` is None if the file does not say it; `member` is then the rank in a group or
    communicator, if that is known. `first_ns` and `last_ns` are times of day of the first and last
    call. `is_wrapped` means that earlier calls were overwritten; `is_complete` that what is not
    here was not issued; `is_finished` that the rank left its trace or program normally.
    """

    path: str
    format: FileFormat
    rank: int | None = None
    host: str = ""
    pid: int | None = None
    world_size: int | None = None
    groups: tuple[GroupFact, ...] = ()
    signatures: tuple[CallSignature, ...] = ()
    sites: tuple[CallSite, ...] = ()
    columns: tuple[CallColumns, ...] = ()
    is_wrapped: bool = False
    is_complete: bool = True
    is_finished: bool = False
    has_sites: bool = False
    has_states: bool = False
    has_start_times: bool = False
    first_ns: int = 0
    last_ns: int = 0
    version: str = ""
    stacks: tuple[ThreadStack, ...] = ()
    events: tuple[RankEvent, ...] = ()
    counts: tuple[CommunicatorCount, ...] = ()
    compilations: tuple[CompileEvent, ...] = ()
    stop: Stop | None = None
    seen_ns: tuple[tuple[str, int], ...] = ()  # when each thread last did something


class FileReport(Struct, frozen=True, kw_only=True):
    """What was read from one file: evidence of ranks, and what could not be read.

    `detail` says what the file holds or lacks, in a few words.
    """

    path: str
    format: FileFormat | None = None
    ranks: tuple[RankEvidence, ...] = ()
    gaps: tuple[Gap, ...] = ()
    detail: str = ""
    modified_ns: int = 0
