"""What ran, and the figures that a reader wants first."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.record import Recording
from shardscope.report.figures import list_figures
from shardscope.report.heading import describe_reality, describe_scope, name_mesh, name_ranks
from shardscope.report.layout import plural
from shardscope.report.page.records import Fact, RunFacts
from shardscope.report.problems import describe_checks, describe_no_gaps
from shardscope.report.traffic import RankClass

__all__ = ["make_facts", "make_run"]

_MAX_TITLE = 120


def make_run(recording: Recording) -> RunFacts:
    """What ran."""
    run = recording.run
    return RunFacts(
        title=_name_page(recording),
        mesh=run.axes,
        world_size=run.world_size,
        ranks=name_ranks(run),
        reality=describe_reality(recording),
        torch_version=run.torch_version,
        shardscope_version=run.shardscope_version,
        command=run.command,
        instruments=run.instruments,
        checks=describe_checks(recording),
        no_gaps=describe_no_gaps(recording),
        scope=describe_scope(recording),
        num_forwards=run.num_forwards,
    )


def _name_page(recording: Recording) -> str:
    """`Llama on dp=128 × tp=8`."""
    what = next(filter(None, _name_subjects(recording)), "A recording")
    mesh = name_mesh(recording.run.axes)
    if not mesh and recording.run.world_size > 1:
        mesh = plural(recording.run.world_size, "rank")
    return (f"{what} on {mesh}" if mesh else what)[:_MAX_TITLE]


def _name_subjects(recording: Recording) -> Iterator[str]:
    yield from (module.type for module in recording.modules if not module.name)
    yield from (one.program for one in recording.parallel)
    yield from (one.target for one in recording.explanations)
    yield from (one.target for one in recording.diagnoses)
    yield from (layout.name for layout in recording.layouts)


def make_facts(recording: Recording, classes: tuple[RankClass, ...]) -> tuple[Fact, ...]:
    """Figures that the recording has, each with the view that has more of it."""
    return tuple(
        Fact(label=card.label, value=card.value, note=card.note, view=figure.view)
        for figure in list_figures(recording, classes)
        for card in figure.cards
    )
