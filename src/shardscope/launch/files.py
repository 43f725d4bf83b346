"""Files that the program writes: they go to a scratch folder, and the program reads them there.

Python's functions for files are patched. What C code and other programs write is not redirected but
refused, by Linux (`write_guard.py`).
"""

from __future__ import annotations

import builtins
import functools
import importlib
import io
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import process
from pathlib import Path
from typing import Any, final
from unittest import mock

_symlink = os.symlink
_WRITES = frozenset("wax+")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LOOKS = ("stat", "lstat", "access", "statvfs", "pathconf", "readlink", "listxattr", "getxattr")
_CHANGES = ("utime", "chmod", "chown", "lchown", "truncate", "setxattr", "removexattr")
_NODES = ("mkfifo", "mknod")
_FUNCTION_SETS = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks")
# Modules of the standard library that have imported `open` by another name.
_OPENS = (("tarfile", "bltn_open"), ("bz2", "_builtin_open"))


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
        self._working_folder: str | None = None  # where the program is, if only in scratch
        self._open, self._os_open, self._connect = builtins.open, os.open, sqlite3.connect
        self._stat, self._lstat, self._mkdir = os.stat, os.lstat, os.mkdir
        self._listdir, self._scandir, self._readlink = os.listdir, os.scandir, os.readlink
        self._chdir, self._getcwd = os.chdir, os.getcwd
        os.makedirs(self._files, exist_ok=True)

    @contextmanager
    def redirected(self) -> Iterator[None]:
        """Redirect the writes of this process until the context ends."""
        replaced: dict[str, Callable[..., Any]] = {
            "open": self._open_descriptor,
            "mkdir": self._make_folder,
            "listdir": self._list,
            "scandir": self._scan,
            "chdir": self._change_folder,
            "getcwd": self._current_folder,
            "remove": functools.partial(self._remove, os.remove),
            "unlink": functools.partial(self._remove, os.unlink),
            "rmdir": functools.partial(self._remove, os.rmdir),
            "rename": functools.partial(self._move, os.rename),
            "replace": functools.partial(self._move, os.replace),
            "symlink": self._make_symbolic_link,
            "link": self._make_link,
        }
        for names, redirect in (
            (_LOOKS, self._look), (_CHANGES, self._change), (_NODES, self._make_node),
        ):  # fmt: skip
            for name in names:
                if hasattr(os, name):
                    replaced[name] = functools.partial(redirect, getattr(os, name))
        with ExitStack() as stack:
            for name, function in replaced.items():
                for functions in (getattr(os, set_name) for set_name in _FUNCTION_SETS):
                    if getattr(os, name) in functions:
                        functions.add(function)
                        stack.callback(functions.discard, function)
                stack.enter_context(mock.patch.object(os, name, function))
            for owner in (builtins, io):
                stack.enter_context(mock.patch.object(owner, "open", self._open_file))
            for module, name in _OPENS:
                owner = importlib.import_module(module)
                stack.enter_context(mock.patch.object(owner, name, self._open_file))
            for owner in (sqlite3, sqlite3.dbapi2):
                stack.enter_context(mock.patch.object(owner, "connect", self._connect_database))
            yield

    def _locate(self, path: Any, dir_fd: int | None = None) -> str:
        """The absolute path that the program means, also relative to an open folder."""
        if isinstance(path, int):
            text = self._readlink(f"/proc/self/fd/{path}")
        else:
            text = os.fsdecode(path)
            if dir_fd is not None:
                text = os.path.join(self._readlink(f"/proc/self/fd/{dir_fd}"), text)
        text = os.path.abspath(text)
        return text.removeprefix(self._files) or os.sep

    def _scratch_path(self, text: str) -> str | None:
        """Where an absolute path is redirected to; None if it is not."""
        is_shared_memory = text.startswith("/dev/shm/")
        if f"{text}{os.sep}".startswith(self._unchanged) and not is_shared_memory:
            return None
        return self._files + text

    def _exists(self, path: str) -> bool:
        try:
            self._lstat(path)
        except OSError:
            return False
        return True

    def _read_path(self, text: str) -> str:
        """The path to read: the scratch one if the program has written or removed it."""
        scratch = self._scratch_path(text)
        if scratch is None or not (self._exists(scratch) or self._is_removed(text)):
            return text
        return scratch

    def _is_removed(self, text: str) -> bool:
        return any(text == gone or text.startswith(gone + os.sep) for gone in self._removed)

    def _write_path(self, text: str, *, is_kept: bool) -> str:
        """The path to write; with `is_kept`, the file that is there is copied first."""
        scratch = self._scratch_path(text)
        if scratch is None:
            return text
        self._stat(self._read_path(os.path.dirname(text)))  # raises if the folder does not exist
        self._make_parents(os.path.dirname(scratch))
        if is_kept and not self._exists(scratch) and not self._is_removed(text):
            if self._exists(text) and os.path.isdir(text):
                self._mkdir(scratch)
            elif self._exists(text):
                with self._open(text, "rb") as before, self._open(scratch, "wb") as after:
                    shutil.copyfileobj(before, after)
        self._removed.discard(text)
        return scratch

    def _make_parents(self, folder: str) -> None:
        if not self._exists(folder):
            self._make_parents(os.path.dirname(folder))
            self._mkdir(folder)

    def _open_file(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or kwargs.get("opener") is not None:
            return self._open(file, mode, *args, **kwargs)
        text = self._locate(file)
        if _WRITES & set(mode):
            is_kept = bool({"a", "+"} & set(mode)) and "w" not in mode
            if "x" in mode and self._exists(self._read_path(text)):
                raise FileExistsError(17, "File exists", os.fspath(file))
            target = self._write_path(text, is_kept=is_kept)
        else:
            target = self._read_path(text)
        # The name that the program gave, unless the file is elsewhere.
        return self._open(
            file if target == text and not self._is_away else target, mode, *args, **kwargs
        )

    def _open_descriptor(
        self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        text = self._locate(path, dir_fd)
        if not flags & _WRITE_FLAGS:
            return self._os_open(self._read_path(text), flags, mode)
        if flags & os.O_EXCL and self._exists(self._read_path(text)):
            raise FileExistsError(17, "File exists", os.fspath(path))
        target = self._write_path(text, is_kept=not flags & os.O_TRUNC)
        return self._os_open(target, flags, mode)

    def _connect_database(self, database: Any, *args: Any, **kwargs: Any) -> Any:
        if os.fsdecode(database) not in ("", ":memory:") and not kwargs.get("uri"):
            database = self._write_path(self._locate(database), is_kept=True)
        return self._connect(database, *args, **kwargs)

    @property
    def _is_away(self) -> bool:
        """Whether relative paths are not relative to the process's own folder."""
        return self._working_folder is not None

    def _change_folder(self, path: Any) -> None:
        text = self._locate(path)
        self._chdir(self._read_path(text))
        self._working_folder = None if self._getcwd() == text else text

    def _current_folder(self) -> str:
        return self._working_folder or self._getcwd()

    def _make_folder(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        text = self._locate(path, dir_fd)
        if not self._is_removed(text) and self._exists(self._read_path(text)):
            raise FileExistsError(17, "File exists", os.fspath(path))
        self._mkdir(self._write_path(text, is_kept=False), mode)

    def _look(
        self,
        function: Callable[..., Any],
        path: Any,
        *args: Any,
        dir_fd: int | None = None,
        **kwargs: Any,
    ) -> Any:
        if isinstance(path, int):
            return function(path, *args, **kwargs)
        return function(self._read_path(self._locate(path, dir_fd)), *args, **kwargs)

    def _names(self, text: str) -> list[str] | None:
        """The names in a folder of which the program changed something; None otherwise."""
        scratch = self._scratch_path(text)
        if scratch is None or not (self._exists(scratch) or self._removed):
            return None
        names = dict.fromkeys(self._listdir(scratch) if self._exists(scratch) else ())
        if self._exists(text) and not self._is_removed(text):
            for name in self._listdir(text):
                if not self._is_removed(os.path.join(text, name)):
                    names.setdefault(name)
        return list(names)

    def _list(self, path: Any = ".") -> list[Any]:
        text = self._locate(path)
        names = self._names(text)
        return self._listdir(self._read_path(text)) if names is None else names

    def _scan(self, path: Any = ".") -> Any:
        text = self._locate(path)
        names = self._names(text)
        if names is None and not self._is_away:
            return self._scandir(path)
        found = self._listdir(self._read_path(text)) if names is None else names
        folder = text if isinstance(path, int) else os.fspath(path)
        return _Scan([_Entry(os.path.join(folder, name), name) for name in found])

    def _remove(
        self, function: Callable[..., Any], path: Any, *, dir_fd: int | None = None
    ) -> None:
        text = self._locate(path, dir_fd)
        scratch = self._scratch_path(text)
        if scratch is None:
            function(text)
            return
        if self._is_removed(text) and not self._exists(scratch):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        status = self._lstat(self._read_path(text))
        is_folder = stat.S_ISDIR(status.st_mode)
        if is_folder != (function.__name__ == "rmdir"):
            kind = NotADirectoryError if not is_folder else IsADirectoryError
            raise kind(20 if not is_folder else 21, os.strerror(20 + is_folder), os.fspath(path))
        if is_folder and self._list(text):
            raise OSError(39, "Directory not empty", os.fspath(path))
        if self._exists(scratch):
            function(scratch)
        self._removed.add(text)

    def _move(
        self,
        function: Callable[..., Any],
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        origin, goal = self._locate(src, src_dir_fd), self._locate(dst, dst_dir_fd)
        source = self._read_path(origin)
        self._lstat(source)  # raises if it does not exist
        present = self._read_path(goal)
        if os.path.isdir(goal) and self._exists(present) and not os.path.isdir(source):
            raise IsADirectoryError(21, "Is a directory", os.fspath(dst))
        target = self._write_path(goal, is_kept=False)
        if source == origin and self._scratch_path(origin) is not None:
            # The program's own file stays where it is.
            copy = shutil.copytree if os.path.isdir(source) else shutil.copyfile
            copy(source, target)
        else:
            function(source, target)
        if self._scratch_path(origin) is not None:
            self._removed.add(origin)

    def _make_symbolic_link(
        self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None
    ) -> None:
        goal = self._locate(dst, dir_fd)
        if self._exists(self._read_path(goal)) and not self._is_removed(goal):
            raise FileExistsError(17, "File exists", os.fspath(dst))
        absolute = os.path.normpath(os.path.join(os.path.dirname(goal), os.fsdecode(src)))
        link = self._write_path(goal, is_kept=False)
        is_own = self._read_path(absolute) == absolute  # a file that is not in scratch
        _symlink(absolute if is_own else self._read_path(absolute), link)

    def _make_link(self, src: Any, dst: Any, **_: Any) -> None:
        source, goal = self._read_path(self._locate(src)), self._locate(dst)
        if self._exists(self._read_path(goal)) and not self._is_removed(goal):
            raise FileExistsError(17, "File exists", os.fspath(dst))
        # A link to the program's own file would let it be changed.
        shutil.copyfile(source, self._write_path(goal, is_kept=False))

    def _change(
        self,
        function: Callable[..., Any],
        path: Any,
        *args: Any,
        dir_fd: int | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(path, int):
            function(path, *args, **kwargs)
            return
        text = self._locate(path, dir_fd)
        self._lstat(self._read_path(text))  # raises if it does not exist
        function(self._write_path(text, is_kept=True), *args, **kwargs)

    def _make_node(
        self, function: Callable[..., Any], path: Any, *args: Any, dir_fd: int | None = None
    ) -> None:
        function(self._write_path(self._locate(path, dir_fd), is_kept=False), *args)


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
    tempfile.tempdir = None  # so that Python looks for it again
    process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    os.environ.update(
        TMPDIR=str(temporary),
        TORCHELASTIC_ERROR_FILE=str(temporary / "error.json"),
        HF_DATASETS_CACHE=str(_link_datasets(temporary / "datasets")),
        HF_MODULES_CACHE=str(temporary / "modules"),
        TORCHINDUCTOR_CACHE_DIR=str(temporary / "inductor"),
        TRITON_CACHE_DIR=str(temporary / "triton"),
        TORCH_EXTENSIONS_DIR=str(temporary / "extensions"),
        WANDB_MODE="disabled",
        WANDB_SILENT="true",
        MLFLOW_TRACKING_URI=(temporary / "mlflow").as_uri(),
        COMET_MODE="disabled",
        NEPTUNE_MODE="debug",
        HF_HUB_DISABLE_TELEMETRY="1",
        TOKENIZERS_PARALLELISM="false",
    )


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
