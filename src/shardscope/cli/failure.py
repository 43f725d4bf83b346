"""What went wrong in the user's program: one line, where it happened, and what would help."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from shardscope.report.names import shorten

__all__ = ["describe_failure", "suggest_remedy"]

_MAX_TEXT = 300  # characters of what an exception says

# How torch says that a tensor without data was asked for its data. Its exceptions are known by
# name, because they live in private modules.
_DATA_ERRORS = ("DataDependentOutputException", "DynamicOutputShapeException")
_DATA_WORDS = re.compile(
    r"\bmeta\b.*\btensors?\b|no data!|\.numpy\(\) is not supported for tensor"
    r"|its data is not allocated yet"  # DistributedDataParallel on fake tensors
    r"|Can't pickle local object 'WeakValueDictionary"  # torch.save() of a fake tensor
)
_NO_DATA = (
    "The simulation has no data: leave out .item() and whatever else reads values, or run again "
    "with --data, as DDP needs it."
)
_TWICE = "The process group exists already when the target is called: leave init_process_group out."

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")


def describe_failure(error: BaseException) -> str:
    """An exception of the user's program in one line, with the innermost line that is theirs."""
    said = _say(error)
    frame = _find_line(error)
    return said if frame is None else f"{said} ({frame.filename}, line {frame.lineno})"


def suggest_remedy(error: BaseException, *, has_data: bool) -> str:
    """What to do about it, where that is known; else nothing."""
    for one in _chain(error):
        words = _read(one)
        if not has_data and (type(one).__name__ in _DATA_ERRORS or _DATA_WORDS.search(words)):
            return _NO_DATA
        if "initialize the default process group twice" in words:
            return _TWICE
    return ""


def _say(error: BaseException) -> str:
    lines = _read(error).strip().splitlines()
    kind = type(error).__name__
    return f"{kind}: {shorten(lines[0].rstrip(' .:'), _MAX_TEXT)}" if lines else kind


def _read(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception may fail to say what it is
        return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and those it came from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _find_line(error: BaseException) -> traceback.FrameSummary | None:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", _OURS, _TORCH))
    ]
    installed = [frame for frame in frames if set(_INSTALLED) & {*Path(frame.filename).parts}]
    theirs = [
        frame
        for frame in frames
        if frame not in installed and not frame.filename.startswith(_STANDARD)
    ]
    # A target may be an installed module; then a line of an installed package is the best there is.
    return next(reversed(theirs or installed), None)
