"""Breaches as GitHub shows them, beside the line that is to blame."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from shardscope.contract.breach import Breach
from shardscope.contract.reading import ContractFile
from shardscope.contract.telling import list_rows
from shardscope.record import escape_controls, make_inert

__all__ = ["render_annotations"]

# What a workflow command may not hold, and how it is written there instead.
_IN_MESSAGES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_IN_PROPERTIES = _IN_MESSAGES | {":": "%3A", ",": "%2C"}


def render_annotations(
    breaches: Sequence[Breach], file: ContractFile, *, folder: str
) -> Iterator[str]:
    """A workflow command for each; those without a line of the program are at the contract's.

    Paths inside `folder` are relative to it, as GitHub wants them.
    """
    for breach in breaches:
        path, line = _find_place(breach, file)
        properties = {
            "file": escape_controls(_relative(path, folder)),
            "line": str(line),
            "title": make_inert(f"shardscope contract: {breach.title}"),
        }
        named = ",".join(
            f"{key}={_escape(text, _IN_PROPERTIES)}" for key, text in properties.items()
        )
        message = "\n".join(f"{row.label}: {row.text}" for row in list_rows(breach))
        yield f"::error {named}::{_escape(message, _IN_MESSAGES)}"


def _find_place(breach: Breach, file: ContractFile) -> tuple[str, int]:
    source = next((one.source for one in breach.evidence if one.source is not None), None)
    if source is None:
        return file.path, file.lines.get(breach.limit, 1)
    return source.file, source.line


def _relative(path: str, folder: str) -> str:
    absolute = os.path.abspath(os.path.join(folder, path))
    if os.path.commonpath([absolute, os.path.abspath(folder)]) != os.path.abspath(folder):
        return path
    return os.path.relpath(absolute, folder).replace(os.sep, "/")


def _escape(text: str, characters: dict[str, str]) -> str:
    return "".join(characters.get(one, one) for one in text)
