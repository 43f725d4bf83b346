"""What inductor found out about this machine, copied from the user's caches to an enclosure.

Without it the first compilation of each enclosure takes half a minute: inductor compiles a header
of C++ and tries which vector instructions work. Kernels are not copied: they may be what is wrong.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shardscope._torch.inductor_caches import cache_folder, header_folder
from shardscope.compile.diagnose.isolation.enclosure import Enclosure

__all__ = ["borrow_from_inductor"]

_MAX_TRIAL_BYTES = 1024  # kernels are longer
_TRIAL = b"_chk_kernel"
_MAX_HEADERS = 3  # of 150 MB each; which one fits, only inductor knows
_SETTLED_S = 30.0  # after its last change nobody is writing a file any more


def borrow_from_inductor(enclosure: Enclosure) -> None:
    """Files are named by hashes of what made them, so one that does not fit is not used."""
    with suppress(OSError):  # it is only slower without
        for trial in _find_trials(cache_folder()):
            _copy(trial, enclosure.inductor_cache / trial.parent.name)
        for header in _find_headers(header_folder()):
            _copy(header, header_folder(temporary=enclosure.temporary))


def _find_trials(folder: Path) -> Iterator[Path]:
    for source in folder.glob("??/*.cpp"):
        library = source.with_suffix(".so")
        is_small = source.stat().st_size <= _MAX_TRIAL_BYTES
        if is_small and library.exists() and _TRIAL in source.read_bytes():
            yield from (source, library)


def _find_headers(folder: Path) -> Iterator[Path]:
    compiled = sorted(folder.glob("*.h.gch"), key=lambda path: -path.stat().st_mtime)
    for header in compiled[:_MAX_HEADERS]:
        yield from (header.with_suffix(""), header)


def _copy(file: Path, folder: Path) -> None:
    if time.time() - file.stat().st_mtime < _SETTLED_S:
        return
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{file.name}.copy"
    shutil.copy2(file, unfinished)
    os.replace(unfinished, folder / file.name)
