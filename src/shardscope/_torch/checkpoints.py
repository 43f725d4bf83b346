"""Checkpoints of launched programs: of tensors without data none is written; others are read."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict_saver

from shardscope._torch.dispatch import disable_dispatch_modes
from shardscope._torch.fake import FakeTensor
from shardscope._torch.tree import pytree_map
from shardscope.errors import ShardscopeError

# What saving tensors without data may raise.
_UNSAVED = (
    AttributeError,
    NotImplementedError,
    RuntimeError,
    ShardscopeError,
    TypeError,
    pickle.PicklingError,
)
OnSkip = Callable[[str], None]
"""Called with the name of the function whose checkpoint is not written."""


@contextmanager
def skipped_checkpoints(on_skip: OnSkip, *, skips_data: bool) -> Iterator[None]:
    """Write a short mark, or nothing, where the program saves tensors, until the context ends.

    With `skips_data`, `torch.save` writes no data either; otherwise it writes what has data.
    """
    with ExitStack() as stack:
        save = _skip_file(torch.save, on_skip, skips_data=skips_data)
        stack.enter_context(patch.object(torch, "save", save))
        for module in (checkpoint, state_dict_saver):
            for name in ("save", "save_state_dict", "async_save"):
                function = getattr(module, name, None)
                if function is not None:
                    skip = _skip_folder(function, f"checkpoint.{name}()", on_skip)
                    stack.enter_context(patch.object(module, name, skip))
        _skip_safetensors(stack, on_skip)
        yield


@contextmanager
def loaded_with_data() -> Iterator[None]:
    """Let `torch.load` read data on the host, where torch would make tensors on meta.

    Tensors that it would put on a GPU are moved there, and have no data. If it reads a checkpoint
    that this process has skipped, it returns what was to be saved, with tensors of the same shapes.
    """
    read = torch.load

    @functools.wraps(read)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        skipped = _read_mark(f)
        if skipped is not None:
            return pytree_map(functools.partial(_restore, map_location), skipped.content)
        devices: dict[int, torch.device] = {}  # of what belongs on a GPU, by the storage

        def place(storage: Any, location: str) -> Any:
            target = _find_location(map_location, storage, location)
            if isinstance(target, torch.device) and target.type != "cpu":
                devices[storage._cdata] = target
                return storage
            return storage if isinstance(target, torch.device) else target

        with disable_dispatch_modes():
            loaded = read(f, place, *args, **kwargs)

        def move(value: Any) -> Any:
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                return value
            device = devices.get(value.untyped_storage()._cdata)
            return value if device is None else value.to(device)

        return pytree_map(move, loaded) if devices else loaded

    with patch.object(torch, "load", load):
        yield


def _find_location(map_location: Any, storage: Any, location: str) -> Any:
    """The device of a storage by torch.load's `map_location`, or the storage that it returned."""
    if callable(map_location) and not isinstance(map_location, torch.device):
        with patch.object(torch.UntypedStorage, "cuda", _name_device):
            result = map_location(storage, location)
        return torch.device(location) if result is None else result
    if isinstance(map_location, dict):
        location = map_location.get(location, location)
    elif map_location is not None:
        location = map_location
    return torch.device(location)


def _name_device(storage: Any, device: Any = None, *_: Any, **__: Any) -> torch.device:
    """The device to which `storage.cuda(device)` would copy."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if device is None
        else torch.device(device)
    )


@contextmanager
def redirected_checkpoints(on_skip: OnSkip) -> Iterator[None]:
    """Open the files that `torch.save` writes in Python, where they may be redirected.

    What other C code writes, that of safetensors, is skipped.
    """
    save = torch.save

    @functools.wraps(save)
    def save_by_python(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):
            with open(f, "wb") as file:
                save(obj, file, *args, **kwargs)
        else:
            save(obj, f, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "save", save_by_python))
        _skip_safetensors(stack, on_skip)
        yield


def _skip_safetensors(stack: ExitStack, on_skip: OnSkip) -> None:
    if importlib.util.find_spec("safetensors") is not None:
        module = importlib.import_module("safetensors.torch")  # not a dependency of ours
        for name in ("save_file", "save_model"):
            skip = _skip_second(getattr(module, name), f"safetensors.torch.{name}()", on_skip)
            stack.enter_context(patch.object(module, name, skip))


def _skip_file(
    save: Callable[..., Any], on_skip: OnSkip, *, skips_data: bool
) -> Callable[..., None]:
    @functools.wraps(save)
    def skip(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        start = f.tell() if hasattr(f, "tell") else 0
        try:
            if skips_data and isinstance(f, str | os.PathLike):
                _write_mark(f, obj)
            elif isinstance(f, str | os.PathLike):  # torch would write it without Python's open()
                with open(f, "wb") as file:
                    save(obj, file, *args, **kwargs)
            else:
                save(obj, f, *args, **kwargs)
        except _UNSAVED:
            on_skip("torch.save()")
            _write_mark(f, obj, start)

    return skip


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """What a skipped checkpoint knows of a tensor without data."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _SkippedCheckpoint:
    """The object that `torch.save` got, with shapes in place of tensors without data."""

    content: Any


_MARK = b"shardscope: a checkpoint of tensors without data, number "
_MARK_BYTES = len(_MARK) + 8
_skipped: list[_SkippedCheckpoint] = []


def _write_mark(file: Any, obj: Any, start: int = 0) -> None:
    """Write where the content of a skipped checkpoint is found in this process.

    An open file is overwritten from the position `start` on.
    """
    _skipped.append(_SkippedCheckpoint(pytree_map(_describe, obj)))
    mark = _MARK + f"{len(_skipped) - 1:8d}".encode()
    if isinstance(file, str | os.PathLike):
        with open(file, "wb") as opened:
            opened.write(mark)
    else:
        file.seek(start)
        file.truncate()
        file.write(mark)


def _read_mark(file: Any) -> _SkippedCheckpoint | None:
    """The skipped checkpoint that `file` stands for; None for any other file."""
    if isinstance(file, str | os.PathLike):
        with open(file, "rb") as opened:
            start = opened.read(_MARK_BYTES)
    else:
        position = file.tell()
        start = file.read(_MARK_BYTES)
        file.seek(position)
    number = start.removeprefix(_MARK)
    return _skipped[int(number)] if number != start and int(number) < len(_skipped) else None


def _describe(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return _SavedTensor(value.shape, value.stride(), value.dtype, value.device)
    return value.detach() if isinstance(value, torch.Tensor) else value


def _restore(map_location: Any, value: Any) -> Any:
    if not isinstance(value, _SavedTensor):
        return value
    place = _find_location(map_location, torch.UntypedStorage(0), str(value.device))
    device = place if isinstance(place, torch.device) else torch.device("cpu")
    tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
    return tensor.zero_()


def _skip_second(save: Callable[..., Any], name: str, on_skip: OnSkip) -> Callable[..., None]:
    @functools.wraps(save)
    def skip(tensors: Any, filename: Any, *_: Any, **__: Any) -> None:
        on_skip(name)
        _write_empty(filename)

    return skip


def _write_empty(file: Any) -> None:
    """An empty file at a path; programs look whether it is there, or move it."""
    if isinstance(file, str | os.PathLike):
        with open(file, "wb"):
            pass


def _skip_folder(save: Callable[..., Any], name: str, on_skip: OnSkip) -> Callable[..., Any]:
    @functools.wraps(save)
    def skip(*_: Any, **__: Any) -> Any:
        on_skip(name)
        if "async" not in name:
            return None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    return skip
