"""Names of collectives, dtypes and files as torch, NCCL and Flight Recorder write them."""

from __future__ import annotations

import os
import re
from functools import lru_cache

from shardscope.record.base import CollectiveKind, Source

_KINDS = (  # a name has the kind of the first part that it contains
    ("barrier", CollectiveKind.BARRIER),
    ("reducescatter", CollectiveKind.REDUCE_SCATTER),
    ("allreduce", CollectiveKind.ALL_REDUCE),
    ("allgather", CollectiveKind.ALL_GATHER),
    ("alltoall", CollectiveKind.ALL_TO_ALL),
    ("broadcast", CollectiveKind.BROADCAST),
    ("gather", CollectiveKind.GATHER),
    ("scatter", CollectiveKind.SCATTER),
    ("reduce", CollectiveKind.REDUCE),
    ("send", CollectiveKind.SEND),
    ("recv", CollectiveKind.RECV),
)
_DTYPES = {  # of c10::toString: torch's name and the bytes of an element
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Short": ("int16", 2),
    "Char": ("int8", 1),
    "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
    "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
    "ComplexHalf": ("complex32", 4),
    "UInt16": ("uint16", 2),
    "UInt32": ("uint32", 4),
    "UInt64": ("uint64", 8),
}
_NCCL_DTYPES = (
    ("int8", 1),
    ("uint8", 1),
    ("int32", 4),
    ("uint32", 4),
    ("int64", 8),
    ("uint64", 8),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("bfloat16", 2),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
)
_NCCL_REDUCTIONS = ("sum", "product", "max", "min", "avg")
_NOT_LETTERS = re.compile(r"[^a-z]")
# Files that a call goes through between the user's line and the collective.
_LIBRARY = re.compile(
    r"(?:^|/)(?:site|dist)-packages/(?:torch|torchgen|typing_extensions|decorator)\b|^torch/"
    r"|(?:^|/)shardscope/(?:_torch|attribution|comm|world|shard)/"
    r"|(?:^|/)(?:contextlib|functools|threading|typing_extensions)\.py$|^<(?!stdin|ipython)"
)
_IMPORTS = re.compile(r"^<(?:frozen|string|unknown|built)")


@lru_cache(maxsize=4096)
def find_kind(name: str) -> CollectiveKind | None:
    """The kind of a collective by its name: `nccl:_all_gather_base`, `ALLREDUCE`, `AllGather`."""
    letters = _NOT_LETTERS.sub("", name.rpartition(":")[2].lower())
    return next((kind for part, kind in _KINDS if part in letters), None)


@lru_cache(maxsize=4096)
def find_dtype(name: str) -> tuple[str, int | None]:
    """Torch's name of a dtype that c10 wrote, and the bytes of an element, None if not known."""
    if name in _DTYPES:
        return _DTYPES[name]
    if name.startswith("Float8"):
        return name.lower(), 1
    return name.lower(), None


def find_nccl_dtype(number: int) -> tuple[str, int | None]:
    """The dtype with a number in NCCL's logs."""
    if 0 <= number < len(_NCCL_DTYPES):
        return _NCCL_DTYPES[number]
    return f"dtype {number}", None


def find_nccl_reduction(number: int) -> str:
    """The reduction with a number in NCCL's logs."""
    if 0 <= number < len(_NCCL_REDUCTIONS):
        return _NCCL_REDUCTIONS[number]
    return f"custom reduction {number}"


@lru_cache(maxsize=65536)
def is_library_file(file: str) -> bool:
    """Whether a frame of this file is torch's or Python's own, and not the program's."""
    return _LIBRARY.search(file) is not None or _IMPORTS.match(file) is not None


@lru_cache(maxsize=65536)
def make_source(file: str, line: int, function: str) -> Source:
    """A source line; a file below the working directory is named relative to it."""
    folder = os.getcwd() + os.sep
    name = file[len(folder) :] if len(folder) > 2 and file.startswith(folder) else file
    return Source(file=name, line=max(0, line), function=function)
