"""What was found out about a compiled function: the verdict first, then where, then what to run."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shardscope.record import Condition, Deviation, Diagnosis, Recording, SuspectOp
from shardscope.report.layout import make_text, make_title, plural
from shardscope.report.lines import format_source
from shardscope.report.names import make_inert, shorten

__all__ = ["describe_deviation", "describe_place", "name_condition", "render_diagnoses"]

_GOOD = "bold green"
_BAD = "bold red"
_MAX_SUSPECTS = 8
_NAME_WIDTH = 60
_LINE_WIDTH = 120
_TEXT_WIDTH = 600
_MANY_ULP = 1e5  # nobody would call it rounding
_WORDS = {
    Condition.RNG: "different random numbers",
    Condition.NAN: "NaN or infinity",
}


def render_diagnoses(recording: Recording) -> Iterator[RenderableType]:
    """A block of lines for each diagnosis; nothing if there is none."""
    for one in recording.diagnoses:
        names = (shorten(make_inert(name), _NAME_WIDTH) for name in (one.target, one.backend))
        yield make_title("Diagnosis", "of {} compiled by {}".format(*names))
        yield _render(one)


def _render(one: Diagnosis) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _lines(one):
        table.add_row(name, text)
    return table


def _tell(fact: str) -> str:
    return f": {fact}" if fact else ""


def _lines(one: Diagnosis) -> Iterator[tuple[str, Text]]:
    style = _BAD if one.condition.is_bad else _GOOD
    words = name_condition(one.condition)
    yield "verdict", Text(words, style).append_text(make_text(_tell(one.fact), width=_TEXT_WIDTH))
    if one.stage is not None:
        yield "stage", _name_stage(one)
    if one.graph is not None:
        yield "where", make_text(describe_place(one))
    yield from _render_suspects(one)
    if one.deviation is not None and 0 < one.deviation.max_ulp < _MANY_ULP:
        yield "off by", make_text(describe_deviation(one.deviation))
    yield from _render_error(one)
    if one.repro:
        yield "repro", _describe_repro(one)
    if one.passing:
        yield "passes", make_text(one.passing)
    yield "tried", make_text(plural(one.num_queries, "compilation"))
    for note in one.notes:
        yield "note", make_text(note, width=_TEXT_WIDTH)


def _name_stage(one: Diagnosis) -> Text:
    """`backend: aten.relu.default`; a part that names its stage stands for it."""
    is_named = one.part.startswith(str(one.stage))
    stage = make_text(one.part if is_named else str(one.stage), "bold", width=_TEXT_WIDTH)
    rest = "" if is_named or not one.part else f": {one.part}"
    return stage.append_text(make_text(rest, width=_TEXT_WIDTH))


def name_condition(condition: Condition) -> str:
    """In words."""
    return _WORDS.get(condition, condition.replace("_", " "))


def describe_place(one: Diagnosis) -> str:
    """The graph that fails, and the phase."""
    phase = f", {one.phase}" if one.phase is not None else ""
    graph = (
        f"graph {one.graph} of 0 – {one.num_graphs - 1}" if one.num_graphs > 1 else "its only graph"
    )
    return f"{graph}{phase}"


def _render_suspects(one: Diagnosis) -> Iterator[tuple[str, Text]]:
    for index, suspect in enumerate(one.suspects[:_MAX_SUSPECTS]):
        name = "" if index else "op" if len(one.suspects) == 1 else "ops"
        yield name, _describe_suspect(suspect)
    if len(one.suspects) > _MAX_SUSPECTS:
        yield "", Text(f"… and {len(one.suspects) - _MAX_SUSPECTS:,} more", "dim")
    if one.suspects and not one.is_minimal:
        yield "", Text("a smaller program may fail as well: the search was not finished", "yellow")


def _describe_suspect(suspect: SuspectOp) -> Text:
    text = make_text(suspect.op, "bold", width=_NAME_WIDTH)
    if suspect.module:
        text.append_text(make_text(f"  in {suspect.module}", width=_NAME_WIDTH))
    if suspect.source is not None:
        text.append("  ").append_text(format_source(suspect.source, width=_LINE_WIDTH))
    return text


def describe_deviation(one: Deviation) -> str:
    """What the verdict does not say."""
    count = f"{one.max_ulp:,.0f}"  # or inf
    return f"up to {count} unit{'' if count == '1' else 's'} in the last place of {one.tensor}"


def _render_error(one: Diagnosis) -> Iterator[tuple[str, Text]]:
    """What was raised, unless the verdict says it already."""
    line = one.error.strip().partition("\n")[0]
    if line and line.rstrip(".") not in one.fact:
        yield "error", make_text(line, width=_TEXT_WIDTH)


def _describe_repro(one: Diagnosis) -> Text:
    proof = "a fresh process fails in the same way" if one.is_verified else "not verified"
    return make_text(one.repro).append(f"  ({proof})", "dim")
