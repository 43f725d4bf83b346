"""The header of a file: its format and schema, and sentences on files that cannot be read."""

from __future__ import annotations

import re

import msgspec

from shardscope.errors import RecordingError
from shardscope.record.recording import SCHEMA
from shardscope.record.sanitize import sanitize_text

_OLDEST_SCHEMA = 1
_MAX_ECHO = 120  # characters of an untrusted file that a message repeats


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


def brief(text: str) -> str:
    """Untrusted text, sanitized and shortened for a sentence."""
    return sanitize_text(text if len(text) <= _MAX_ECHO else f"{text[:_MAX_ECHO]}…")


def check_schema(header: FileHeader, name: str) -> None:
    """Raise RecordingError for a file of a schema that this version does not read."""
    schema = brief(str(header.schema))
    if header.schema > SCHEMA:
        raise RecordingError(
            f"'{name}' was written by a newer shardscope (schema {schema} at $.schema; this "
            f"version reads up to {SCHEMA}). Upgrade shardscope: pip install --upgrade shardscope."
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
    place = brief(place.strip("`")) or "the top level ($)"
    return (
        f"'{name}' is not a recording this version understands: at {place}: {brief(_lower(fact))}. "
        f"Name a file that shardscope wrote, or record again."
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
