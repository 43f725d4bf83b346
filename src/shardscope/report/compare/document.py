"""Changes as JSON, for programs."""

from __future__ import annotations

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from shardscope.record.encoding import encode_json
from shardscope.report.compare.changes import Area, Change, Changes, Status, Unit, Value

__all__ = [
    "FORMAT",
    "SCHEMA",
    "AreaDocument",
    "ChangeDocument",
    "ChangesDocument",
    "encode_changes",
]

FORMAT = "shardscope.changes"
SCHEMA = 1


class ChangeDocument(Struct, frozen=True, kw_only=True):
    """A change with what else can be told from it."""

    area: Area
    status: Status
    path: str | None
    modules: tuple[str, ...]
    repeat: int
    what: str
    before: Value | None
    after: Value | None
    unit: Unit
    delta: float
    is_worse: bool | None
    because: str


class AreaDocument(Struct, frozen=True, kw_only=True):
    """An area's totals for people, and how much of it changed."""

    area: Area
    before: str
    after: str
    added: int
    gone: int
    changed: int


class ChangesDocument(Struct, frozen=True, kw_only=True):
    """A whole comparison."""

    before: str
    after: str
    areas: tuple[AreaDocument, ...]
    changes: tuple[ChangeDocument, ...]
    notes: tuple[str, ...] = ()
    format: str = FORMAT
    schema: int = SCHEMA


def encode_changes(changes: Changes) -> bytes:
    """The comparison as JSON, indented."""
    document = ChangesDocument(
        before=changes.before,
        after=changes.after,
        areas=tuple(
            AreaDocument(
                area=total.area,
                before=total.before,
                after=total.after,
                added=changes.count(total.area, Status.ADDED),
                gone=changes.count(total.area, Status.GONE),
                changed=changes.count(total.area, Status.CHANGED),
            )
            for total in changes.totals
        ),
        changes=tuple(map(_describe, changes.rows)),
        notes=changes.notes,
    )
    return msgspec.json.format(encode_json(document), indent=1) + b"\n"


def _describe(change: Change) -> ChangeDocument:
    return ChangeDocument(**asdict(change), status=change.status, delta=change.delta)
