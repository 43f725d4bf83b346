"""Whatever points into a list of the page points to something in it, whatever was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from large_recording import make_hostile
from sample_recordings import make_recording
from shardscope.record import Recording
from shardscope.report.html.html import build_page
from shardscope.report.html.page import Calls, Communication, Page, Traffic
from shardscope.report.html.page_schema import make_schema

jsonschema = pytest.importorskip("jsonschema")

_MODULES = {"module", "modules", "owner", "trigger", "peak_module"}
_SOURCES = {"source", "sources"}


def walk(record: Struct) -> Iterator[tuple[Struct, str, Any]]:
    for name in record.__struct_fields__:
        value = getattr(record, name)
        yield record, name, value
        for value_part in value if isinstance(value, tuple) else (value,):
            if isinstance(value_part, Struct):
                yield from walk(value_part)


def numbers(value: Any) -> list[int]:
    if not isinstance(value, tuple):
        return [value]
    return [number for member in value for number in numbers(member)]


def check(page: Page) -> None:
    num_modules, num_sources = len(page.modules.path), len(page.sources.line)
    for record, name, value in walk(page):
        if record is page:
            continue
        if name in _MODULES:
            assert all(-1 <= at < num_modules for at in numbers(value)), (record, name)
        if name in _SOURCES:
            assert all(-1 <= at < num_sources for at in numbers(value)), (record, name)
    apart = {"phases", "recorded", "own_peak", "earlier"}
    _check_columns(page.modules, len(page.modules.path), apart=apart)
    own_peak = page.modules.own_peak
    _check_columns(own_peak, len(own_peak.module), apart={"kinds"})
    assert all(0 <= kind < len(own_peak.kinds) for kind in own_peak.kind)
    _check_columns(page.sources, num_sources)
    _check_tree(page)
    parts = page.figure_parts
    _check_columns(parts, len(parts.figure), apart=set() if parts.modules else {"modules"})
    assert all(0 <= at < len(page.figures) for at in parts.figure)
    if page.communication is not None:
        _check_communication(page.communication)
    if page.sharding is not None:
        parameters = page.sharding.parameters
        _check_columns(parameters, len(parameters.name))
        drawings = (*parameters.drawing, *(layout.drawing for layout in page.sharding.layouts))
        assert all(-1 <= at < len(page.sharding.drawings) for at in drawings)
        assert all(len(drawing.shards) <= 64 for drawing in page.sharding.drawings)
    for curve in page.memory:
        assert {len(column) for column in (*curve.num_bytes, curve.module)} <= {len(curve.order)}
        assert all(0 <= row.kind < len(curve.kinds) for row in curve.at_peak)
        assert -1 <= curve.peak < len(curve.order)


def _check_columns(record: Struct, length: int, apart: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    for name in set(record.__struct_fields__) - apart:
        assert len(getattr(record, name)) == length, name


def _check_tree(page: Page) -> None:
    modules = page.modules
    for at, parent in enumerate(modules.parent):
        assert -1 <= parent < at
        assert at < modules.end[at] <= (modules.end[parent] if parent >= 0 else len(modules.path))
        assert modules.first_identical[at] <= at
        assert modules.first_identical[modules.first_identical[at]] == modules.first_identical[at]
        assert modules.parent[modules.first_identical[at]] == parent


def _check_communication(communication: Communication) -> None:
    lists = {
        "axis": communication.axes,
        "kind": communication.kinds,
        "phase": communication.phases,
        "cause": communication.causes,
        "dtype": communication.dtypes,
        "group": communication.groups,
        "rank_set": communication.ranks,
    }
    _check_columns(communication.traffic, len(communication.traffic.count), apart={"step"})
    assert len(communication.traffic.step) in (0, len(communication.traffic.count))
    assert list(communication.traffic.rank_set) == sorted(communication.traffic.rank_set)
    optional = {"start_ns", "step"}
    _check_columns(communication.calls, len(communication.calls.rank), apart=optional)
    for name in optional:
        assert len(getattr(communication.calls, name)) in (0, len(communication.calls.rank)), name
    _check_columns(communication.spans, len(communication.spans.rank), apart={"names"})
    for record, name, value in walk(communication):
        if isinstance(record, Calls | Traffic) and name in lists:
            least = -1 if name == "group" else 0
            assert all(least <= at < len(lists[name]) for at in numbers(value)), (record, name)


def test_positions_are_valid_for_every_recording(any_recording: Recording) -> None:
    check(build_page(any_recording))


def test_positions_are_valid_for_hostile_names() -> None:
    check(build_page(make_hostile()))


def test_the_json_is_what_the_schema_says(any_recording: Recording) -> None:
    schema = make_schema()
    encoded = msgspec.json.decode(msgspec.json.encode(build_page(any_recording)))
    jsonschema.Draft202012Validator(schema).validate(encoded)


def test_the_schema_demands_every_field() -> None:
    for name, record in make_schema()["$defs"].items():
        assert record["required"] == list(record["properties"]), name
        assert record["description"], name


def test_an_empty_recording_has_no_views() -> None:
    page = build_page(make_recording())
    assert page.run.title == "A recording on 8 ranks"
    views = (page.communication, page.sharding, page.compiler, page.proof, page.comparison)
    assert views == (None,) * 5
    assert (page.facts, page.findings, page.memory, page.coverage, page.modules.path) == ((),) * 5
