"""One subject at a time, as the page in a browser has them: each view a list of sections."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Literal, final, get_args

from rich.console import Group, RenderableType
from rich.text import Text

from shardscope.record import Recording
from shardscope.report.audit import render_audit
from shardscope.report.causes import render_causes
from shardscope.report.costliest import render_costliest
from shardscope.report.coverage import render_coverage
from shardscope.report.diagnosis import render_diagnoses
from shardscope.report.drawings import render_drawings
from shardscope.report.explain import render_explanations, render_stage_times
from shardscope.report.fold import ModuleNode, build_tree, fold_repeated_layers
from shardscope.report.heading import describe_passes, render_heading
from shardscope.report.layout import make_title
from shardscope.report.matrix import render_matrix
from shardscope.report.memory import ESTIMATE, find_worst, render_memory
from shardscope.report.memory_area import MemoryArea
from shardscope.report.mentioned import add_mentioned_modules
from shardscope.report.overview import render_figures
from shardscope.report.parallel import render_parallel
from shardscope.report.parity import render_parity
from shardscope.report.phases import render_phases
from shardscope.report.problems import describe_no_gaps, render_problems
from shardscope.report.ranks import render_ranks
from shardscope.report.slices import render_layout
from shardscope.report.text import View, add_roots, join_notes, note_costs, note_lines
from shardscope.report.timeline import render_timeline
from shardscope.report.totals import describe_totals, render_totals
from shardscope.report.traffic import RankClass, fold_ranks
from shardscope.report.tree import render_tree
from shardscope.report.units import sum_known

__all__ = ["VIEW_NAMES", "Subject", "Views", "render_views"]

Subject = Literal[
    "overview",
    "modules",
    "communication",
    "sharding",
    "coverage",
    "compiler",
    "memory",
    "proof",
]

VIEW_NAMES: dict[str, Subject] = {
    "correctness" if subject == "proof" else subject: subject for subject in get_args(Subject)
}
"""The views by the names that users give them."""

# What to run so that a view has something to show.
_REMEDIES: dict[Subject, str] = {
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
_FIELDS: dict[Subject, tuple[str, ...]] = {
    "modules": ("modules", "collectives"),
    "communication": ("collectives",),
    "sharding": ("layouts",),
    "coverage": ("coverage",),
    "proof": ("parity",),
}
_SILENT = "No collectives were issued while it was traced."
_CUT = "Nothing in this view belongs to matching modules."


def render_views(
    recording: Recording,
    subjects: Sequence[Subject],
    *,
    by: View = "module",
    is_folded: bool = True,
    whole: Recording | None = None,
) -> RenderableType:
    """What ran, then one view after the other; `by` leads in the view of communication.

    `whole` is what the recording was cut from, where it was.
    """
    views = Views(recording, by=by, is_folded=is_folded, whole=whole)
    sections = [render_heading(recording, views.classes)]
    return Group(*sections, *(views.render(subject) for subject in dict.fromkeys(subjects)))


@final
class Views:
    """A recording, and what several views need to know of it, worked out once."""

    def __init__(
        self,
        recording: Recording,
        *,
        by: View = "module",
        is_folded: bool = True,
        whole: Recording | None = None,
    ) -> None:
        self._recording = add_mentioned_modules(recording)
        self._whole = whole
        self._by = by
        self._is_folded = is_folded

    @cached_property
    def classes(self) -> tuple[RankClass, ...]:
        """Ranks that issued the same."""
        return fold_ranks(self._recording)

    def render(self, subject: Subject) -> RenderableType:
        """A view's sections, or one sentence on what would fill it."""
        renderers: dict[Subject, Callable[[], Iterator[RenderableType]]] = {
            "overview": self._render_overview,
            "modules": self._render_modules,
            "communication": self._render_communication,
            "sharding": self._render_sharding,
            "coverage": lambda: render_coverage(self._recording),
            "compiler": self._render_compiler,
            "memory": self._render_memory,
            "proof": self._render_proof,
        }
        sections = list(renderers[subject]())
        return Group(*sections) if sections else Text(f"\n{self._explain_nothing(subject)}")

    def _explain_nothing(self, subject: Subject) -> str:
        if any(getattr(self._whole, field, ()) for field in _FIELDS.get(subject, ())):
            return _CUT
        is_silent = subject == "communication" and "trace" in self._recording.run.instruments
        return _SILENT if is_silent else _REMEDIES[subject]

    @cached_property
    def _roots(self) -> tuple[ModuleNode, ...]:
        roots = build_tree(self._recording, self.classes)
        return tuple(map(fold_repeated_layers, roots)) if self._is_folded else roots

    def _render_overview(self) -> Iterator[RenderableType]:
        yield from render_problems(self._recording)
        if not self._recording.gaps:
            yield Text(describe_no_gaps(self._recording), "dim")
        yield from render_figures(self._recording, self.classes)

    def _render_modules(self) -> Iterator[RenderableType]:
        if not self._roots:
            return
        note = "figures of one rank, including children; ×n: figures per layer"
        yield make_title("Modules", join_notes(note, describe_passes(self._recording)))
        figures = {"holds": _read_held, "at peak": self._read_peak}
        yield render_tree(self._roots, is_complete=not self._is_folded, figures=figures)
        if self._recording.collectives:
            note = note_costs(self._recording, self.classes)
            yield make_title("Most expensive modules", note)
            yield render_costliest(self._roots)

    def _read_peak(self, node: ModuleNode) -> int | None:
        if not self._recording.memory:
            return None
        return self._peaks[node.path] if node.path or node.types else 0

    @cached_property
    def _peaks(self) -> dict[str, int]:
        """Bytes at the peak of the rank that needs most, by module, children included."""
        sums: dict[str, int] = defaultdict(int)
        if self._recording.memory:
            worst = find_worst(self._recording.memory)
            for use in worst.at_peak:
                for path in _list_upwards(use.module):
                    sums[path] += use.num_bytes
        return sums

    def _render_communication(self) -> Iterator[RenderableType]:
        recording, classes = self._recording, self.classes
        if recording.collectives:
            facets = ("kind", "axis") if self._by == "kind" else ("axis", "kind")
            note = describe_totals(recording, classes)
            yield make_title(f"By {facets[0]} and {facets[1]}", note)
            yield render_totals(add_roots(self._roots), classes, (*facets, "phase"))
            yield make_title("Ranks", "identical ranks share a row")
            yield render_ranks(classes)
            yield from render_matrix(recording)
            yield from render_timeline(recording)
            note = join_notes(note_lines(recording), describe_passes(recording))
            yield make_title("Causes", note)
            yield render_causes(recording, classes)
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
            yield make_title("Memory over the step", f"rank {worst.rank}; {ESTIMATE}")
            yield MemoryArea(worst)
        yield from render_memory(self._recording, is_folded=self._is_folded, has_course=False)

    def _render_proof(self) -> Iterator[RenderableType]:
        yield from render_parity(self._recording, is_folded=self._is_folded)
        yield from render_parallel(self._recording, is_folded=self._is_folded)


def _read_held(node: ModuleNode) -> int | None:
    """Bytes of parameters of a module and those below it; None where any was not recorded."""
    sizes = [one.local_bytes for one in node.parameters]
    for child in node.children:
        held = _read_held(child)
        sizes.append(None if held is None else held * child.repeat)
    return sum_known(sizes) if sizes else 0


def _list_upwards(path: str | None) -> Iterator[str]:
    """A module and all above it, the root too."""
    if path is None:
        return
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path
