"""Messages between processes over pipes: a kind, and any number of pieces of bytes."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, final

__all__ = ["Incoming", "Kind", "Message", "frame", "read_message"]

_HEAD = struct.Struct("<BI")
_SIZE = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 20


class Kind(IntEnum):
    """What a message is."""

    READY = 0
    CALL = 1
    PHASE = 2
    PROGRESS = 3
    VALUE = 4
    ERROR = 5


@final
class Message:
    """A kind and its pieces."""

    __slots__ = ("kind", "pieces")

    def __init__(self, kind: Kind, pieces: Sequence[Any] = ()) -> None:
        self.kind = kind
        self.pieces = pieces


def frame(message: Message) -> list[memoryview]:
    """The bytes of a message in the order in which they are sent; big pieces are not copied."""
    views = [memoryview(piece).cast("B") for piece in message.pieces]
    sizes = b"".join(_SIZE.pack(view.nbytes) for view in views)
    head = _HEAD.pack(message.kind, len(views)) + sizes
    return [memoryview(head), *(view for view in views if view.nbytes)]


@final
class Incoming:
    """Puts a message together from what a pipe gives, whenever it gives something."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._begin()

    def read(self) -> Message | None:
        """Read once; a message when its last byte is there. Raises EOFError at the end."""
        if self._missing:
            got = os.readv(self.fd, [self._view[self._done : self._done + _CHUNK_BYTES]])
            if got == 0:
                raise EOFError
            self._done += got
        return self._advance()

    @property
    def _missing(self) -> int:
        return len(self._view) - self._done

    def _begin(self) -> None:
        self._kind: Kind | None = None
        self._sizes: list[int] | None = None
        self._pieces: list[bytearray] = []
        self._expect(_HEAD.size)

    def _expect(self, size: int) -> None:
        self._buffer = bytearray(size)
        self._view = memoryview(self._buffer)
        self._done = 0

    def _advance(self) -> Message | None:
        """Go on to the next part of the message as long as parts are complete."""
        while not self._missing:
            if self._kind is None:
                kind, self._num_pieces = _HEAD.unpack(self._buffer)
                self._kind = Kind(kind)
                self._expect(_SIZE.size * self._num_pieces)
            elif self._sizes is None:
                self._sizes = [size for (size,) in _SIZE.iter_unpack(self._buffer)]
                self._expect(self._sizes[0] if self._sizes else 0)
            else:
                if len(self._pieces) < len(self._sizes):
                    self._pieces.append(self._buffer)
                if len(self._pieces) == len(self._sizes):
                    message = Message(self._kind, self._pieces)
                    self._begin()
                    return message
                self._expect(self._sizes[len(self._pieces)])
        return None


def read_message(incoming: Incoming) -> Message | None:
    """Wait for a whole message; None at the end."""
    while True:
        try:
            message = incoming.read()
        except EOFError:
            return None
        if message is not None:
            return message
