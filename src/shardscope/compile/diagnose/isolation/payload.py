"""Objects as bytes for another process: functions by value where it could not import them.

Tensors travel as their storages, each once: those that share memory here share it there. Graphs of
fragments travel as plain data (see `graph_form`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, final

import cloudpickle
import torch

from shardscope._torch.custom_ops import describe_custom_op, is_custom_op, register_custom_op
from shardscope._torch.dispatch import without_modes
from shardscope._torch.operators import is_operator
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.isolation.fragment_form import build_fragment, describe_fragment
from shardscope.compile.diagnose.isolation.importable import ByValue, is_importable
from shardscope.compile.diagnose.isolation.memory import Memories, Memory, allocate
from shardscope.compile.diagnose.isolation.named_globals import reduce_code
from shardscope.compile.diagnose.isolation.operators import (
    build_operator,
    describe_operator,
    find_function,
    name_function,
)

__all__ = ["Payload", "decode_fragment", "encode_fragment", "pack", "unpack"]


@final
@dataclass(frozen=True)
class Payload:
    """The pickled object, and after it the memory of its tensors as it is, not copied."""

    pieces: Sequence[Any]
    memories: Memories  # whose memory it is must live until it is sent

    def copy(self) -> Payload:
        """One that does not change when the tensors do."""
        return Payload([bytes(piece) for piece in self.pieces], Memories())


def pack(value: object) -> Payload:
    """Make a value ready to be sent."""
    file, pieces = io.BytesIO(), list[pickle.PickleBuffer]()
    with ByValue(is_importable) as by_value:
        pickler = _Pickler(file, pieces, by_value)
        pickler.dump(value)
    # Not getbuffer(): Python 3.12.1 crashes when a BytesIO with a view of it is garbage in a cycle.
    return Payload([file.getvalue(), *pieces], pickler.memories)


def unpack(pieces: Sequence[Any]) -> Any:
    """The value that was packed; its tensors are plain, whatever the caller is in the middle of."""
    with without_modes(), torch.inference_mode(False):
        return pickle.loads(pieces[0], buffers=pieces[1:])


def encode_fragment(fragment: Fragment) -> bytes:
    """A fragment in one piece, for files and for those who keep it."""
    return pickle.dumps(pack(fragment).copy().pieces, protocol=5)


def decode_fragment(data: bytes) -> Fragment:
    """The fragment that was encoded."""
    fragment = unpack(pickle.loads(data))
    assert isinstance(fragment, Fragment)
    return fragment


@final
class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no annotations
    """cloudpickle, which knows tensors, operators and fragments too."""

    def __init__(
        self, file: io.BytesIO, pieces: list[pickle.PickleBuffer], by_value: ByValue
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=pieces.append)
        self.memories = Memories()
        self._by_value = by_value

    def reducer_override(self, value: Any) -> Any:
        """How to make `value` again; `NotImplemented` leaves it to others."""
        if isinstance(value, torch.Tensor):
            return self.memories.reduce(value)
        if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
            return value.__reduce__()  # as buffers, arrays would arrive as ones that cannot change
        if isinstance(value, Memory):
            return allocate, (value.device, value.buffer())
        if isinstance(value, Fragment):
            self.memories.strip(value.inputs)
            return build_fragment, (describe_fragment(value),)
        if is_operator(value):
            return build_operator, (describe_operator(value),)
        if is_custom_op(value):
            return register_custom_op, (describe_custom_op(value),)
        return self._reduce_code(value)

    def _reduce_code(self, value: Any) -> Any:
        if isinstance(value, FunctionType) and (place := name_function(value)):
            return find_function, place
        if (reduced := reduce_code(self, value, self._by_value)) is not None:
            return reduced
        return super().reducer_override(value)
