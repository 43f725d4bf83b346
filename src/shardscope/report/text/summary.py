"""The summary of a recording for the terminal: run, problems, collectives and other instruments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.text import Text

from shardscope.record import Recording, guard_line
from shardscope.report.model.module_tree import (
    ModuleNode,
    Traffic,
    build_tree,
    fold_repeated_layers,
)
from shardscope.report.model.traffic_totals import (
    IdenticalRanks,
    fold_ranks,
)
from shardscope.report.text.checked_ranks import render_checks
from shardscope.report.text.communication import (
    describe_totals,
    render_causes,
    render_costliest,
    render_ranks,
    render_totals,
    render_tree,
)
from shardscope.report.text.compiler import render_diagnoses, render_explanations
from shardscope.report.text.correctness import render_parallel, render_parity
from shardscope.report.text.hang import render_hangs
from shardscope.report.text.heading import describe_passes, render_heading
from shardscope.report.text.memory_profile import render_memory
from shardscope.report.text.op_coverage import render_coverage
from shardscope.report.text.phase_times import render_phases
from shardscope.report.text.problems import render_problems
from shardscope.report.text.run_comparison import render_comparisons
from shardscope.report.text.shard_drawings import render_layout
from shardscope.report.text.sharding import render_audit
from shardscope.report.text.style import make_text, make_title
from shardscope.report.text.tensor_types import render_types
from shardscope.report.text.verdict import judge

View = Literal["module", "axis", "kind", "cause"]

_NUM_CAUSES = 8
_EMPTY = "No collectives were recorded"
_LOST = "No collectives are left in this recording: see the gaps above."


def render_summary(
    recording: Recording,
    *,
    by: View = "module",
    is_folded: bool = True,
    full_recording: Recording | None = None,
) -> RenderableType:
    """Render the most important parts; `by` chooses how collectives are grouped.

    `full_recording` is the recording before modules were selected, if they were.
    """
    return Group(*_render_sections(recording, by, is_folded, full_recording))


def render_verdict(
    recording: Recording,
    rank_sets: Sequence[IdenticalRanks],
    full_recording: Recording | None = None,
) -> RenderableType:
    """Render the verdict; of a part of the modules nothing would be known about what dominates."""
    if full_recording is not None and full_recording is not recording:
        recording, rank_sets = full_recording, fold_ranks(full_recording)
    return make_text(judge(recording, rank_sets).sentence, "bold")


def render_text(
    recording: Recording, *, by: View = "module", is_folded: bool = True, width: int = 80
) -> str:
    """Render the summary as plain text, for files, tests and notebooks."""
    return render_plain(render_summary(recording, by=by, is_folded=is_folded), width=width)


def render_plain(thing: RenderableType, *, width: int = 80) -> str:
    """Render anything printable as text, without colours and trailing blanks."""
    console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(thing)
    return "\n".join(guard_line(line.rstrip()) for line in capture.get().splitlines()) + "\n"


def _render_sections(
    recording: Recording, by: View, is_folded: bool, full_recording: Recording | None
) -> Iterator[RenderableType]:
    rank_sets = fold_ranks(recording)
    yield render_heading(recording, rank_sets)
    yield render_verdict(recording, rank_sets, full_recording)
    yield from render_problems(recording)
    sections = list(_render_instruments(recording, is_folded))
    if recording.collectives:
        yield from _render_collectives(recording, rank_sets, by, is_folded)
    elif any(gap.is_loss for gap in recording.gaps):
        yield Text(f"\n{_LOST}")
    elif not sections:
        yield Text(f"\n{_explain_emptiness(recording)}")
    yield from sections


def _explain_emptiness(recording: Recording) -> str:
    """Explain why a recording has no collectives."""
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
    recording: Recording, rank_sets: tuple[IdenticalRanks, ...], by: View, is_folded: bool
) -> Iterator[RenderableType]:
    if len(rank_sets) > 1:
        yield make_title("Ranks", "identical ranks share a row")
        yield render_ranks(rank_sets)
    if by == "cause":
        yield make_title("By cause", join_notes(note_lines(recording), describe_passes(recording)))
        yield render_causes(recording, rank_sets)
        return
    roots = build_tree(recording, rank_sets)
    if by == "module":
        yield from _render_modules(recording, rank_sets, roots, is_folded)
    else:
        yield make_title(f"By {by}", describe_totals(recording, rank_sets))
        second_facet = "kind" if by == "axis" else "axis"
        yield render_totals(add_roots(roots), rank_sets, (by, second_facet, "phase"))


def _render_instruments(recording: Recording, is_folded: bool) -> Iterator[RenderableType]:
    """Render the results of instruments other than traces of collectives."""
    if recording.hangs:
        yield from render_hangs(recording)
    if recording.spans:
        yield from render_phases(recording)
    if recording.coverage:
        yield from render_coverage(recording)
    if "audit" in recording.run.instruments:
        yield from render_audit(recording, is_folded=is_folded)
    for layout in recording.layouts:
        yield from render_layout(layout, is_complete=not is_folded)
    if recording.memory:
        yield from render_memory(recording, is_folded=is_folded)
    if recording.parallel:
        yield from render_parallel(recording, is_folded=is_folded)
    if recording.parity:
        yield from render_parity(recording, is_folded=is_folded)
    if recording.comparisons:
        yield from render_comparisons(recording)
    yield from render_checks(recording)
    if recording.types:
        yield from render_types(recording, is_folded=is_folded)
    if recording.diagnoses:
        yield from render_diagnoses(recording)
    if recording.explanations:
        yield from render_explanations(recording)


def _render_modules(
    recording: Recording,
    rank_sets: tuple[IdenticalRanks, ...],
    roots: tuple[ModuleNode, ...],
    is_folded: bool,
) -> Iterator[RenderableType]:
    if is_folded:
        roots = tuple(fold_repeated_layers(root) for root in roots)
    passes = describe_passes(recording)
    note = "collectives per rank, including children; ×n: figures per layer"
    yield make_title("Modules", join_notes(note, passes))
    yield render_tree(roots, is_complete=not is_folded)
    yield make_title("By kind and mesh axis", describe_totals(recording, rank_sets))
    yield render_totals(add_roots(roots), rank_sets, ("kind", "axis"))
    yield make_title("Most expensive modules", note_costs(recording, rank_sets))
    yield render_costliest(roots)
    yield make_title("Causes", join_notes(note_lines(recording), passes))
    yield render_causes(recording, rank_sets, limit=_NUM_CAUSES)


def join_notes(*notes: str) -> str:
    """Join the notes that are not empty."""
    return "; ".join(filter(None, notes))


def note_costs(recording: Recording, rank_sets: tuple[IdenticalRanks, ...]) -> str:
    """Return the note for the title of the table of expensive modules."""
    busiest = "of the busiest rank" if len(rank_sets) > 1 else ""
    note = 'excluding children; "each" = per layer'
    return join_notes(note, busiest, describe_passes(recording))


def note_lines(recording: Recording) -> str:
    """Return the note for the title of the table of causes."""
    has_lines = any(call.source is not None for call in recording.collectives)
    return "one source line each" if has_lines else ""


def add_roots(roots: tuple[ModuleNode, ...]) -> Traffic:
    """Add the traffic of the root and of calls outside any module."""
    totals: Traffic = tuple({} for _ in roots[0].total)
    for root in roots:
        for total, traffic in zip(totals, root.total, strict=True):
            for facet, root_total in traffic.items():
                total[facet] = total[facet] + root_total if facet in total else root_total
    return totals
