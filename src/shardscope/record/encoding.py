"""Records as JSON, whatever text they hold."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from shardscope.record.inert import is_unsafe

__all__ = ["encode_json", "encode_shown_json", "replace_surrogates"]

_ENCODER = msgspec.json.Encoder()
_NOT_PLAIN = re.compile("[^ -~]")
# An escape in JSON; those of controls have a letter, the others stand for what follows.
_ESCAPE = re.compile(rb"\\(?:u[0-9a-f]{4}|.)")
_HARMLESS = (b'\\"', b"\\\\", b"\\/")


def encode_json(value: Any) -> bytes:
    """A value as JSON on one line, in which nothing acts on a terminal or on a CI runner."""
    try:
        data = _ENCODER.encode(value)
    except UnicodeEncodeError:
        data = _ENCODER.encode(_make_plain(msgspec.to_builtins(value)))
    if b"##" in data:  # `##[error]` is a command of GitHub's runner, also within a line
        data = data.replace(b"##", b"#\\u0023")
    if data.isascii() and b"\x7f" not in data:
        return data
    return _NOT_PLAIN.sub(_escape_in_json, data.decode()).encode()


def encode_shown_json(value: Any) -> bytes:
    """The same for a program that shows its texts, in which controls are seen as escapes."""
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


def _escape_in_json(found: re.Match[str]) -> str:
    char = found[0]
    if not is_unsafe(char):
        return char
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def _escape_twice(found: re.Match[bytes]) -> bytes:
    is_harmless = found[0] in _HARMLESS or found[0] == b"\\u0023"
    return found[0] if is_harmless else b"\\" + found[0]


def _make_plain(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {key: _make_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(item) for item in value]
    return value
