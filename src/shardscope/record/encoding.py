"""Encodes records as JSON with any text escaped safely; stores equal values once in memory."""

from __future__ import annotations

import re
from typing import Any, final

import msgspec
from msgspec.structs import force_setattr

from shardscope.record.recording import Collective
from shardscope.record.sanitize import is_unsafe

_ENCODER = msgspec.json.Encoder()
_NOT_PRINTABLE = re.compile("[^ -~]")
# An escape in JSON; those of controls have a letter, the others stand for what follows.
_ESCAPE = re.compile(rb"\\(?:u[0-9a-f]{4}|.)")
_PRINTABLE_ESCAPES = (b'\\"', b"\\\\", b"\\/")


def encode_json(value: Any) -> bytes:
    """A value as JSON on one line, with everything escaped that a terminal or CI runner obeys."""
    try:
        data = _ENCODER.encode(value)
    except UnicodeEncodeError:
        data = _ENCODER.encode(_replace_all_surrogates(msgspec.to_builtins(value)))
    if b"##" in data:  # `##[error]` is a command of GitHub's runner, also within a line
        data = data.replace(b"##", b"#\\u0023")
    if data.isascii() and b"\x7f" not in data:
        return data
    return _NOT_PRINTABLE.sub(_escape_in_json, data.decode()).encode()


def encode_shown_json(value: Any) -> bytes:
    """The same for a program that displays the strings: control characters appear as escapes."""
    return _ESCAPE.sub(_escape_twice, encode_json(value))


def replace_surrogates(text: str) -> str:
    r"""Replace lone surrogates (as in file names that are not UTF-8), which JSON cannot contain.

    Args:
        text: The text.

    Examples:
        >>> replace_surrogates("caf\udce9")
    """
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _escape_in_json(match: re.Match[str]) -> str:
    char = match[0]
    if not is_unsafe(char):
        return char
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[start : start + 2].hex()}" for start in range(0, len(units), 2))


def _escape_twice(match: re.Match[bytes]) -> bytes:
    is_printable = match[0] in _PRINTABLE_ESCAPES or match[0] == b"\\u0023"
    return match[0] if is_printable else b"\\" + match[0]


def _replace_all_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {key: _replace_all_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_all_surrogates(item) for item in value]
    return value


# The fields whose values repeat; sizes and positions are numbers, enum members are shared already.
_FIELDS = (
    "group",
    "op",
    "axis",
    "dtype",
    "owner",
    "trigger",
    "cause",
    "source",
    "reduce_op",
    "thread",
)


@final
class SharedValues:
    """Stores equal values once: a million collectives then need a third of the memory."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def share(self, call: Collective) -> None:
        """Replace a new collective's values by equal ones that earlier collectives hold."""
        remember = self._known.setdefault
        for field in _FIELDS:
            value = getattr(call, field)
            # The only place where frozen records are changed, and only to equal values.
            force_setattr(call, field, remember(value, value))
