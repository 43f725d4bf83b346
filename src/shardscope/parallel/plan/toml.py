"""Plans as TOML: read with the standard library, written by hand in the few forms plans need."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from shardscope.errors import OutputError, PlanError
from shardscope.parallel.plan.tables import Plain
from shardscope.record import read_text_file, write_file

__all__ = ["read_toml", "toml_of", "write_toml"]

_TABLES = ("plan", "inputs", "outputs")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_UNSAFE = re.compile(r'["\\\x00-\x1f\x7f]')
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(path: str | PathLike[str]) -> dict[str, dict[str, Any]]:
    """The tables of the plan in the file, each there even where the file has none."""
    try:
        tables = tomllib.loads(read_text_file(path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise PlanError(
            f"The plan {str(path)!r} cannot be read: {reason}. Check the path."
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise PlanError(
            f"The plan {str(path)!r} is not TOML: {error}. Write entries under [plan], such as "
            '"layers.*.wq" = "colwise".'
        ) from error
    except UnicodeDecodeError as error:
        raise PlanError(
            f"The plan {str(path)!r} is not text in UTF-8 (byte {error.start}). Give a TOML file."
        ) from error
    except RecursionError as error:
        raise PlanError(
            f"The plan {str(path)!r} is nested too deeply. Write entries under [plan]."
        ) from error
    except ValueError as error:  # a path with a null byte, or a number of thousands of digits
        raise PlanError(f"The plan {str(path)!r} cannot be read: {error}. Correct it.") from error
    return {name: _table(tables, name, str(path)) for name in _known(tables, str(path))}


def write_toml(path: str | PathLike[str], tables: Mapping[str, Mapping[str, Plain]]) -> None:
    """Write the tables to the file, in their order."""
    try:
        if Path(path).is_fifo():
            write_file(toml_of(tables).encode(), path)  # raises if nothing reads the pipe
        else:
            Path(path).write_text(toml_of(tables), encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"The plan cannot be written to {str(path)!r}: {reason}.") from error


def toml_of(tables: Mapping[str, Mapping[str, Plain]]) -> str:
    """The tables as TOML; empty ones are left out."""
    blocks = [
        "\n".join([f"[{name}]", *(f"{_key(key)} = {_value(one)}" for key, one in table.items())])
        for name, table in tables.items()
        if table
    ]
    return "\n\n".join(blocks) + "\n"


def _known(tables: Mapping[str, Any], path: str) -> tuple[str, ...]:
    unknown = [name for name in tables if name not in _TABLES]
    if unknown:
        raise PlanError(
            f"The plan {path!r} has {unknown[0]!r} at its top level, which plans do not have. "
            "Write entries under [plan], [inputs] or [outputs]."
        )
    return _TABLES


def _table(tables: Mapping[str, Any], name: str, path: str) -> dict[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise PlanError(f"The plan {path!r} has {name} = {table!r}. Make it a table: [{name}].")
    return table


def _key(text: str) -> str:
    return text if _BARE_KEY.fullmatch(text) else _text(text)


def _text(text: str) -> str:
    return f'"{_UNSAFE.sub(_escape, text)}"'


def _escape(found: re.Match[str]) -> str:
    return _ESCAPES.get(found[0]) or f"\\u{ord(found[0]):04x}"


def _value(value: Plain) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {_value(one)}' for key, one in value.items())} }}"
    return str(value)
