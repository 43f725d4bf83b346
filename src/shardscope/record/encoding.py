"""The JSON of recordings and streams: encodes records, reads a file's header, and explains why a
file cannot be read.
"""

from __future__ import annotations

import re
from typing import Any, final

import msgspec
from msgspec.structs import force_setattr

from shardscope.errors import RecordingError
from shardscope.record.recording import SCHEMA, Collective
from shardscope.record.text import excerpt, is_unsafe, replace_surrogates

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


_OLDEST_SCHEMA = 1


class FileHeader(msgspec.Struct, frozen=True):
    """The format and schema that every file of ours begins with."""

    format: str = ""
    schema: int = 0


def read_header(line: bytes) -> FileHeader | None:
    """The header in a line, or None if the line is no JSON object."""
    try:
        return msgspec.json.decode(line, type=FileHeader)
    except (ValueError, RecursionError):
        return None


def check_schema(header: FileHeader, name: str, *, newest: int = SCHEMA) -> None:
    """Raise RecordingError for a file of a schema that this version does not read."""
    schema = excerpt(str(header.schema))
    if header.schema > newest:
        raise RecordingError(
            f"'{name}' was written by a newer shardscope (schema {schema} at $.schema; this "
            f"version reads up to {newest}). Upgrade shardscope: pip install --upgrade shardscope."
        )
    if header.schema < _OLDEST_SCHEMA:
        raise RecordingError(
            f"'{name}' has schema {schema} at $.schema, older than the oldest this version "
            f"reads ({_OLDEST_SCHEMA}). Record again, or read it with the shardscope that wrote it."
        )


def explain_damage(error: Exception, data: bytes, name: str) -> str:
    """A sentence on why `data` is not the JSON that was expected."""
    if not data.strip():
        return (
            f"'{name}' is empty. Record again; to keep the records of a run that is killed, use "
            "trace(stream=…)."
        )
    if isinstance(error, RecursionError):
        return f"'{name}' nests JSON too deeply for a recording. Name a file that shardscope wrote."
    if isinstance(error, UnicodeDecodeError):
        return (
            f"'{name}' has text that is not UTF-8 (byte 0x{error.object[error.start]:02x} inside a "
            f"string). The file was damaged; copy it again, or record again."
        )
    if isinstance(error, msgspec.ValidationError):
        return _explain_wrong_value(error, name)
    return _explain_broken_json(error, data, name)


def _explain_wrong_value(error: msgspec.ValidationError, name: str) -> str:
    fact, _, place = str(error).partition(" - at ")
    place = excerpt(place.strip("`")) or "the top level ($)"
    return (
        f"'{name}' is not a recording this version understands: at {place}: "
        f"{excerpt(_lower(fact))}. Name a file that shardscope wrote, or record again."
    )


def _explain_broken_json(error: Exception, data: bytes, name: str) -> str:
    if not data.lstrip().startswith(b"{"):
        return (
            f"'{name}' is not a shardscope recording: it does not start as a JSON object "
            f"(byte 0). Name a file that shardscope wrote."
        )
    if "truncated" in str(error):
        return (
            f"'{name}' is truncated: its JSON stops at byte {len(data)} without an end. "
            f"Copy it again, or record again."
        )
    match = re.search(r": (.*) \(byte (\d+)\)", str(error))
    fact, place = match.groups() if match else (str(error), "?")
    return (
        f"'{name}' is damaged: its JSON is malformed at byte {place} ({fact}). "
        f"Copy it again, or record again."
    )


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
