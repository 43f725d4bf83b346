"""A folder where everything ends up that other processes write, torch and compilers included."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import final

from shardscope.errors import OutputError

__all__ = ["Enclosure"]

_ROOMS = {
    "CUDA_CACHE_PATH": "cuda",
    "PYTORCH_KERNEL_CACHE_PATH": "kernels",
    "TEMP": "tmp",
    "TMP": "tmp",
    "TMPDIR": "tmp",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_COMPILE_DEBUG_DIR": "debug",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TORCH_HOME": "torch",
    "TRITON_CACHE_DIR": "triton/cache",
    "TRITON_DUMP_DIR": "triton/dump",
    "TRITON_HOME": "triton",
    "TRITON_OVERRIDE_DIR": "triton/override",
    "XDG_CACHE_HOME": "cache",
}
_WORK = "work"

# Compilers keep nothing elsewhere, start no processes that would stay, and leave no bytecode.
_FIXED = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",  # what was printed before a crash is not lost
    "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "0",
    "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_REMOTE_PGO": "0",
}

# They print, write to places of their own, let torch look for repros while we do, or make errors of
# what torch warns itself of.
_DROPPED = (
    "AOTINDUCTOR_REPRO_*",
    "DUMP_AOTI_MINIFIER",
    "PARTITIONER_MEMORY_BUDGET_PARETO*",
    "PYTHONINSPECT",
    "PYTHONPYCACHEPREFIX",
    "PYTHONWARNINGS",
    "TORCHDYNAMO_DEBUG*",
    "TORCHDYNAMO_REPRO_*",
    "TORCHINDUCTOR_DUMP_*",
    "TORCHINDUCTOR_*LOGGING_FILE",
    "TORCHINDUCTOR_PROFILE*",
    "TORCHINDUCTOR_SAVE_ARGS",
    "TORCHINDUCTOR_WORKER_LOGPATH",
    "TORCH_COMPILE_CPROFILE",
    "TORCH_COMPILE_DEBUG*",
    "TORCH_COMPILE_DYNAMO_PROFILER",
    "TORCH_LOGS*",
    "TORCH_TRACE",
    "TRITON_*DUMP*",
    "TRITON_*OVERRIDE*",
)


@final
class Enclosure:
    """A folder of its own inside `folder`, and the environment that keeps processes in it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        parent = Path(folder).absolute()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="worker-", dir=parent))
        except OSError as error:
            raise OutputError(
                f"cannot make a folder for compilers in {parent}: {error.strerror}. "
                f"Name another output folder."
            ) from error
        for room in {*_ROOMS.values(), _WORK}:
            (self.folder / room).mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Enclosure:
        return self

    def __exit__(self, *_: object) -> None:
        self.tidy()

    @property
    def work(self) -> Path:
        """Where processes are: what they write to a relative path lands here."""
        return self.folder / _WORK

    @property
    def temporary(self) -> Path:
        """Where processes put what they need for a moment."""
        return self.folder / _ROOMS["TMPDIR"]

    @property
    def inductor_cache(self) -> Path:
        """Where inductor keeps what it compiles."""
        return self.folder / _ROOMS["TORCHINDUCTOR_CACHE_DIR"]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The user's environment as it is now, but for what would let something out."""
        kept = {name: value for name, value in os.environ.items() if not _is_dropped(name)}
        rooms = {name: str(self.folder / room) for name, room in _ROOMS.items()}
        return {**kept, **_threads(), **_module_path(), **rooms, **_FIXED, **(extra or {})}

    def tidy(self) -> None:
        """Remove the folder that was made, with all that is in it, and nothing else."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_dropped(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _DROPPED)


def _module_path() -> dict[str, str]:
    """Where Python looks for modules, as a process in another folder has to say it."""
    path = os.environ.get("PYTHONPATH")
    if not path:
        return {}
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))}


def _threads() -> dict[str, str]:
    """Sums depend on how many threads share them, so others use as many as this process."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(torch.get_num_threads()))
