"""A recording for people at a terminal: what ran, what is wrong, who said how much and why."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.text import Text

from shardscope.record import Recording, guard_line
from shardscope.report.audit import render_audit
from shardscope.report.causes import render_causes
from shardscope.report.costliest import render_costliest
from shardscope.report.coverage import render_coverage
from shardscope.report.diagnosis import render_diagnoses
from shardscope.report.explain import render_explanations
from shardscope.report.fold import ModuleNode, Traffic, build_tree, fold_repeated_layers
from shardscope.report.heading import describe_passes, render_heading
from shardscope.report.layout import make_title
from shardscope.report.memory import render_memory
from shardscope.report.parallel import render_parallel
from shardscope.report.parity import render_parity
from shardscope.report.phases import render_phases
from shardscope.report.problems import render_problems
from shardscope.report.ranks import render_ranks
from shardscope.report.slices import render_layout
from shardscope.report.totals import describe_totals, render_totals
from shardscope.report.traffic import RankClass, fold_ranks
from shardscope.report.tree import render_tree

__all__ = [
    "View",
    "add_roots",
    "join_notes",
    "note_costs",
    "note_lines",
    "render_plain",
    "render_summary",
    "render_text",
]

View = Literal["module", "axis", "kind", "cause"]

_NUM_CAUSES = 8
_EMPTY = "No collectives were recorded"
_LOST = "No collectives are left in this recording: see the gaps above."


def render_summary(
    recording: Recording, *, by: View = "module", is_folded: bool = True
) -> RenderableType:
    """Everything worth a first look; `by` chooses what collectives are sorted by."""
    return Group(*_render_sections(recording, by, is_folded))


def render_text(
    recording: Recording, *, by: View = "module", is_folded: bool = True, width: int = 80
) -> str:
    """The same as plain text, for files, tests and notebooks."""
    return render_plain(render_summary(recording, by=by, is_folded=is_folded), width=width)


def render_plain(thing: RenderableType, *, width: int = 80) -> str:
    """Whatever can be printed, as text without colours or blanks at the ends of lines."""
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(thing)
    return "\n".join(guard_line(line.rstrip()) for line in capture.get().splitlines()) + "\n"


def _render_sections(recording: Recording, by: View, is_folded: bool) -> Iterator[RenderableType]:
    classes = fold_ranks(recording)
    yield render_heading(recording, classes)
    yield from render_problems(recording)
    others = list(_render_others(recording, is_folded))
    if recording.collectives:
        yield from _render_collectives(recording, classes, by, is_folded)
    elif any(gap.is_loss for gap in recording.gaps):
        yield Text(f"\n{_LOST}")
    elif not others:
        yield Text(f"\n{_explain_emptiness(recording)}")
    yield from others


def _explain_emptiness(recording: Recording) -> str:
    """Why a recording may have no collectives."""
    if recording.stops:
        remedy = ": see the gaps above" if recording.gaps else ""
        return f"{_EMPTY} before the step ended early{remedy}."
    if recording.run.world_size == 1:
        return f"{_EMPTY}: a world of one rank has none to issue."
    if recording.run.command.startswith("shardscope "):
        return (
            f"{_EMPTY}: the step issued none. A model is sharded in TARGET's parallelize(model, "
            "mesh)."
        )
    return (
        f"{_EMPTY}. Either the traced code issued no collective, or it ran outside "
        "`with trace(model)`."
    )


def _render_collectives(
    recording: Recording, classes: tuple[RankClass, ...], by: View, is_folded: bool
) -> Iterator[RenderableType]:
    if len(classes) > 1:
        yield make_title("Ranks", "identical ranks share a row")
        yield render_ranks(classes)
    if by == "cause":
        yield make_title("By cause", join_notes(note_lines(recording), describe_passes(recording)))
        yield render_causes(recording, classes)
        return
    roots = build_tree(recording, classes)
    if by == "module":
        yield from _render_modules(recording, classes, roots, is_folded)
    else:
        yield make_title(f"By {by}", describe_totals(recording, classes))
        other = "kind" if by == "axis" else "axis"
        yield render_totals(add_roots(roots), classes, (by, other, "phase"))


def _render_others(recording: Recording, is_folded: bool) -> Iterator[RenderableType]:
    """What instruments other than a trace of collectives found."""
    yield from render_phases(recording)
    yield from render_coverage(recording)
    if "audit" in recording.run.instruments:
        yield from render_audit(recording, is_folded=is_folded)
    for layout in recording.layouts:
        yield from render_layout(layout, is_complete=not is_folded)
    yield from render_memory(recording, is_folded=is_folded)
    yield from render_parallel(recording, is_folded=is_folded)
    yield from render_parity(recording, is_folded=is_folded)
    yield from render_diagnoses(recording)
    yield from render_explanations(recording)


def _render_modules(
    recording: Recording,
    classes: tuple[RankClass, ...],
    roots: tuple[ModuleNode, ...],
    is_folded: bool,
) -> Iterator[RenderableType]:
    if is_folded:
        roots = tuple(fold_repeated_layers(root) for root in roots)
    passes = describe_passes(recording)
    note = "collectives per rank, including children; ×n: figures per layer"
    yield make_title("Modules", join_notes(note, passes))
    yield render_tree(roots, is_complete=not is_folded)
    yield make_title("By kind and mesh axis", describe_totals(recording, classes))
    yield render_totals(add_roots(roots), classes, ("kind", "axis"))
    yield make_title("Most expensive modules", note_costs(recording, classes))
    yield render_costliest(roots)
    yield make_title("Causes", join_notes(note_lines(recording), passes))
    yield render_causes(recording, classes, limit=_NUM_CAUSES)


def join_notes(*notes: str) -> str:
    """Notes beside a title, those that there are."""
    return "; ".join(filter(None, notes))


def note_costs(recording: Recording, classes: tuple[RankClass, ...]) -> str:
    """What the table of modules by cost says beside its title."""
    busiest = "of the busiest rank" if len(classes) > 1 else ""
    note = 'excluding children; "each" = per layer'
    return join_notes(note, busiest, describe_passes(recording))


def note_lines(recording: Recording) -> str:
    """What the table of causes says beside its title."""
    has_lines = any(call.source is not None for call in recording.collectives)
    return "one source line each" if has_lines else ""


def add_roots(roots: tuple[ModuleNode, ...]) -> Traffic:
    """The root and what belongs to no module, together."""
    totals: Traffic = tuple({} for _ in roots[0].total)
    for root in roots:
        for total, traffic in zip(totals, root.total, strict=True):
            for facet, one in traffic.items():
                total[facet] = total[facet] + one if facet in total else one
    return totals
