"""The records of a recording as flat tables, whose columns are derived from the record types.

A field that is a number, a text or a flag is a column. Ranks, meshes and source lines become text,
and a record inside a record becomes a column for each of its fields, named `<field>_<its field>`. A
list of records is a table of its own, whose first columns say which record it belongs to.
`arrow.py` turns the tables into those of Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect as types

from shardscope.record.base import Axis, Source
from shardscope.record.profile_records import Allocation, AllocationTable, MemoryKind
from shardscope.record.ranks import RankSpan, format_ranks
from shardscope.record.recording import Cause, Recording, describe_cause


class ColumnType(StrEnum):
    """What the values of a column are; any of them may be missing."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    BOOLEAN = "boolean"
    TEXTS = "list of text"
    INTEGERS = "list of integer"


class Column(NamedTuple):
    """A column: `read` gives its value for what the record has at the attribute `path`.

    Rows often share that value, such as a source line; then it need be read only once. An empty
    path is the record itself. `depth` is which record of a row it is: 0 is the outermost.
    """

    name: str
    type: ColumnType
    read: Callable[[Any], Any]
    path: str = ""
    depth: int = 0


class Table(NamedTuple):
    """A table of the records at `path`, such as `("modules", "parameters")`."""

    name: str
    record: type[Any]
    path: tuple[str, ...]
    columns: tuple[Column, ...]

    def list_rows(self, recording: Recording) -> list[tuple[Any, ...]]:
        """Each record, after the records that contain it."""
        rows: list[tuple[Any, ...]] = [(recording,)]
        for field in self.path:
            rows = [(*row, record) for row in rows for record in _list_records(row[-1], field)]
        return [row[1:] for row in rows]


def _list_records(record: Any, field: str) -> tuple[Any, ...]:
    value = getattr(record, field)
    if isinstance(value, AllocationTable):
        return tuple(value.list_allocations())
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


# Each table's name, and where in a recording its records are.
_PATHS = {
    "run": "run",
    "groups": "groups",
    "modules": "modules",
    "parameters": "modules.parameters",
    "marks": "modules.marks",
    "collectives": "collectives",
    "findings": "findings",
    "gaps": "gaps",
    "stops": "stops",
    "open_spans": "stops.open_spans",
    "dropped": "dropped",
    "spans": "spans",
    "memory": "memory",
    "memory_uses": "memory.at_peak",
    "memory_samples": "memory.samples",
    "allocations": "memory.allocations",
    "coverage": "coverage",
    "ops": "coverage.ops",
    "moves": "coverage.ops.moves",
    "shardings": "coverage.ops.shardings",
    "layouts": "layouts",
    "slices": "layouts.slices",
    "parity": "parity",
    "parity_verdicts": "parity.tensors",
    "divergences": "parity.divergences",
    "types": "types",
    "typed_tensors": "types.tensors",
    "tensor_types": "types.tensors.axes",
    "parallel": "parallel",
    "inserted": "parallel.inserted",
    "fallbacks": "parallel.fallbacks",
    "placed": "parallel.placed",
    "rank_memory": "parallel.rank_memory",
    "parallel_verdicts": "parallel.verdicts",
    "diagnoses": "diagnoses",
    "suspects": "diagnoses.suspects",
    "explanations": "explanations",
    "graphs": "explanations.graphs",
    "graph_ops": "explanations.graphs.ops",
    "break_sites": "explanations.break_sites",
    "recompiles": "explanations.recompiles",
    "skipped_frames": "explanations.skipped_frames",
    "graph_collectives": "explanations.collectives",
    "stages": "explanations.stages",
    "guards": "explanations.guards",
    "values": "values",
    "comparisons": "comparisons",
    "run_deviations": "comparisons.deviations",
    "processes": "processes",
    "checks": "checks",
    "roles": "checks.roles",
    "variations": "checks.variations",
    "hangs": "hangs",
    "hang_sources": "hangs.sources",
    "hang_causes": "hangs.causes",
    "hang_waits": "hangs.waits",
    "hang_divergences": "hangs.divergences",
    "hang_sides": "hangs.divergences.sides",
    "hang_progress": "hangs.progress",
    "hang_states": "hangs.states",
    "slow_ranks": "hangs.slow_ranks",
    "skews": "hangs.skews",
}
# The columns of a record that the records inside it repeat, and their names there.
_KEYS = {
    "modules": {"name": "module", "ranks": "module_ranks"},
    "stops": {"rank": "rank"},
    "memory": {"rank": "rank"},
    "coverage": {"rank": "rank", "level": "level"},
    "coverage.ops": {"op": "op"},
    "layouts": {"name": "layout"},
    "parity": {"axes": "axes"},
    "types": {"axes": "mesh"},
    "types.tensors": {"name": "tensor", "role": "role", "path": "path", "call": "call"},
    "parallel": {"program": "program"},
    "diagnoses": {"rank": "rank", "target": "target"},
    "explanations": {"rank": "rank", "target": "target"},
    "comparisons": {"run_a": "run_a", "run_b": "run_b"},
    "explanations.graphs": {"index": "graph"},
    "checks": {"world_size": "world_size"},
    "hangs": {"ranks": "run_ranks"},
    "hangs.divergences": {"group": "group", "position": "position"},
}


@cache
def make_tables() -> dict[str, Table]:
    """All tables by name, with their columns."""
    return {name: _make_table(name, tuple(path.split("."))) for name, path in _PATHS.items()}


def _make_table(name: str, path: tuple[str, ...]) -> Table:
    records = [_find_record(path[: depth + 1]) for depth in range(len(path))]
    keys = [
        column._replace(name=key_names[column.name], depth=depth)
        for depth in range(len(path) - 1)
        for key_names in [_KEYS[".".join(path[: depth + 1])]]
        for column in _list_columns(records[depth])
        if column.name in key_names
    ]
    own_names = {key.name for key in keys}
    depth = len(path) - 1
    own = [
        column._replace(depth=depth)
        for column in _list_columns(records[-1])
        if column.name not in own_names
    ]
    return Table(name, records[-1], path, (*keys, *own))


def _find_record(path: tuple[str, ...]) -> type[Any]:
    record: type[Any] = Recording
    for name in path:
        field_type = next(f.type for f in _list_fields(record) if f.name == name)
        if isinstance(field_type, types.VarTupleType):
            field_type = field_type.item_type
        members = _list_members(field_type)
        assert len(members) == 1, f"{path} does not lead to records"
        record = Allocation if members[0].cls is AllocationTable else members[0].cls
    return record


def _list_fields(record: type[Any]) -> tuple[types.Field, ...]:
    known = _inspect_records().get(record)  # not the rows of a record that is in columns
    info = types.type_info(record) if known is None else known
    assert isinstance(info, types.StructType)
    return info.fields


@cache
def _inspect_records() -> dict[type[Any], types.StructType]:
    """The types of a recording and of all records in it, which msgspec is slow to find out."""
    infos: dict[type[Any], types.StructType] = {}
    pending: list[types.Type] = [types.type_info(Recording)]
    while pending:
        info = pending.pop()
        if isinstance(info, types.StructType) and info.cls not in infos:
            infos[info.cls] = info
            pending += [field.type for field in info.fields]
        elif isinstance(info, types.UnionType):
            pending += info.types
        elif isinstance(info, types.VarTupleType):
            pending.append(info.item_type)
    return infos


def _list_columns(record: type[Any]) -> Iterator[Column]:
    for field in _list_fields(record):
        yield from _flatten(field.name, field.type)


def _flatten(name: str, field_type: types.Type) -> Iterator[Column]:
    """The columns of a field; none for a list of records, which is another table."""
    members = _list_members(field_type)
    plain = _read_plain_type(name, field_type)
    if plain is not None:
        yield Column(name, plain, attrgetter(name))
    elif any(member.cls is AllocationTable for member in members):
        return  # its rows are a table
    elif len(members) > 1:
        assert {member.cls for member in members} == set(Cause.__args__)
        yield from _flatten_cause(name, members)
    elif members:
        for column in _list_columns(members[0].cls):
            read = partial(_read_inside, column.read)
            if column.path:
                read = partial(_read_inside, partial(_read_deeper, column.path, column.read))
            yield Column(f"{name}_{column.name}", column.type, read, name)
    elif name == "num_bytes":  # of a sample of memory, for each kind
        for position, kind in enumerate(MemoryKind):
            name_of_kind = f"{kind}_bytes"
            yield Column(name_of_kind, ColumnType.INTEGER, partial(_read_item, position), name)
    else:
        yield from _flatten_items(name, field_type)


def _read_deeper(path: str, read: Callable[[Any], Any], value: Any) -> Any:
    inner = getattr(value, path)
    return None if inner is None else read(inner)


def _list_members(field_type: types.Type) -> list[types.StructType]:
    parts = field_type.types if isinstance(field_type, types.UnionType) else (field_type,)
    return [part for part in parts if isinstance(part, types.StructType)]


_SCALARS: tuple[tuple[type[Any], ColumnType], ...] = (
    (types.BoolType, ColumnType.BOOLEAN),
    (types.IntType, ColumnType.INTEGER),
    (types.FloatType, ColumnType.NUMBER),
    (types.StrType, ColumnType.TEXT),
    (types.EnumType, ColumnType.TEXT),
)
_LISTS = {ColumnType.TEXT: ColumnType.TEXTS, ColumnType.INTEGER: ColumnType.INTEGERS}


def _read_plain_type(name: str, field_type: types.Type) -> ColumnType | None:
    """The type of a column whose values are those of the field, else None."""
    if isinstance(field_type, types.UnionType):
        parts = [part for part in field_type.types if not isinstance(part, types.NoneType)]
        return _read_plain_type(name, parts[0]) if len(parts) == 1 else None
    if isinstance(field_type, types.VarTupleType) and name != "num_bytes":
        item = _read_plain_type(name, field_type.item_type)
        return None if item is None else _LISTS.get(item)
    return next((kind for known, kind in _SCALARS if isinstance(field_type, known)), None)


def _flatten_items(name: str, field_type: types.Type) -> Iterator[Column]:
    """A column for a list of ranks, axes, source lines or ranges of indices."""
    assert isinstance(field_type, types.VarTupleType), f"{name} has no rule"
    item = field_type.item_type
    record = item.cls if isinstance(item, types.StructType) else None
    writers: dict[Any, tuple[ColumnType, Callable[[Any], Any]]] = {
        RankSpan: (ColumnType.TEXT, format_ranks),
        Axis: (ColumnType.TEXT, _format_axes),
        Source: (ColumnType.TEXTS, _format_sources),
        None: (ColumnType.TEXT, _format_json),
    }
    if record in writers:
        kind, write = writers[record]
        yield Column(name, kind, write, name)


def _flatten_cause(name: str, members: list[types.StructType]) -> Iterator[Column]:
    """The cause in words, its type, and each field that any type of cause has.

    A list of texts is one text here: the placements of a redistribution are a list, those of
    spmd_types are not.
    """
    yield Column(name, ColumnType.TEXT, describe_cause, name)
    yield Column(f"{name}_type", ColumnType.TEXT, _read_tag, name)
    kinds: dict[str, ColumnType] = {}
    for member in members:
        for field in member.fields:
            kind = _read_plain_type(field.name, field.type)
            assert kind is not None
            kinds[field.name] = ColumnType.TEXT if kind is ColumnType.TEXTS else kind
    for field_name, kind in kinds.items():
        yield Column(f"{name}_{field_name}", kind, partial(_read_cause, field_name), name)


def _read_inside(read: Callable[[Any], Any], record: Any) -> Any:
    return None if record is None else read(record)


def _read_item(position: int, items: tuple[int, ...]) -> int | None:
    return items[position] if position < len(items) else None


def _read_tag(cause: Any) -> str | None:
    return None if cause is None else str(cause.__struct_config__.tag)


def _read_cause(field: str, cause: Any) -> Any:
    value = getattr(cause, field, None)
    return ", ".join(value) if isinstance(value, tuple) else value


def _format_axes(axes: tuple[Axis, ...]) -> str:
    return ",".join(f"{axis.name}={axis.size}" for axis in axes)


def _format_sources(sources: tuple[Source, ...]) -> list[str]:
    return [f"{source.file}:{source.line}" for source in sources]


def _format_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
