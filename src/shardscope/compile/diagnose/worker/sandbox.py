"""The folder that all output goes to, including the files of torch and compilers."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import final

from shardscope.errors import OutputError

_SUBFOLDERS = {
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

# Compilers use no remote caches, start no lasting processes, and write no bytecode.
_FIXED = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",  # output before a crash is not lost
    "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "0",
    "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_REMOTE_PGO": "0",
}

# They print, write to other folders, start torch's own minifier, or turn torch's warnings into
# errors.
_REMOVED = (
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
class Sandbox:
    """A temporary folder inside `folder`, and an environment that keeps processes' files in it."""

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
        for subfolder in {*_SUBFOLDERS.values(), _WORK}:
            (self.folder / subfolder).mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.clean_up()

    @property
    def work(self) -> Path:
        """The working directory of processes: relative paths lead here."""
        return self.folder / _WORK

    @property
    def temporary(self) -> Path:
        """The folder for temporary files of processes."""
        return self.folder / _SUBFOLDERS["TMPDIR"]

    @property
    def inductor_cache(self) -> Path:
        """Inductor's cache folder."""
        return self.folder / _SUBFOLDERS["TORCHINDUCTOR_CACHE_DIR"]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The user's current environment, without variables that lead to files outside the
        sandbox.
        """
        inherited = {name: value for name, value in os.environ.items() if not _is_removed(name)}
        folders = {name: str(self.folder / subfolder) for name, subfolder in _SUBFOLDERS.items()}
        return {**inherited, **_threads(), **_module_path(), **folders, **_FIXED, **(extra or {})}

    def clean_up(self) -> None:
        """Remove the folder that was created, and nothing else."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_removed(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _REMOVED)


def _module_path() -> dict[str, str]:
    """PYTHONPATH with absolute paths, because processes run in another folder."""
    path = os.environ.get("PYTHONPATH")
    if not path:
        return {}
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))}


def _threads() -> dict[str, str]:
    """Sums depend on the number of threads, so processes use as many as this one."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(torch.get_num_threads()))


SCRIPT_NAME = "repro.py"
SAVED_NAME = "repro_inputs.pt"
"""The file beside the script with what is too big to be written into it."""
# Of each script: a file with another first line was written by the user.
FIRST_LINE = "# A bug that torch.compile shows, in a script that needs torch and nothing else."

_DEFAULT = "shardscope-diagnosis"
_SCRATCH = "scratch"


@final
class OutputFolder:
    """The output folder. Only files that a diagnosis wrote are ever removed."""

    def __init__(self, path: Path | None) -> None:
        self.path = path or Path(_DEFAULT)
        self._is_created_here = path is None or not path.exists()
        if path is not None:
            _check_free(path)
        try:
            if path is None:
                self.path = _make_first_free(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            self.scratch = _make_first_free(self.path / _SCRATCH)
            self.sandbox = Sandbox(self.scratch)
        except OSError as error:
            raise OutputError(
                f"The folder {self.path} for the repro cannot be written to "
                f"({error.strerror or error}). Name another one."
            ) from error

    def clean_up(self) -> None:
        """Remove the files of the search, and the folder if it is empty and was created here."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self._is_created_here:
            with suppress(OSError):  # it is not empty
                self.path.rmdir()


def _check_free(path: Path) -> None:
    """Refuse a folder in which the script would overwrite a file that is not a repro script."""
    name = next(
        (file_name for file_name in (SCRIPT_NAME, SAVED_NAME) if (path / file_name).exists()), None
    )
    if name is None or _is_repro_script(path / SCRIPT_NAME):
        return
    raise OutputError(
        f"The folder {path} has a {name} that was not written by a diagnosis and that the "
        "repro would overwrite. Choose another folder."
    )


def _is_repro_script(script: Path) -> bool:
    try:
        with script.open(encoding="utf-8", errors="replace") as file:
            return file.readline().rstrip() == FIRST_LINE
    except OSError:  # it does not exist, or cannot be read
        return False


def _make_first_free(path: Path) -> Path:
    """Create this folder, or one with the first free number as suffix."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    for candidate in itertools.chain([path], numbered):
        with suppress(FileExistsError):  # it exists, perhaps created just now
            candidate.mkdir()
            return candidate
    raise AssertionError("numbers do not end")


_MAX_ISA_CHECK_BYTES = 1024  # kernels are longer
_ISA_CHECK = b"_chk_kernel"
_MAX_HEADERS = 3  # of 150 MB each; only Inductor knows which one fits
_SETTLED_S = 30.0  # seconds without a change after which a file counts as complete


def seed_inductor_cache(sandbox: Sandbox) -> None:
    """Copy Inductor's checks of the CPU and precompiled headers from the user's cache.

    Files are named by hashes of their sources, so files that do not fit are not used.
    """
    # Imports Inductor, which takes seconds: workers start before.
    from shardscope._torch.inductor import cache_folder, header_folder

    with suppress(OSError):  # it is only slower without them
        for file in _find_isa_checks(cache_folder()):
            _copy(file, sandbox.inductor_cache / file.parent.name)
        for header in _find_headers(header_folder()):
            _copy(header, header_folder(temporary=sandbox.temporary))


def _find_isa_checks(folder: Path) -> Iterator[Path]:
    for source in folder.glob("??/*.cpp"):
        library = source.with_suffix(".so")
        is_small = source.stat().st_size <= _MAX_ISA_CHECK_BYTES
        if is_small and library.exists() and _ISA_CHECK in source.read_bytes():
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
