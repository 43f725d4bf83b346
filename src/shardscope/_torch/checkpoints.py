"""Checkpoints of tensors without data, which are not written."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict_saver

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
def skipped_checkpoints(on_skip: OnSkip) -> Iterator[None]:
    """Write an empty file, or nothing, where the program saves tensors, until the context ends."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "save", _skip_file(torch.save, on_skip)))
        for module in (checkpoint, state_dict_saver):
            for name in ("save", "save_state_dict", "async_save"):
                function = getattr(module, name, None)
                if function is not None:
                    skip = _skip_folder(function, f"checkpoint.{name}()", on_skip)
                    stack.enter_context(patch.object(module, name, skip))
        _skip_safetensors(stack, on_skip)
        yield


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


def _skip_file(save: Callable[..., Any], on_skip: OnSkip) -> Callable[..., None]:
    @functools.wraps(save)
    def skip(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        try:
            if isinstance(f, str | os.PathLike):  # torch would write it without Python's open()
                with open(f, "wb") as file:
                    save(obj, file, *args, **kwargs)
            else:
                save(obj, f, *args, **kwargs)
        except _UNSAVED:
            on_skip("torch.save()")
            _write_empty(f)

    return skip


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
