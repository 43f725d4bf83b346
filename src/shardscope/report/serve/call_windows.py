"""Answers the page's table of collectives: the rows from an offset, filtered and sorted.

Names are positions in the page's lists, so that a request and its answer are numbers.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from typing import Annotated, Any, Literal, final

import msgspec
from msgspec import Meta, Struct

from shardscope.record import Phase, Source
from shardscope.record.arrow import import_package, make_integers
from shardscope.record.ranks import Natural
from shardscope.report.html.name_lists import NameLists
from shardscope.report.html.page import Calls
from shardscope.report.html.page_index import NOWHERE, Index
from shardscope.report.model.step_numbers import StepNumbers
from shardscope.report.query.database import connect
from shardscope.report.serve.large_run import PURPOSE

_MAX_ROWS = 1_000  # of an answer
_MAX_ORDERS = 8  # that are remembered: one for each combination of filters and sort order
_SOURCE_FIELDS = tuple(f"source_{field}" for field in Source.__struct_fields__)
_PLAIN = ("rank", "order", "input_bytes", "output_bytes", "wire_bytes", "start_ns")

ColumnName = Literal[
    "rank",
    "order",
    "group",
    "kind",
    "axis",
    "phase",
    "owner",
    "trigger",
    "cause",
    "source",
    "dtype",
    "input_bytes",
    "output_bytes",
    "wire_bytes",
    "start_ns",
    "step",
]
_Ranges = Annotated[tuple[tuple[int, int], ...], Meta(max_length=10_000)]


class CallRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rows: each filter demands that one of its columns is in one of these ranges."""

    offset: Natural
    limit: Annotated[int, Meta(ge=1, le=_MAX_ROWS)]
    sort: ColumnName | None = None
    is_descending: bool = False
    filters: Annotated[tuple[dict[ColumnName, _Ranges], ...], Meta(max_length=50)] = ()


class CallWindow(Struct, frozen=True, kw_only=True):
    """The rows of an answer, and how many rows there are in all."""

    num_rows: int
    offset: int
    calls: Calls


@final
class CallWindows:
    """All collectives of a recording as columns of numbers, by rank and then in order of issue.

    `table` is the Arrow table `collectives`.
    """

    def __init__(self, table: Any, *, world_size: int, is_timed: bool) -> None:
        self.num_calls: int = table.num_rows
        self._table = table
        self._world_size = world_size
        self._is_timed = is_timed
        self._arrow = import_package("pyarrow", PURPOSE)
        self._connection = connect()
        self._lock = Lock()  # a connection serves a thread at a time
        self._orders: OrderedDict[bytes, Any] = OrderedDict()
        self._calls: Any = None
        self._has_steps = False

    def name_all(self, names: NameLists, index: Index) -> None:
        """Add the names in all collectives to the page's lists, and translate the columns."""
        mapped = {
            "group": self._translate("group", names.groups.find),
            "kind": self._translate("kind", names.kinds.at),
            "axis": self._translate("axis", names.axes.at),
            "num_ranks": self._table["num_ranks"],
            "phase": self._translate("phase", names.phases.at),
            "owner": self._translate("owner", index.module),
            "trigger": self._translate("trigger", index.module),
            "cause": self._translate("cause", names.causes.at),
            "dtype": self._translate("dtype", names.dtypes.at),
            **{name: self._table[name] for name in (*_PLAIN, *_SOURCE_FIELDS)},
        }
        self._connection.register("mapped", self._arrow.table(mapped))
        self._connection.register("sources", self._list_sources(index))
        select = _make_select(self._name_groups_without_axis(names), index.module(None))
        self._calls = self._connection.sql(select).to_arrow_table()
        self._connection.register("calls", self._calls)
        module_names: dict[int, str] = {}
        for path, position in index.positions.items():
            module_names.setdefault(position, path)  # aliases come later
        lines = index.sources()
        for column, texts in {
            "group": names.groups.all(),
            "kind": names.kinds.all(),
            "axis": names.axes.all(),
            "phase": names.phases.all(),
            "owner": [module_names.get(at, "") for at in range(max(module_names, default=0) + 1)],
            "cause": names.causes.all(),
            "dtype": names.dtypes.all(),
            "source": [f"{file}:{at}" for file, at in zip(lines.file, lines.line, strict=True)],
        }.items():
            self._connection.register(f"places_{column}", self._rank_texts(texts))

    def number_steps(
        self, numbers: StepNumbers, times_by_rank: Mapping[int, Sequence[int]]
    ) -> None:
        """Number the steps of all collectives, given when the spans of steps begin on each rank."""
        self._has_steps = bool(numbers.word)
        if numbers.is_timed:
            rows = [
                (rank, number, start)
                for rank, starts in times_by_rank.items()
                if len(starts) > 1
                for number, start in enumerate(starts, 1)
            ]
            names = ("rank", "number", "start_ns")
            columns = zip(names, zip(*rows, strict=True), strict=True)
            steps = self._arrow.table({name: make_integers(column) for name, column in columns})
            self._connection.register("steps", steps)
            select = _TIMED_STEPS
        elif numbers.word:
            forward, backward, optimizer = (
                list(Phase).index(phase)
                for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
            )
            select = _STEPS_BY_PHASE.format(
                forward=forward,
                backward=backward,
                optimizer=optimizer,
                num_steps=numbers.num_steps,
            )
        else:
            select = "SELECT *, 0 AS step FROM calls ORDER BY row"
        self._calls = self._connection.sql(select).to_arrow_table()
        self._connection.register("calls", self._calls)

    def answer(self, request: CallRequest) -> CallWindow:
        """The rows of a request."""
        with self._lock:
            rows = self._find_rows(request)
        window = rows.slice(request.offset, request.limit)
        calls = self._calls.take(window)
        columns = {name: tuple(calls[name].to_pylist()) for name in Calls.__struct_fields__}
        if not self._is_timed:
            columns["start_ns"] = ()
        if not self._has_steps:
            columns["step"] = ()
        return CallWindow(num_rows=len(rows), offset=request.offset, calls=Calls(**columns))

    def _find_rows(self, request: CallRequest) -> Any:
        """The numbers of all rows that match, in order."""
        order = msgspec.structs.replace(request, offset=0, limit=1)
        key = msgspec.json.encode(order)
        if key in self._orders:
            self._orders.move_to_end(key)
        else:
            sql = _make_query(order)
            rows = self._connection.sql(sql).to_arrow_table()["row"].combine_chunks()
            self._orders[key] = rows
            while len(self._orders) > _MAX_ORDERS:
                self._orders.popitem(last=False)
        return self._orders[key]

    def _translate(self, name: str, find: Callable[[Any], int]) -> Any:
        """A column of texts as positions; `find` is called once for each text, and not for NULL."""
        column = self._table[name]
        if not self._arrow.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        column = column.unify_dictionaries()
        if not column.num_chunks:
            return make_integers([])
        texts = column.chunk(0).dictionary.to_pylist()
        positions = make_integers(map(find, texts))
        return self._arrow.chunked_array([positions.take(chunk.indices) for chunk in column.chunks])

    def _name_groups_without_axis(self, names: NameLists) -> dict[int, int]:
        """The positions of `world` and `8 ranks`, by the number of ranks of such groups."""
        sizes = self._connection.execute(
            "SELECT DISTINCT num_ranks FROM mapped WHERE axis IS NULL ORDER BY 1"
        ).fetchall()
        return {
            size: names.axes.at("world" if size == self._world_size else f"{size} ranks")
            for (size,) in sizes
        }

    def _list_sources(self, index: Index) -> Any:
        """The distinct source lines with their positions."""
        fields = ", ".join(_SOURCE_FIELDS)
        lines = self._connection.sql(
            f"SELECT DISTINCT {fields} FROM mapped WHERE source_file IS NOT NULL ORDER BY ALL"
        ).to_arrow_table()
        rows = zip(*(lines[name].to_pylist() for name in _SOURCE_FIELDS), strict=True)
        positions = make_integers(
            index.source(Source(**dict(zip(Source.__struct_fields__, row, strict=True))))
            for row in rows
        )
        return lines.append_column("position", positions)

    def _rank_texts(self, texts: Sequence[str]) -> Any:
        """The place of each position if names are sorted, layers.9 before layers.10."""
        order = sorted(range(len(texts)), key=lambda position: _split_numbers(texts[position]))
        places = make_integers(range(len(order)))
        return self._arrow.table({"position": make_integers(order), "place": places})


_TIMED_STEPS = """
    SELECT calls.*, coalesce(steps.number, 0) AS step
    FROM calls ASOF LEFT JOIN steps
        ON calls.rank = steps.rank AND calls.start_ns >= steps.start_ns
    ORDER BY row
"""
# As `find_steps` and `number_steps`: a step begins where forward follows the phase that ends steps.
_STEPS_BY_PHASE = """
    WITH endings AS (
        SELECT *, CASE WHEN bool_or(phase = {optimizer}) OVER (PARTITION BY rank)
            THEN {optimizer} ELSE {backward} END AS ending
        FROM calls
    ), starts AS (
        SELECT *, phase = {forward} AND ending = coalesce(
            lag(CASE WHEN phase IN ({forward}, ending) THEN phase END IGNORE NULLS)
                OVER (PARTITION BY rank ORDER BY "order"), ending) AS is_start
        FROM endings
    ), numbered AS (
        SELECT *, count(*) FILTER (is_start) OVER (PARTITION BY rank ORDER BY "order") AS number,
            count(*) FILTER (is_start) OVER (PARTITION BY rank) AS num_starts
        FROM starts
    )
    SELECT * EXCLUDE (ending, is_start, number, num_starts), CASE
        WHEN num_starts > 1 AND (ending = {optimizer} OR num_starts = {num_steps}) THEN number
        ELSE 0 END AS step
    FROM numbered ORDER BY row
"""

_NAMED_LIKE = {"trigger": "owner"}
_NUMBERS = frozenset((*_PLAIN, "step"))


def _make_select(axes: dict[int, int], outside: int) -> str:
    """The columns of `Calls` without steps, and each row's number.

    `axes` are the axes of groups along none, by their number of ranks; `outside` is the position of
    calls outside any module.
    """
    sizes = " ".join(f"WHEN {size} THEN {position}" for size, position in axes.items())
    expressions = {
        "axis": f"coalesce(axis, CASE num_ranks {sizes} END)" if sizes else "axis",
        "owner": f"coalesce(owner, {outside})",
        "trigger": f'coalesce("trigger", {outside})',
        "source": f"coalesce(position, {NOWHERE})",
    }
    columns = [
        f"{expressions.get(name, quoted)} AS {quoted}"
        for name, quoted in ((name, f'"{name}"') for name in Calls.__struct_fields__)
        if name != "step"
    ]
    joined = " AND ".join(f"mapped.{name} = sources.{name}" for name in _SOURCE_FIELDS)
    return (
        f"SELECT {', '.join(columns)}, "
        'row_number() OVER (ORDER BY rank, "order") - 1 AS row '
        f"FROM mapped LEFT JOIN sources ON {joined} ORDER BY row"
    )


def _make_query(request: CallRequest) -> str:
    """A query of row numbers; it consists of numbers and of our own names."""
    conditions = " AND ".join(f"({_make_condition(filters)})" for filters in request.filters)
    where = f" WHERE {conditions}" if conditions else ""
    if request.sort is None:
        return f"SELECT row FROM calls{where} ORDER BY row"
    direction = "DESC" if request.is_descending else "ASC"
    if request.sort in _NUMBERS:
        order = f'"{request.sort}" {direction} NULLS LAST'
        return f"SELECT row FROM calls{where} ORDER BY {order}, row"
    places = f"places_{_NAMED_LIKE.get(request.sort, request.sort)}"
    return (
        f'SELECT row FROM calls LEFT JOIN {places} ON "{request.sort}" = position{where} '
        f"ORDER BY place {direction} NULLS LAST, row"
    )


def _make_condition(filters: dict[ColumnName, tuple[tuple[int, int], ...]]) -> str:
    tests = [
        f'"{column}" BETWEEN {low} AND {high}'
        for column, ranges in filters.items()
        for low, high in ranges
    ]
    return " OR ".join(tests) or "false"


def _split_numbers(text: str) -> list[tuple[int, str]]:
    parts: Iterable[str] = re.split(r"(\d+)", text.casefold())
    return [(int(part[:18]), "") if part.isdecimal() else (-1, part) for part in parts]
