"""The views of `show`, as on the HTML page: memory, modules, …; a view is a list of sections."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Literal, final, get_args

from rich.console import Group, RenderableType
from rich.text import Text

from shardscope.record import Recording
from shardscope.report.model.memory_peaks import find_worst
from shardscope.report.model.module_tree import ModuleNode, build_tree, fold_repeated_layers
from shardscope.report.model.select import infer_modules
from shardscope.report.model.traffic_totals import (
    IdenticalRanks,
    fold_ranks,
    sum_known,
)
from shardscope.report.text.charts import render_matrix, render_timeline
from shardscope.report.text.checked_ranks import render_checks
from shardscope.report.text.communication import (
    describe_totals,
    render_causes,
    render_costliest,
    render_ranks,
    render_totals,
    render_tree,
)
from shardscope.report.text.compiler import (
    render_diagnoses,
    render_explanations,
    render_stage_times,
)
from shardscope.report.text.correctness import render_parallel, render_parity
from shardscope.report.text.hang import render_hangs
from shardscope.report.text.heading import describe_passes, render_heading
from shardscope.report.text.key_metrics import list_key_metrics
from shardscope.report.text.memory_profile import (
    MemoryArea,
    describe_basis,
    render_memory,
)
from shardscope.report.text.op_coverage import render_coverage
from shardscope.report.text.phase_times import render_phases
from shardscope.report.text.problems import describe_no_gaps, render_problems
from shardscope.report.text.run_comparison import render_comparisons
from shardscope.report.text.shard_drawings import render_drawings, render_layout
from shardscope.report.text.sharding import render_audit
from shardscope.report.text.style import make_text, make_title
from shardscope.report.text.summary import (
    View,
    add_roots,
    join_notes,
    note_costs,
    note_lines,
    render_verdict,
)
from shardscope.report.text.table import Column, ColumnStyle, Grid, Row, narrower_layouts
from shardscope.report.text.tensor_types import render_types

_COLUMNS = {
    "view": Column("view", ColumnStyle.NAME, 13),
    "figure": Column("figure", ColumnStyle.PROSE, 20),
}


def render_key_metrics(
    recording: Recording, rank_sets: tuple[IdenticalRanks, ...]
) -> Iterator[RenderableType]:
    """Render a row for each key metric; nothing if there are none."""
    metrics = list_key_metrics(recording, rank_sets)
    if not metrics:
        return
    yield make_title("Figures", "--view NAME shows more")
    rows: list[Row] = [
        {"view": metric.view, "figure": make_text(metric.words)} for metric in metrics
    ]
    yield Grid(_COLUMNS, rows, narrower_layouts(list(_COLUMNS)))


ViewName = Literal[
    "overview",
    "modules",
    "communication",
    "sharding",
    "coverage",
    "compiler",
    "memory",
    "proof",
]

VIEW_NAMES: dict[str, ViewName] = {
    "correctness" if view_name == "proof" else view_name: view_name
    for view_name in get_args(ViewName)
}
"""The views by the names that users give them."""

# Instruments to run so that a view has content.
_REMEDIES: dict[ViewName, str] = {
    "overview": "",
    "modules": "Modules were not recorded. Run shardscope trace or shardscope audit.",
    "communication": "Collectives were not recorded. Run shardscope trace.",
    "sharding": "Parameters were not recorded. Run shardscope audit.",
    "coverage": "Op coverage was not recorded. Run shardscope coverage.",
    "compiler": "Compilation was not recorded. Run shardscope explain to find graph breaks, or "
    "shardscope diagnose to check results.",
    "memory": "Memory was not recorded. Run shardscope memory.",
    "proof": "Correctness was not checked. Run shardscope parity to compare a parallel model with "
    "a single device, or shardscope parallelize to make one.",
}
_FIELDS: dict[ViewName, tuple[str, ...]] = {
    "modules": ("modules", "collectives"),
    "communication": ("collectives",),
    "sharding": ("layouts",),
    "coverage": ("coverage",),
    "proof": ("parity", "types"),
}
_SILENT = "No collectives were issued while it was traced."
_NOTHING_SELECTED = "Nothing in this view belongs to matching modules."


def render_views(
    recording: Recording,
    view_names: Sequence[ViewName],
    *,
    by: View = "module",
    is_folded: bool = True,
    full_recording: Recording | None = None,
) -> RenderableType:
    """Render the heading, then each view; `by` groups collectives in the communication view.

    `full_recording` is the recording before modules were selected, if they were.
    """
    views = Views(recording, by=by, is_folded=is_folded, full_recording=full_recording)
    sections = [render_heading(recording, views.rank_sets)]
    return Group(*sections, *(views.render(view_name) for view_name in dict.fromkeys(view_names)))


@final
class Views:
    """Renders the views of a recording, and caches what several views need."""

    def __init__(
        self,
        recording: Recording,
        *,
        by: View = "module",
        is_folded: bool = True,
        full_recording: Recording | None = None,
    ) -> None:
        self._recording = infer_modules(recording)
        self._full_recording = full_recording
        self._by = by
        self._is_folded = is_folded

    @cached_property
    def rank_sets(self) -> tuple[IdenticalRanks, ...]:
        """Sets of ranks that issued the same collectives."""
        return fold_ranks(self._recording)

    def render(self, view_name: ViewName) -> RenderableType:
        """Render a view's sections, or a sentence on how to record its data."""
        renderers: dict[ViewName, Callable[[], Iterator[RenderableType]]] = {
            "overview": self._render_overview,
            "modules": self._render_modules,
            "communication": self._render_communication,
            "sharding": self._render_sharding,
            "coverage": lambda: render_coverage(self._recording),
            "compiler": self._render_compiler,
            "memory": self._render_memory,
            "proof": self._render_proof,
        }
        sections = list(renderers[view_name]())
        return Group(*sections) if sections else Text(f"\n{self._explain_nothing(view_name)}")

    def _explain_nothing(self, view_name: ViewName) -> str:
        if any(getattr(self._full_recording, field, ()) for field in _FIELDS.get(view_name, ())):
            return _NOTHING_SELECTED
        is_silent = view_name == "communication" and "trace" in self._recording.run.instruments
        return _SILENT if is_silent else _REMEDIES[view_name]

    @cached_property
    def _roots(self) -> tuple[ModuleNode, ...]:
        roots = build_tree(self._recording, self.rank_sets)
        return tuple(map(fold_repeated_layers, roots)) if self._is_folded else roots

    def _render_overview(self) -> Iterator[RenderableType]:
        yield render_verdict(self._recording, self.rank_sets, self._full_recording)
        yield from render_problems(self._recording)
        if not self._recording.gaps:
            yield Text(describe_no_gaps(self._recording), "dim")
        yield from render_key_metrics(self._recording, self.rank_sets)

    def _render_modules(self) -> Iterator[RenderableType]:
        if not self._roots:
            return
        note = "figures of one rank, including children; ×n: figures per layer"
        yield make_title("Modules", join_notes(note, describe_passes(self._recording)))
        metrics = {"holds": _read_local_bytes, "at peak": self._read_peak}
        yield render_tree(self._roots, is_complete=not self._is_folded, metrics=metrics)
        if self._recording.collectives:
            note = note_costs(self._recording, self.rank_sets)
            yield make_title("Most expensive modules", note)
            yield render_costliest(self._roots)

    def _read_peak(self, node: ModuleNode) -> int | None:
        if not self._recording.memory:
            return None
        return self._peaks[node.path] if node.path or node.types else 0

    @cached_property
    def _peaks(self) -> dict[str, int]:
        """Bytes at the peak of the rank that needs most, by module, including children."""
        sums: dict[str, int] = defaultdict(int)
        if self._recording.memory:
            worst = find_worst(self._recording.memory)
            for use in worst.at_peak:
                for path in _list_upwards(use.module):
                    sums[path] += use.num_bytes
        return sums

    def _render_communication(self) -> Iterator[RenderableType]:
        recording, rank_sets = self._recording, self.rank_sets
        yield from render_hangs(recording)
        if recording.collectives:
            facets = ("kind", "axis") if self._by == "kind" else ("axis", "kind")
            note = describe_totals(recording, rank_sets)
            yield make_title(f"By {facets[0]} and {facets[1]}", note)
            yield render_totals(add_roots(self._roots), rank_sets, (*facets, "phase"))
            yield make_title("Ranks", "identical ranks share a row")
            yield render_ranks(rank_sets)
            yield from render_matrix(recording)
            yield from render_timeline(recording)
            note = join_notes(note_lines(recording), describe_passes(recording))
            yield make_title("Causes", note)
            yield render_causes(recording, rank_sets)
        yield from render_phases(recording)

    def _render_sharding(self) -> Iterator[RenderableType]:
        if any(module.parameters or module.marks for module in self._recording.modules):
            yield from render_drawings(self._recording)
            yield from render_audit(self._recording, is_folded=self._is_folded)
        for layout in self._recording.layouts:
            yield from render_layout(layout, is_complete=not self._is_folded)

    def _render_compiler(self) -> Iterator[RenderableType]:
        yield from render_diagnoses(self._recording)
        yield from render_explanations(self._recording)
        yield from render_stage_times(self._recording)

    def _render_memory(self) -> Iterator[RenderableType]:
        if not self._recording.memory:
            return
        worst = find_worst(self._recording.memory)
        if len(worst.samples) > 1:
            yield make_title("Memory over the step", f"rank {worst.rank}; {describe_basis(worst)}")
            yield MemoryArea(worst)
        yield from render_memory(self._recording, is_folded=self._is_folded, has_course=False)

    def _render_proof(self) -> Iterator[RenderableType]:
        yield from render_parity(self._recording, is_folded=self._is_folded)
        yield from render_types(self._recording, is_folded=self._is_folded)
        yield from render_parallel(self._recording, is_folded=self._is_folded)
        yield from render_comparisons(self._recording)
        yield from render_checks(self._recording)


def _read_local_bytes(node: ModuleNode) -> int | None:
    """Sum local bytes of parameters of a module and its children; None if any was not recorded."""
    sizes = [parameter.local_bytes for parameter in node.parameters]
    for child in node.children:
        size = _read_local_bytes(child)
        sizes.append(None if size is None else size * child.repeat)
    return sum_known(sizes) if sizes else 0


def _list_upwards(path: str | None) -> Iterator[str]:
    """List a module and all its ancestors, including the root."""
    if path is None:
        return
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path
