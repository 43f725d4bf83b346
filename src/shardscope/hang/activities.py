"""What a rank does by the stack of its main thread: waits in a collective, loads data, …"""

from __future__ import annotations

import re

from msgspec import Struct

from shardscope.hang.evidence import Frame, ThreadStack
from shardscope.hang.evidence.names import is_library_file, make_source
from shardscope.record.base import Source
from shardscope.record.hang_records import CauseKind

_MAX_FRAMES = 3  # of the program, that are shown


class Activity(Struct, frozen=True):
    """What a stack shows. `is_waiting` says that it is in a collective, or waits for the group.

    `kind` is None where the stack does not tell a class of cause; `is_by_name` says that only names
    of the program's functions tell it. `detail` is a phrase such as "in the data loader".
    """

    detail: str
    is_waiting: bool = False
    kind: CauseKind | None = None
    is_by_name: bool = False
    frames: tuple[Source, ...] = ()

    @property
    def line(self) -> Source | None:
        """The innermost line of the program."""
        return self.frames[0] if self.frames else None


_COLLECTIVE = re.compile(
    r"torch/distributed/(?:distributed_c10d|_functional_collectives|c10d_logger|"
    r"algorithms/|nn/functional|_symmetric_memory)"
)
_GROUP_SETUP = re.compile(
    r"torch/distributed/(?:rendezvous|elastic/|device_mesh|_shard/|debug/|_store|utils\.py)"
)
_PATTERNS: tuple[tuple[re.Pattern[str], CauseKind, str], ...] = (
    (
        re.compile(
            r"torch/utils/data/|torchdata/|webdataset/|streaming/base|ffcv/|nvidia/dali"
            r"|/datasets/(?:arrow|iterable|load|table|utils|formatting)|tensorflow_datasets"
            r"|mosaicml_streaming|litdata/"
        ),
        CauseKind.DATA_LOADING,
        "in the data loader",
    ),
    (
        re.compile(
            r"torch/_(?:dynamo|inductor|functorch|export|higher_order_ops)/|/triton/"
            r"|torch/fx/experimental|torch/_guards|torch/_compile|concurrent/futures/process"
        ),
        CauseKind.COMPILING,
        "in torch.compile",
    ),
    (
        re.compile(
            r"torch/serialization|torch/distributed/checkpoint|safetensors|/fsspec/|/s3fs/|/gcsfs/"
            r"|boto(?:core|3)/|/adlfs/|smart_open/|huggingface_hub/|torch/_utils_internal"
            r"|(?:^|/)(?:shutil|pathlib|tempfile|gzip|zipfile|tarfile|glob|fileinput|lzma|bz2)\.py$"
        ),
        CauseKind.FILE_SYSTEM,
        "in file or checkpoint input and output",
    ),
)
# Functions of the program that say by their name what they do.
_LOADING = re.compile(
    r"(?:data_?loader|dataset|sampler|collate|next_batch|get_batch|load_batch|fetch_batch"
    r"|prefetch|tokeniz)|loader(?:\.|_|$)|^__getitem__$",
    re.IGNORECASE,
)
_ITERATION = ("__next__", "__iter__")
_FILES = re.compile(
    r"(?:save|write|load|read)_?(?:checkpoint|state|shard|file|model)|checkpoint|^fsync$"
    r"|^(?:open|flush)_",
    re.IGNORECASE,
)
_NEUTRAL = re.compile(
    r"(?:^|/)(?:threading|queue|queues|selectors|socket|ssl|subprocess|popen_fork|connection"
    r"|synchronize|process|pool|asyncio/\w+|contextlib|functools|runpy|base_events)\.py$"
    r"|multiprocessing/"
)
_GPU = re.compile(r"torch/cuda/(?:__init__|streams|graphs|memory)\.py|torch/accelerator/")
_GPU_WAITS = ("synchronize", "wait", "wait_event", "wait_stream", "elapsed_time", "replay")
_BACKWARD = re.compile(r"torch/autograd/(?:graph|__init__)\.py")
_SETUP = re.compile(
    r"(?:init_process_group|new_group|process_group_helper|split_group|store_based_barrier"
    r"|init_device_mesh)$"
)


def read_activity(stack: ThreadStack) -> Activity:
    """What a thread does, by its stack.

    Args:
        stack: The stack, innermost frame first.
    """
    frames = stack.frames
    sources = tuple(list_program_lines(frames))[:_MAX_FRAMES]
    if not frames:
        return Activity("in code without Python frames")
    for frame in frames:
        file = frame.file.replace("\\", "/")
        function = frame.function.rpartition(".")[2]
        if _COLLECTIVE.search(file):
            what = "creating a process group" if _SETUP.search(function) else f"in {_name(frames)}"
            return Activity(what, is_waiting=True, frames=sources)
        if _GROUP_SETUP.search(file):
            return Activity(f"in {function} of torch.distributed", is_waiting=True, frames=sources)
        if _GPU.search(file) and function in _GPU_WAITS:
            detail = f"waiting for the GPU in {function}"
            return Activity(detail, is_waiting=True, frames=sources)
        for pattern, kind, detail in _PATTERNS:
            if pattern.search(file):
                return Activity(_add_place(detail, sources), kind=kind, frames=sources)
        if _NEUTRAL.search(file) or is_library_file(file):
            continue
        break
    return _read_program(frames, sources)


def _read_program(frames: tuple[Frame, ...], sources: tuple[Source, ...]) -> Activity:
    """What code of the program does, which only its names tell."""
    innermost = frames[0]
    if _BACKWARD.search(innermost.file):
        return Activity(_add_place("in backward, below Python", sources), frames=sources)
    for source in sources:
        name = source.function.rpartition(".")[2]
        if _LOADING.search(source.function) or (name in _ITERATION and len(frames) < 50):
            return Activity(
                _add_place("in a data loader", sources),
                kind=CauseKind.DATA_LOADING,
                is_by_name=True,
                frames=sources,
            )
        if _FILES.search(source.function):
            return Activity(
                _add_place("in file or checkpoint input and output", sources),
                kind=CauseKind.FILE_SYSTEM,
                is_by_name=True,
                frames=sources,
            )
    if sources:
        return Activity(f"in {_describe(sources[0])}", kind=CauseKind.SLOW, frames=sources)
    return Activity(f"in {innermost.function}", frames=sources)


def list_program_lines(frames: tuple[Frame, ...]) -> list[Source]:
    """The lines of the program in a stack, innermost first, without those of libraries."""
    return [
        make_source(frame.file, frame.line, frame.function)
        for frame in frames
        if not is_library_file(frame.file) and not _NEUTRAL.search(frame.file)
    ]


def _name(frames: tuple[Frame, ...]) -> str:
    """The function of torch.distributed that the program called: the outermost of them."""
    named = [
        frame.function
        for frame in frames
        if _COLLECTIVE.search(frame.file) and "wrapper" not in frame.function
    ]
    return named[-1] if named else frames[0].function


def _add_place(detail: str, sources: tuple[Source, ...]) -> str:
    return f"{detail}, at {_describe(sources[0])}" if sources else detail


def _describe(source: Source) -> str:
    function = f"{source.function} " if source.function not in ("", "<module>") else ""
    return f"{function}({source.file}:{source.line})"
