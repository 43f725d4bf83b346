"""Records as JSON, whatever text they hold."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["encode_json", "replace_surrogates"]

_ENCODER = msgspec.json.Encoder()


def encode_json(value: Any) -> bytes:
    """A value as JSON on one line."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        return _ENCODER.encode(_make_plain(msgspec.to_builtins(value)))


def replace_surrogates(text: str) -> str:
    """Text that JSON can hold: file names that are not UTF-8 reach Python as lone surrogates."""
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _make_plain(value: Any) -> Any:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {key: _make_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(item) for item in value]
    return value
