"""What is compared, in the order of the work: who knows something of it, and who compares it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

from shardscope.record import Recording
from shardscope.report.compare.changes import AreaTotal, Change
from shardscope.report.compare.compiler import (
    compare_diagnoses,
    compare_explanations,
    total_diagnoses,
    total_explanations,
)
from shardscope.report.compare.coverage import compare_coverage, total_coverage
from shardscope.report.compare.holdings import compare_holdings, total_holdings
from shardscope.report.compare.memory import compare_memory, total_memory
from shardscope.report.compare.pair import Pair
from shardscope.report.compare.problems import (
    compare_findings,
    compare_gaps,
    total_findings,
    total_gaps,
)
from shardscope.report.compare.proof import (
    compare_parity,
    compare_programs,
    total_parity,
    total_programs,
)
from shardscope.report.compare.run import compare_runs, total_runs
from shardscope.report.compare.traffic import compare_traffic, total_traffic

__all__ = ["SECTIONS", "Section"]


class Section(Struct, frozen=True, kw_only=True):
    """An instrument's part of a recording. It is compared if both recordings have it."""

    name: str
    is_known: Callable[[Recording], bool]
    compare: Callable[[Pair], Iterable[Change]]
    total: Callable[[Pair], Iterable[AreaTotal]]
    has_ranks: bool = False  # whether it is compared rank by rank


def _is_traced(recording: Recording) -> bool:
    """Where nobody says who looked, it was a trace; a step may be silent."""
    instruments = recording.run.instruments
    return bool(recording.collectives) or not instruments or "trace" in instruments


SECTIONS = (
    Section(
        name="run",
        is_known=lambda one: True,
        compare=lambda pair: compare_runs(*pair.take(lambda one: one.run)),
        total=lambda pair: [total_runs(*pair.take(lambda one: one.run))],
    ),
    Section(
        name="findings",
        is_known=lambda one: True,
        compare=lambda pair: compare_findings(*pair.both, pair.names),
        total=lambda pair: [total_findings(*pair.both)],
    ),
    Section(
        name="gaps",
        is_known=lambda one: True,
        compare=lambda pair: compare_gaps(*pair.take(lambda one: one.gaps)),
        total=lambda pair: [total_gaps(*pair.take(lambda one: one.gaps))],
    ),
    Section(
        name="collectives",
        is_known=_is_traced,
        compare=lambda pair: compare_traffic(*pair.calls, pair.common),
        total=lambda pair: total_traffic(*pair.calls),
        has_ranks=True,
    ),
    Section(
        name="memory",
        is_known=lambda one: bool(one.memory),
        compare=lambda pair: compare_memory(
            *pair.take(lambda one: one.memory), pair.common, pair.names
        ),
        total=lambda pair: [total_memory(*pair.take(lambda one: one.memory))],
        has_ranks=True,
    ),
    Section(
        name="modules",
        is_known=lambda one: bool(one.modules),
        compare=lambda pair: compare_holdings(*pair.holdings),
        total=lambda pair: [total_holdings(*pair.holdings)],
    ),
    Section(
        name="explanations",
        is_known=lambda one: bool(one.explanations),
        compare=lambda pair: compare_explanations(*pair.take(lambda one: one.explanations)),
        total=lambda pair: [total_explanations(*pair.take(lambda one: one.explanations))],
    ),
    Section(
        name="coverage",
        is_known=lambda one: bool(one.coverage),
        compare=lambda pair: compare_coverage(*pair.take(lambda one: one.coverage), pair.names),
        total=lambda pair: [total_coverage(*pair.take(lambda one: one.coverage))],
    ),
    Section(
        name="parity",
        is_known=lambda one: bool(one.parity or one.parallel),
        compare=lambda pair: compare_parity(*pair.both, pair.names),
        total=lambda pair: [total_parity(*pair.both)],
    ),
    Section(
        name="parallel programs",
        is_known=lambda one: bool(one.parallel),
        compare=lambda pair: compare_programs(*pair.take(lambda one: one.parallel), pair.names),
        total=lambda pair: [total_programs(*pair.take(lambda one: one.parallel))],
    ),
    Section(
        name="diagnoses",
        is_known=lambda one: bool(one.diagnoses),
        compare=lambda pair: compare_diagnoses(*pair.take(lambda one: one.diagnoses)),
        total=lambda pair: [total_diagnoses(*pair.take(lambda one: one.diagnoses))],
    ),
)
