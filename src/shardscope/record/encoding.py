"""Records as JSON, whatever text they hold."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["encode_json"]

_ENCODER = msgspec.json.Encoder()


def encode_json(value: Any) -> bytes:
    """A value as JSON on one line."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        # File names that are not UTF-8 reach Python as lone surrogates, which JSON cannot hold.
        return _ENCODER.encode(_replace_surrogates(msgspec.to_builtins(value)))


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_surrogates(item) for item in value]
    return value
