"""Objects that simulated ranks send each other by way of a folder.

Most of what a rank receives is assumed to be what it holds itself. Pipeline stages, though, tell
each other the shapes of their results, which differ. Ranks that run as processes of one machine can
exchange such objects.
"""

from __future__ import annotations

import io
import os
import pickle
import time
from collections import Counter
from pathlib import Path
from typing import Any, final

import torch

from shardscope._torch.fake import is_fake

_POLL_SECONDS = 0.02
NEEDED = "needed-"
"""Prefix of the file by which a rank asks for another one to be started."""


def dump_objects(value: object) -> bytes:
    """Pickle an object; tensors without data become tensors on meta."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


@final
class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or not is_fake(obj):
            return NotImplemented
        layout = (tuple(obj.shape), obj.stride(), obj.dtype, obj.requires_grad)
        return _make_on_meta, layout


def _make_on_meta(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> torch.Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return tensor.requires_grad_(requires_grad)


@final
class Mailbox:
    """Sends objects to other ranks, and receives theirs, in the order in which they were sent.

    Several processes may run as the same rank; they send the same, and each receives everything.
    """

    def __init__(self, folder: str | Path, rank: int) -> None:
        self._folder = Path(folder)
        self._rank = rank
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()

    def send(self, destination: int, objects: list[Any]) -> None:
        """Send to a rank."""
        path = self._path(self._rank, destination, self._num_sent[destination])
        self._num_sent[destination] += 1
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(dump_objects(objects))
        os.replace(temporary, path)

    def receive(self, source: int) -> list[Any]:
        """Wait for what a rank has sent next; the rank is started if it does not run."""
        path = self._path(source, self._rank, self._num_received[source])
        self._num_received[source] += 1
        while not path.exists():
            (self._folder / f"{NEEDED}{source}").touch()
            time.sleep(_POLL_SECONDS)
        objects: list[Any] = pickle.loads(path.read_bytes())
        return objects

    def _path(self, source: int, destination: int, number: int) -> Path:
        return self._folder / f"{source}-{destination}-{number}.pickle"
