"""What the browser is given of a comparison."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from compared_recordings import make_pair, make_traced
from shardscope.report.html.comparison_rows import build_comparison
from shardscope.report.html.page import Comparison
from shardscope.report.html.page_index import Index


def test_changes_point_at_modules_and_areas():
    before, after = make_pair()
    positions = {module.name: index for index, module in enumerate(after.modules)}
    comparison = build_comparison(
        before, after, Index(positions.items()), titles=("a.json", "b.json")
    )
    assert (comparison.before, comparison.after, comparison.notes) == ("a.json", "b.json", ())
    rows = [row for row in comparison.changes if comparison.areas[row.area].name == "collectives"]
    (row,) = rows
    assert positions["layers.0.attention.wo"] == row.module
    assert (row.path, row.repeat) == ("layers.{0…3}.attention.wo", 4)
    assert (row.status, row.before, row.after, row.delta) == ("added", "", "1", 1)
    assert row.is_worse is True
    assert row.because.startswith("implicit redistribution Partial(sum) → Replicate(), required")
    assert (row.axis, row.kind, row.phase, row.ranks) == ("tp", "all_reduce", "forward", "")
    (area,) = [area for area in comparison.areas if area.name == "collectives"]
    assert (area.before, area.after, area.num_added, area.num_gone) == ("48", "52", 4, 0)
    assert msgspec.json.decode(msgspec.json.encode(comparison), type=Comparison) == comparison


def test_modules_that_the_page_does_not_have_have_no_position():
    before, after = make_traced({"a": 1}), make_traced({"b": 1})
    comparison = build_comparison(before, after, Index([("b", 7)]))
    assert {(row.status, row.module) for row in comparison.changes} == {("added", 7), ("gone", -1)}


def test_a_wrapped_model_is_found_on_the_page_by_its_own_names():
    before, after = make_traced({"a": 1}), make_traced({"_orig_mod.a": 2})
    comparison = build_comparison(before, after, Index([("_orig_mod.a", 3)]))
    assert {row.module for row in comparison.changes} == {3}


def test_too_many_changes_are_truncated_and_counted():
    names = {f"m{index}x": 1 for index in range(2_000)}
    comparison = build_comparison(make_traced({}), make_traced(names), Index([]))
    assert (len(comparison.changes), comparison.left_out) == (5_000, 1_000)


def test_long_values_are_shortened():
    before = make_traced({"a": 1})
    after = replace(before, run=replace(before.run, torch_version="x" * 10_000))
    (row,) = build_comparison(before, after, Index([])).changes
    assert len(row.after) == 400
