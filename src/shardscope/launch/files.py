"""Files that the program writes: they go to a scratch folder, and the program reads them there.

Python's functions for files are patched, so that what C code or other programs write is not caught.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, final
from unittest import mock

_WRITES = frozenset("wax+")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@final
class ScratchFiles:
    """Redirects writes to `folder`, where a file has its absolute path as its name.

    Paths in `folder` itself and in `unchanged` are not redirected.
    """

    def __init__(self, folder: str, *, unchanged: str) -> None:
        self._root = os.path.realpath(folder)
        self._unchanged = (
            self._root + os.sep, os.path.realpath(unchanged) + os.sep, "/dev/", "/proc/", "/sys/",
        )  # fmt: skip
        self._files = os.path.join(self._root, "files")
        self._removed: set[str] = set()
        self._open, self._os_open = builtins.open, os.open
        self._stat, self._lstat, self._mkdir = os.stat, os.lstat, os.mkdir
        self._listdir, self._scandir = os.listdir, os.scandir
        os.makedirs(self._files, exist_ok=True)

    @contextmanager
    def redirected(self) -> Iterator[None]:
        """Redirect the writes of this process until the context ends."""
        replaced = {
            "open": self._open_descriptor,
            "mkdir": self._make_folder,
            "stat": functools.partial(self._look, os.stat),
            "lstat": functools.partial(self._look, os.lstat),
            "access": functools.partial(self._look, os.access),
            "statvfs": functools.partial(self._look, os.statvfs),
            "listdir": self._list,
            "scandir": self._scan,
            "remove": functools.partial(self._remove, os.remove),
            "unlink": functools.partial(self._remove, os.unlink),
            "rmdir": functools.partial(self._remove, os.rmdir),
            "rename": functools.partial(self._move, os.rename),
            "replace": functools.partial(self._move, os.replace),
            "symlink": functools.partial(self._link, os.symlink),
            "link": functools.partial(self._link, os.link),
            "utime": functools.partial(self._change, os.utime),
            "chmod": functools.partial(self._change, os.chmod),
            "truncate": functools.partial(self._change, os.truncate),
        }
        with ExitStack() as stack:
            for name, function in replaced.items():
                stack.enter_context(mock.patch.object(os, name, function))
            stack.enter_context(mock.patch.object(builtins, "open", self._open_file))
            stack.enter_context(mock.patch.object(io, "open", self._open_file))
            yield

    def _scratch_path(self, path: Any) -> str | None:
        """Where a path is redirected to; None for descriptors and paths that are not."""
        if isinstance(path, int):
            return None
        text = os.path.abspath(os.fsdecode(path))
        if f"{text}{os.sep}".startswith(self._unchanged):
            return None
        return self._files + text

    def _exists(self, path: str) -> bool:
        try:
            self._lstat(path)
        except OSError:
            return False
        return True

    def _read_path(self, path: Any) -> Any:
        """The path to read: the scratch one if the program has written or removed it."""
        scratch = self._scratch_path(path)
        if scratch is None or not (self._exists(scratch) or self._is_removed(path)):
            return path
        return scratch

    def _is_removed(self, path: Any) -> bool:
        text = os.path.abspath(os.fsdecode(path))
        return any(text == gone or text.startswith(gone + os.sep) for gone in self._removed)

    def _write_path(self, path: Any, *, is_kept: bool) -> Any:
        """The path to write; with `is_kept`, the file that is there is copied first."""
        scratch = self._scratch_path(path)
        if scratch is None:
            return path
        parent = os.path.dirname(os.path.abspath(os.fsdecode(path)))
        self._stat(self._read_path(parent))  # raises if the folder does not exist
        self._make_parents(os.path.dirname(scratch))
        if is_kept and not self._exists(scratch) and not self._is_removed(path):
            source = os.path.abspath(os.fsdecode(path))
            if self._exists(source) and not os.path.isdir(source):
                with self._open(source, "rb") as before, self._open(scratch, "wb") as after:
                    shutil.copyfileobj(before, after)
        self._removed.discard(os.path.abspath(os.fsdecode(path)))
        return scratch

    def _make_parents(self, folder: str) -> None:
        if not self._exists(folder):
            self._make_parents(os.path.dirname(folder))
            self._mkdir(folder)

    def _open_file(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or kwargs.get("opener") is not None:
            return self._open(file, mode, *args, **kwargs)
        if _WRITES & set(mode):
            return self._open(
                self._write_path(file, is_kept=bool({"a", "+"} & set(mode)) and "w" not in mode),
                mode, *args, **kwargs,
            )  # fmt: skip
        return self._open(self._read_path(file), mode, *args, **kwargs)

    def _open_descriptor(
        self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        if dir_fd is not None:
            return self._os_open(path, flags, mode, dir_fd=dir_fd)
        if flags & _WRITE_FLAGS:
            target = self._write_path(path, is_kept=not flags & os.O_TRUNC)
        else:
            target = self._read_path(path)
        return self._os_open(target, flags, mode)

    def _make_folder(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:
            return self._mkdir(path, mode, dir_fd=dir_fd)
        if not self._is_removed(path) and self._exists(self._read_path(path)):
            raise FileExistsError(17, "File exists", os.fspath(path))
        return self._mkdir(self._write_path(path, is_kept=False), mode)

    def _look(self, function: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        is_relative = kwargs.get("dir_fd") is not None
        return function(path if is_relative else self._read_path(path), *args, **kwargs)

    def _names(self, path: Any) -> list[Any] | None:
        """The names in a folder of which the program changed something; None otherwise."""
        scratch = self._scratch_path(path)
        text = None if scratch is None else os.path.abspath(os.fsdecode(path))
        if scratch is None or text is None or not (self._exists(scratch) or self._removed):
            return None
        names = dict.fromkeys(self._listdir(scratch) if self._exists(scratch) else ())
        if self._exists(text) and not self._is_removed(text):
            for name in self._listdir(text):
                if not self._is_removed(os.path.join(text, name)):
                    names.setdefault(name)
        return list(names)

    def _list(self, path: Any = ".") -> list[Any]:
        names = self._names(path)
        return self._listdir(path) if names is None else names

    def _scan(self, path: Any = ".") -> Any:
        names = self._names(path)
        if names is None:
            return self._scandir(path)
        return _Scan([_Entry(os.path.join(os.fspath(path), name), name) for name in names])

    def _remove(self, function: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        scratch = self._scratch_path(path)
        if scratch is None or kwargs.get("dir_fd") is not None:
            function(path, *args, **kwargs)
            return
        is_written = self._exists(scratch)
        if is_written:
            function(scratch)
        elif self._is_removed(path):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        else:
            self._lstat(path)
        self._removed.add(os.path.abspath(os.fsdecode(path)))

    def _move(self, function: Callable[..., Any], src: Any, dst: Any, **kwargs: Any) -> None:
        target = self._scratch_path(dst)
        if target is None:
            function(self._read_path(src), dst, **kwargs)
            return
        source = self._read_path(src)
        if self._exists(target) and os.path.isdir(target) and not os.path.isdir(source):
            raise IsADirectoryError(21, "Is a directory", os.fspath(dst))
        target = self._write_path(dst, is_kept=False)
        if source == src:  # the program's own file stays where it is
            shutil.copyfile(source, target) if os.path.isfile(source) else shutil.copytree(
                source, target
            )
        else:
            function(source, target)
        self._removed.add(os.path.abspath(os.fsdecode(src)))

    def _link(
        self, function: Callable[..., Any], src: Any, dst: Any, *args: Any, **kwargs: Any
    ) -> None:
        function(src, self._write_path(dst, is_kept=False), *args, **kwargs)

    def _change(self, function: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        function(self._write_path(path, is_kept=True), *args, **kwargs)


@final
class _Entry:
    """What `os.scandir` yields, for a path that may be redirected."""

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path)

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path) if follow_symlinks else os.lstat(self.path)

    def inode(self) -> int:
        return self.stat().st_ino


@final
class _Scan:
    """An iterator of entries that is also a context, as that of `os.scandir`."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._entries = iter(())


def set_scratch_environment(folder: str) -> None:
    """Point temporary files and caches of compilers to the scratch folder; silence trackers."""
    temporary = Path(folder, "tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    os.environ.update(
        TMPDIR=str(temporary),
        HF_DATASETS_CACHE=str(_link_datasets(temporary / "datasets")),
        HF_MODULES_CACHE=str(temporary / "modules"),
        TORCHINDUCTOR_CACHE_DIR=str(temporary / "inductor"),
        TORCH_EXTENSIONS_DIR=str(temporary / "extensions"),
        TRITON_CACHE_DIR=str(temporary / "triton"),
        WANDB_MODE="disabled",
        WANDB_SILENT="true",
        MLFLOW_TRACKING_URI=(temporary / "mlflow").as_uri(),
        COMET_MODE="disabled",
        NEPTUNE_MODE="debug",
        HF_HUB_DISABLE_TELEMETRY="1",
        TOKENIZERS_PARALLELISM="false",
    )
    tempfile.tempdir = None  # it may have been read from the environment before


def _link_datasets(folder: Path) -> Path:
    """A copy of the cache of Hugging Face's datasets whose files are links.

    The datasets are read by C code, which does not follow redirected paths.
    """
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(home, "datasets"))
    for parent, _, names in os.walk(cache):
        copy = folder / Path(parent).relative_to(cache)
        copy.mkdir(parents=True, exist_ok=True)
        for name in names:
            link = copy / name
            if not link.exists() and not name.endswith(".lock"):
                link.symlink_to(Path(parent, name).resolve())
    folder.mkdir(parents=True, exist_ok=True)
    return folder
