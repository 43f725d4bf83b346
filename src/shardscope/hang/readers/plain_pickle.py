"""Unpickles plain data: dicts, lists, tuples, texts, numbers, flags and None, and nothing else.

A pickle is a program for a small machine, which can import and call anything. This one is checked
before it runs: every opcode must be one that makes plain data, and none may make the machine
allocate much more memory than the file has bytes. What then runs is Python's own unpickler, whose
hook for classes raises.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any, Never, final

from shardscope.errors import RecordingError

MAX_PICKLE_BYTES = 256 * 1024**2
_MAX_CONTAINERS = 1_500_000  # lists, dicts and tuples: each takes a byte here, and 50 to 90 there
_STOP = ord(".")

# Opcodes without an argument, and those with one of a fixed size.
_PLAIN = {ord(opcode): 0 for opcode in "](}e)uats.N0ld"}
_PLAIN |= {0x85: 0, 0x86: 0, 0x87: 0, 0x88: 0, 0x89: 0, 0x94: 0}
_SIZED = {ord("h"): 1, ord("q"): 1, ord("K"): 1, ord("M"): 2, ord("J"): 4, ord("j"): 4}
_SIZED |= {ord("G"): 8, 0x80: 1, 0x95: 8}
_FIXED = _PLAIN | _SIZED
# Opcodes whose argument begins with its length, in so many bytes.
_COUNTED = {ord("X"): 4, 0x8C: 1, 0x8D: 8, ord("U"): 1, ord("T"): 4, 0x8A: 1}
_LONG_BINPUT = ord("r")
_CALLING = {
    ord("c"): "GLOBAL",
    0x93: "STACK_GLOBAL",
    ord("R"): "REDUCE",
    ord("i"): "INST",
    ord("o"): "OBJ",
    0x81: "NEWOBJ",
    0x92: "NEWOBJ_EX",
    ord("b"): "BUILD",
    ord("P"): "PERSID",
    ord("Q"): "BINPERSID",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
}
# The opcodes of a dump of torch in one pass: thousands of them between two texts.
_RUN = re.compile(
    rb"(?s:h.|[\]\(e}u\)\x85\x86\x87tNa\x88\x89s0]+|K.|\x8a\x08.{8}|M..|q."
    rb"|j....|r..\x00\x00|J....|G.{8}|\x94)++"
)


class PickleError(RecordingError):
    """A pickle that holds more than plain data, or is damaged. `end` is where it is still sound."""

    def __init__(self, sentence: str, end: int = 0) -> None:
        super().__init__(sentence)
        self.end = end


@final
class _Unpickler(pickle.Unpickler):
    """Makes no class: the check lets no opcode through that asks for one."""

    def find_class(self, module_name: str, global_name: str) -> Never:
        raise PickleError(f"it asks for the class {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> Never:
        raise PickleError("it asks for an object outside of it")


def unpickle(data: bytes) -> Any:
    """The plain data of a pickle; raises PickleError if it holds anything else, or is damaged.

    Args:
        data: The bytes of the pickle.

    Examples:
        >>> unpickle(pickle.dumps({"entries": []}))
        {'entries': []}
    """
    check_pickle(data)
    try:
        # The unpickler reads ahead only in a buffered file.
        file = io.BufferedReader(io.BytesIO(data), buffer_size=1 << 17)
        return _Unpickler(file, encoding="utf-8", errors="replace").load()
    except PickleError:
        raise
    except MemoryError:
        raise PickleError("it asks for more memory than there is") from None
    except Exception as error:
        raise PickleError(f"it is damaged ({type(error).__name__})") from error


def check_pickle(data: bytes) -> None:
    """Raise PickleError unless each opcode makes plain data of about the size of the file."""
    if len(data) > MAX_PICKLE_BYTES:
        raise PickleError(f"it has more than {MAX_PICKLE_BYTES // 1024**2} MiB")
    if sum(data.count(opcode) for opcode in b"]})\x85\x86\x87\x8f") > _MAX_CONTAINERS:
        raise PickleError("it holds over a million lists, which no dump does")
    position, size = 0, len(data)
    while position < size:
        run = _RUN.match(data, position)
        if run is not None:
            position = run.end()
            continue
        if data[position] == _STOP:
            return
        position = skip_opcode(data, position)
    raise PickleError("it is truncated", size)


def skip_opcode(data: bytes, position: int) -> int:
    """Where the next opcode begins; raises PickleError for one that may not be run."""
    opcode = data[position]
    if opcode in _FIXED:
        end = position + 1 + _FIXED[opcode]
    elif opcode == _LONG_BINPUT:
        end = position + 5
        # The unpickler keeps a table as long as the largest index.
        if int.from_bytes(data[position + 1 : end], "little") > len(data):
            raise PickleError("it asks for a table far longer than the file")
    elif opcode in _COUNTED:
        start = position + 1 + _COUNTED[opcode]
        end = start + int.from_bytes(data[position + 1 : start], "little")
    elif opcode in _CALLING:
        raise PickleError(
            f"it would run code (opcode {_CALLING[opcode]}), and only plain data is read"
        )
    else:
        raise PickleError(f"it has the opcode 0x{opcode:02x}, which no dump has")
    if end > len(data):
        raise PickleError("it is truncated", position)
    return end


def repair_truncated(data: bytes) -> bytes | None:
    """The pickle up to the last complete dict of a list in its outermost dict, closed again.

    None if there is none. A dump is a dict whose last item is the list of entries, each a dict:
    where the file was cut within an entry, the entries before it are kept.
    """
    opened: list[int] = []  # what each open mark follows
    position, keep, last = 0, 0, 0
    try:
        while position < len(data):
            opcode = data[position]
            position = skip_opcode(data, position)
            if opcode == _MARK:
                opened.append(last)
            elif opcode in _CLOSING and opened:
                opened.pop()
                if opcode == _SET_ITEMS and opened == _IN_ENTRIES:
                    keep = position
            last = opcode
    except PickleError:
        pass
    return data[:keep] + b"eu." if keep else None


_MARK, _SET_ITEMS = ord("("), ord("u")
_CLOSING = tuple(b"uetld")
_IN_ENTRIES = [ord("}"), ord("]")]  # the marks open between two entries
