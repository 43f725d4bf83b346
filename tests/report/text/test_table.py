"""Tables never shorten numbers, keep names readable, and hide columns first."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from shardscope.report.text.style import shorten_names
from shardscope.report.text.table import Branch, Column, ColumnStyle, Grid, narrower_layouts

_COLUMNS = {
    "name": Column("name", ColumnStyle.NAME, 10),
    "size": Column("size"),
    "share": Column("share"),
    "why": Column("why", ColumnStyle.PROSE, 12),
}


def _render(rows, layouts, width, **kwargs):
    console = Console(file=StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(Grid(_COLUMNS, rows, layouts, **kwargs))
    return [line.rstrip() for line in capture.get().splitlines()]


_ROWS = [
    {"name": "alpha.beta.gamma.delta", "size": "12.3 MiB", "share": "10%"},
    {"name": "alpha.beta.gamma.omega", "size": "1,234,567", "share": "90%"},
]
_LAYOUTS = narrower_layouts(["name", "size", "share"], "share", "size")


def test_each_layout_lacks_a_further_column():
    assert _LAYOUTS == [["name", "size", "share"], ["name", "size"], ["name"]]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (
            80,
            [
                "name                         size  share",
                "alpha.beta.gamma.delta   12.3 MiB    10%",
                "alpha.beta.gamma.omega  1,234,567    90%",
            ],
        ),
        (
            30,
            [
                "name               size  share",
                "alph…a.delta   12.3 MiB    10%",
                "alph…a.omega  1,234,567    90%",
            ],
        ),
        (
            27,
            [
                "name                   size",
                "alpha…amma.delta   12.3 MiB",
                "alpha…amma.omega  1,234,567",
                "hidden at 27 columns: share",
                "(widen the terminal or set",
                "COLUMNS)",
            ],
        ),
        (
            20,
            [
                "name",
                "alpha.b….gamma.delta",
                "alpha.b….gamma.omega",
                "hidden at 20",
                "columns: size, share",
                "(widen the terminal",
                "or set COLUMNS)",
            ],
        ),
    ],
)
def test_columns_go_before_names_are_too_short_to_read(width, lines):
    assert _render(_ROWS, _LAYOUTS, width) == lines


@pytest.mark.parametrize("width", range(12, 60))
def test_no_line_is_wider_than_the_terminal(width):
    assert max(map(cell_len, _render(_ROWS, _LAYOUTS, width))) <= width


def test_column_with_nothing_in_it_is_not_shown():
    assert _render([{"name": "a"}], [["name", "size"]], 40) == ["name", "a"]


def test_prose_has_the_room_that_is_left_and_may_depend_on_it():
    rows = [{"name": "a", "why": lambda width: Text(f"{width} cells")}]
    assert _render(rows, [["name", "why"]], 40) == ["name  why", "a     34 cells"]


def test_note_stands_below_the_table_and_does_not_widen_it():
    lines = _render(_ROWS, _LAYOUTS, 80, note="… 5 more")
    assert lines[-1] == "… 5 more"


def test_tree_keeps_its_lines_while_names_are_shortened():
    rows = [{"name": Branch("│ ├ ", Text("a_name_that_is_long"))}]
    assert _render(rows, [["name"]], 14) == ["name", "│ ├ a_n…s_long"]


def test_tree_too_deep_for_its_lines_keeps_the_name():
    rows = [{"name": Branch("│ " * 20, Text("q_proj"))}]
    assert _render(rows, [["name"]], 14)[1].endswith("q_proj")


@pytest.mark.parametrize("width", range(1, 30))
def test_shortened_names_fit_also_where_letters_are_two_cells_wide(width):
    for text in ("日本語の名前がとても長い", "🚀" * 20, "plain" * 10):
        (cut,) = shorten_names([Text(text)], width)
        assert cell_len(cut.plain) <= width


def test_names_that_would_become_equal_are_shortened_at_the_start():
    names = [Text(f"model.layers.{number}.attention.q_proj") for number in range(3)]
    assert [name.plain for name in shorten_names(names, 22)] == [
        "…rs.0.attention.q_proj",
        "…rs.1.attention.q_proj",
        "…rs.2.attention.q_proj",
    ]


def test_styles_survive_shortening():
    (cut,) = shorten_names([Text.assemble(("alpha", "red"), ("omega_the_last", "blue"))], 10)
    assert cut.plain == "alp…e_last"
    assert [(span.start, span.end, span.style) for span in cut.spans] == [
        (0, 3, "red"),
        (4, 10, "blue"),
    ]
