"""A page from a recording: one view after the other, all pointing to the same modules and lines."""

from __future__ import annotations

from shardscope.record import Recording
from shardscope.report.mentioned import add_mentioned_modules
from shardscope.report.page.comparison import build_comparison
from shardscope.report.page.inert import make_page_inert
from shardscope.report.page.records import Page
from shardscope.report.page.views.communication import make_communication
from shardscope.report.page.views.compiler import make_compiler
from shardscope.report.page.views.coverage import make_coverage
from shardscope.report.page.views.memory import make_memory
from shardscope.report.page.views.module_tree import ModuleTree
from shardscope.report.page.views.modules import make_modules
from shardscope.report.page.views.overview import make_facts, make_run
from shardscope.report.page.views.problems import make_findings, make_gaps
from shardscope.report.page.views.proof import make_proof
from shardscope.report.page.views.sharding import make_sharding
from shardscope.report.traffic import fold_ranks

__all__ = ["build_page"]


def build_page(
    recording: Recording,
    *,
    against: Recording | None = None,
    titles: tuple[str, str] = ("before", "after"),
) -> Page:
    """All that a page shows of a recording, compared with an earlier one if there is one."""
    recording = add_mentioned_modules(recording)
    classes = fold_ranks(recording)
    tree = ModuleTree(recording, classes)
    index = tree.index
    page = Page(
        run=make_run(recording),
        facts=make_facts(recording, classes),
        findings=make_findings(recording, index, tree.subjects),
        gaps=make_gaps(recording),
        modules=make_modules(recording, tree),
        communication=make_communication(recording, classes, index),
        sharding=make_sharding(recording, index),
        coverage=make_coverage(recording, index),
        compiler=make_compiler(recording, index),
        memory=make_memory(recording, index),
        proof=make_proof(recording, index),
        comparison=build_comparison(against, recording, index.positions, titles=titles)
        if against
        else None,
        sources=index.sources(),  # last: views ask for lines as they are made
    )
    return make_page_inert(page)
