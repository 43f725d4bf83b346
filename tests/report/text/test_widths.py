"""At 60 and 80 columns nothing is hidden silently, and every line number is complete."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Group, RenderableType

import sample_recordings as samples
from shardscope.record import Recording, Source
from shardscope.report.compare.changes_text import render_changes
from shardscope.report.compare.compare_recordings import compare
from shardscope.report.text.compiler import render_guards, render_stage_times
from shardscope.report.text.style import shorten
from shardscope.report.text.summary import View, render_plain, render_summary
from shardscope.report.text.table import Column, ColumnStyle, Grid, narrower_layouts
from shardscope.report.text.views import ViewName, render_views

FOLDER = "/home/somebody/projects/a-very-long-folder-name/and/another/one/inside/of/it"
LINE = re.compile(r":(9\d{4})(?!\d)")
WIDE = 1000


class _Lengthener:
    """Gives every source line a long path and a line number of its own, and modules long names."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int], int] = {}

    def change(self, record: Any) -> Any:
        if isinstance(record, Source):
            key = (record.file, record.line)
            line = self._lines.setdefault(key, 90_000 + len(self._lines))
            return replace(
                record, file=f"{FOLDER}/{len(self._lines)}_model_definition.py", line=line
            )
        if type(record) is str:
            return record.replace("layers.", "model.transformer.decoder.hidden_layers.")
        if isinstance(record, msgspec.Struct):
            return replace(
                record,
                **{name: self.change(getattr(record, name)) for name in record.__struct_fields__},
            )
        return tuple(map(self.change, record)) if isinstance(record, tuple) else record


def make_long(recording: Recording) -> Recording:
    return _Lengthener().change(recording)


RECORDINGS = {
    "collectives": samples.make_llama(num_layers=2),
    "ranks that differ": samples.make_varied(),
    "phases": samples.make_phases(),
    "holdings": samples.make_holdings(),
    "parallel": samples.make_parallel(),
    "explained": samples.make_explained(),
    "diagnosed": samples.make_diagnosed(),
}


def list_views(recording: Recording) -> Iterator[tuple[str, RenderableType]]:
    for by in get_args(View):
        yield f"summary by {by}", render_summary(recording, by=by, is_folded=by != "cause")
    yield "views", render_views(recording, get_args(ViewName))
    yield "guards", Group(*render_guards(recording))
    yield "times", Group(*render_stage_times(recording))
    before = replace(recording, collectives=recording.collectives[:1], findings=(), memory=())
    yield "diff", render_changes(compare(before, recording, titles=("a", "b")))


@pytest.mark.parametrize("name", RECORDINGS)
def test_nothing_is_hidden_silently_and_line_numbers_are_complete(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers: set[str] = set()
    make_table = Grid._make_table

    def spy(self: Grid, width: int) -> Any:
        """Collect the headers that a table shows, and those whose content is in other columns."""
        shown = self._choose_layout(width)
        covered = (key for shown_key in shown for key in self._columns[shown_key].covers)
        headers.update(self._columns[key].header for key in (*shown, *covered))
        return make_table(self, width)

    monkeypatch.setattr(Grid, "_make_table", spy)
    num_lines = 0
    for view, renderable in list_views(make_long(RECORDINGS[name])):
        headers.clear()
        wide = render_plain(renderable, width=WIDE)
        lines, columns = set(LINE.findall(wide)), set(headers)
        num_lines += len(lines)
        for width in (60, 80):
            headers.clear()
            text = render_plain(renderable, width=width)
            assert max(map(cell_len, text.splitlines()), default=0) <= width, view
            assert lines <= set(LINE.findall(text)), f"{view}\n{text}"
            words = " ".join(text.split())
            hidden = [header for header in columns - headers if header not in words]
            assert hidden == [], f"{view} at {width} columns"
    assert num_lines or name in ("phases", "holdings")


def test_hidden_columns_are_named_and_bars_are_not() -> None:
    columns = {
        "name": Column("parameter", ColumnStyle.NAME, 10),
        "size": Column("size"),
        "share": Column("share"),
        "bar": Column("", ColumnStyle.NAME, 8),
    }
    row = {"name": "a.long.name.of.a.parameter", "size": "12.5 GiB", "share": "100%", "bar": "███"}
    grid = Grid(columns, [row], narrower_layouts(list(columns), "bar", "share"))
    assert "hidden" not in render_plain(grid, width=80)
    assert "hidden" not in render_plain(grid, width=30)
    narrow = " ".join(render_plain(grid, width=24).split())
    assert "hidden at 24 columns: share (widen the terminal or set COLUMNS)" in narrow


@pytest.mark.parametrize("width", range(8, 60))
def test_a_line_number_survives_at_any_width(width: int) -> None:
    for text in (
        f"{FOLDER}/train.py:1234",
        f"{FOLDER}/train.py:1234 a_function_with_a_long_name",
        f"the break at {FOLDER}/train.py:1234",
        "train.py:1234 a_function_with_a_very_long_name_that_does_not_fit_at_all",
    ):
        shortened = shorten(text, width)
        assert ":1234" in shortened
        assert cell_len(shortened) <= width
        assert "…" in shortened
