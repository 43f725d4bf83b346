"""Where inductor keeps what it has compiled."""

from __future__ import annotations

import os
from pathlib import Path

from shardscope._torch.private import find_name

__all__ = ["cache_folder", "header_folder"]

default_cache_dir = find_name(
    "torch._inductor.runtime.cache_dir_utils.default_cache_dir",
    "reuse inductor's precompiled headers in workers",
)
_HEADERS = "precompiled_headers"


def cache_folder() -> Path:
    """The user's, of kernels and of trials what this machine can do."""
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())


def header_folder(*, temporary: Path | None = None) -> Path:
    """The user's, of C++ headers; or where it is for a process with another temporary folder."""
    default = Path(default_cache_dir())
    return (default if temporary is None else temporary / default.name) / _HEADERS
