"""Reads figures from a recording: communication, memory, sharding and phases; and from the
comparison of two recordings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from shardscope.record import (
    MemoryKind,
    MemoryProfile,
    Recording,
    Slice,
    Source,
    TensorLayout,
    format_ranks,
)
from shardscope.record.base import name_line
from shardscope.record.layer_names import fold_layers, join_layers
from shardscope.record.recording import name_axis
from shardscope.record.traffic import (
    TrafficTotals,
    count_traffic,
    sum_traffic,
)
from shardscope.record.units import plural
from shardscope.report.compare.changes import Change, Changes, hide_input_rows, name_path
from shardscope.report.model.holdings import sum_holdings
from shardscope.report.model.memory_peaks import find_worst
from shardscope.report.model.module_tree import NO_MODULE, build_tree, fold_repeated_layers
from shardscope.report.model.traffic_totals import (
    IdenticalRanks,
    find_busiest_ranks,
)
from shardscope.report.result.check_figures import read_checks
from shardscope.report.result.correctness_figures import (
    read_compiler,
    read_coverage,
    read_diagnoses,
    read_parallel,
    read_parity,
    read_runs,
    read_types,
)
from shardscope.report.result.figures import (
    CauseFigures,
    ChangeFigures,
    CommunicationFigures,
    ComparisonFigures,
    Figures,
    LayoutFigures,
    LineMemory,
    MemoryFigures,
    ModuleMemory,
    ModuleTraffic,
    ParameterFigures,
    PhaseFigures,
    ShardingFigures,
    SliceFigures,
    StopFigures,
    TrafficFigures,
    read_code,
)
from shardscope.report.result.hang_figures import read_hangs
from shardscope.report.text.communication import Reason, gather_reasons, list_costs
from shardscope.report.text.heading import describe_scope
from shardscope.report.text.memory_profile import (
    ModuleUse,
    gather_module_uses,
)
from shardscope.report.text.phase_times import gather_phases
from shardscope.report.text.sharding import ParameterRow, list_parameter_rows

_MAX_MODULES = 3  # that are named beside a cause
_MAX_NUMBERS = 6  # of layers that are not consecutive


def read_figures(recording: Recording, rank_sets: tuple[IdenticalRanks, ...]) -> Figures:
    """Read all figures that the recording has."""
    return Figures(
        communication=_read_communication(recording, rank_sets),
        memory=_read_memory(recording),
        sharding=_read_sharding(recording),
        layouts=tuple(map(_read_layout, recording.layouts)),
        parity=read_parity(recording),
        runs=read_runs(recording),
        checks=read_checks(recording),
        hangs=read_hangs(recording),
        types=read_types(recording),
        parallel=read_parallel(recording),
        coverage=read_coverage(recording),
        compiler=read_compiler(recording),
        diagnoses=read_diagnoses(recording),
        phases=_read_phases(recording),
        stops=_read_stops(recording),
    )


def _read_communication(
    recording: Recording, rank_sets: tuple[IdenticalRanks, ...]
) -> CommunicationFigures | None:
    if not recording.collectives:
        return None
    busiest = rank_sets[find_busiest_ranks(rank_sets)]
    total = sum_traffic(map(count_traffic, busiest.calls))
    roots = map(fold_repeated_layers, build_tree(recording, rank_sets))
    return CommunicationFigures(
        scope=describe_scope(recording),
        rank=busiest.ranks[0].first,
        count=total.count,
        input_bytes=total.input_bytes,
        wire_bytes=total.wire_bytes,
        num_rank_sets=len(rank_sets),
        totals=_sum_by_phase(busiest, recording.run.world_size),
        causes=tuple(map(_read_cause, gather_reasons(recording, rank_sets))),
        modules=tuple(
            ModuleTraffic(
                module=cost.name,
                count=cost.own.count * cost.repeat,
                wire_bytes=cost.wire_bytes,
                repeat=cost.repeat,
            )
            for cost in list_costs(tuple(roots))
        ),
    )


def _sum_by_phase(rank_set: IdenticalRanks, world_size: int) -> tuple[TrafficFigures, ...]:
    """Sum the collectives of a rank by phase, mesh axis and kind, most bytes first."""
    totals: dict[tuple[str, str, str], TrafficTotals] = defaultdict(TrafficTotals)
    for call in rank_set.calls:
        totals[str(call.phase), name_axis(call, world_size), str(call.kind)] += count_traffic(call)
    ordered = sorted(totals.items(), key=lambda item: -item[1].wire_bytes)
    return tuple(
        TrafficFigures(
            phase=phase,
            axis=axis,
            kind=kind,
            count=total.count,
            input_bytes=total.input_bytes,
            wire_bytes=total.wire_bytes,
        )
        for (phase, axis, kind), total in ordered
    )


def _read_cause(reason: Reason) -> CauseFigures:
    names = [NO_MODULE if owner is None else owner or "the model" for owner in reason.owners]
    return CauseFigures(
        cause=reason.words,
        collective=reason.label,
        count=reason.busiest.count,
        wire_bytes=reason.busiest.wire_bytes,
        is_implicit=reason.is_implicit,
        line=name_line(reason.source),
        code=read_code(reason.source),
        modules=_fold_names(names),
    )


def _fold_names(names: list[str]) -> tuple[str, ...]:
    """Join names that differ in layer numbers only; of many, the first few and how many more."""
    folded: dict[str, list[str]] = defaultdict(list)
    for name in names:
        folded[fold_layers(name)].append(name)
    joined = [join_layers(same, _name_numbers) for same in folded.values()]
    more = [f"… {len(joined) - _MAX_MODULES} more"] if len(joined) > _MAX_MODULES else []
    return (*joined[:_MAX_MODULES], *more)


def _name_numbers(numbers: Sequence[int]) -> str:
    """`0-79` for consecutive layer numbers, `{0,2,5}` for a few others, `*` for many."""
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return f"{{{','.join(map(str, numbers))}}}" if len(numbers) <= _MAX_NUMBERS else "*"


def _read_memory(recording: Recording) -> MemoryFigures | None:
    if not recording.memory:
        return None
    worst = find_worst(recording.memory)
    kinds = {
        str(kind): sum(use.num_bytes for use in worst.at_peak if use.kind is kind)
        for kind in MemoryKind
    }
    uses = gather_module_uses(worst, is_folded=True).items()
    is_compared = worst.device_bytes is not None and worst.needed_bytes is not None
    return MemoryFigures(
        rank=worst.rank,
        num_ranks=len(recording.memory),
        peak_bytes=worst.peak_bytes,
        peak_phase=str(worst.peak_phase),
        peak_module=worst.peak_module,
        first_peak_bytes=worst.first_peak_bytes,
        reserved_bytes=worst.reserved_bytes,
        needed_bytes=worst.needed_bytes,
        device_bytes=worst.device_bytes,
        fits=(worst.needed_bytes or 0) <= (worst.device_bytes or 0) if is_compared else None,
        kinds={kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes},
        modules=tuple(
            _read_module_memory(name, use)
            for name, use in sorted(uses, key=lambda item: -item[1].total())
        ),
        lines=_read_line_memory(worst),
    )


def _read_module_memory(name: str | None, use: ModuleUse) -> ModuleMemory:
    return ModuleMemory(
        module=NO_MODULE if name is None else join_layers(list(use.names)) or "the model",
        num_bytes=use.total(),
        kinds={str(kind): num_bytes for kind, num_bytes in use.by_kind.items()},
        repeat=max(1, len(use.names)),
    )


def _read_line_memory(profile: MemoryProfile) -> tuple[LineMemory, ...]:
    """Sum what is in use at the peak by the line that allocated it, most bytes first."""
    table = profile.allocations
    if table is None:
        return ()
    kinds: dict[Source | None, Counter[str]] = defaultdict(Counter)
    columns = (table.start, table.end, table.source, table.kind, table.num_bytes)
    for start, end, source, kind, num_bytes in zip(*columns, strict=True):
        if start <= profile.peak_order < end:
            line = table.sources[source] if source >= 0 else None
            kinds[line][str(list(MemoryKind)[kind])] += num_bytes
    ordered = sorted(kinds.items(), key=lambda item: -item[1].total())
    return tuple(
        LineMemory(
            num_bytes=by_kind.total(),
            kinds=dict(by_kind.most_common()),
            line=name_line(line),
            code=read_code(line),
        )
        for line, by_kind in ordered
    )


def _read_sharding(recording: Recording) -> ShardingFigures | None:
    holdings = sum_holdings(recording)
    if holdings is None:
        return None
    # Without an audit the table is of little interest, and long.
    is_audited = "audit" in recording.run.instruments
    rows = list_parameter_rows(recording, is_folded=True) if is_audited else ()
    parameters = tuple(map(_read_parameter, rows))
    return ShardingFigures(
        num_parameters=holdings.num_parameters,
        global_bytes=holdings.global_bytes,
        local_bytes=holdings.local_bytes,
        replicated_bytes=holdings.replicated_bytes,
        parameters=tuple(
            sorted(parameters, key=lambda entry: -(entry.local_bytes or 0) * entry.repeat)
        ),
    )


def _read_parameter(row: ParameterRow) -> ParameterFigures:
    parameter = row.parameter
    return ParameterFigures(
        name=row.name,
        shape=parameter.shape,
        placements=dict(zip(parameter.axes, parameter.placements, strict=False)),
        global_bytes=parameter.global_bytes,
        local_bytes=parameter.local_bytes,
        repeat=row.count,
        is_buffer=parameter.is_buffer,
    )


def _read_layout(layout: TensorLayout) -> LayoutFigures:
    axes = (axis.name for axis in layout.axes)
    return LayoutFigures(
        name=layout.name,
        shape=layout.shape,
        placements=dict(zip(axes, layout.placements, strict=False)),
        slices=tuple(
            SliceFigures(ranks=format_ranks(piece.ranks), indices=_name_indices(piece, layout))
            for piece in layout.slices
        ),
    )


def _name_indices(piece: Slice, layout: TensorLayout) -> str:
    dims = []
    for stretches, size in zip(piece.stretches, layout.shape, strict=True):
        is_full = stretches == ((0, size),)
        ranges = "+".join(f"{start}:{stop}" for start, stop in stretches)
        dims.append(":" if is_full else ranges)
    return ", ".join(dims)


def _read_phases(recording: Recording) -> tuple[PhaseFigures, ...]:
    return tuple(
        PhaseFigures(
            name=line.name,
            clock=line.device,
            rank=line.slowest.rank,
            count=line.slowest.count,
            total_ns=line.slowest.total_ns,
            self_ns=line.slowest.self_ns,
            is_simulated=recording.run.is_simulated,
        )
        for line in gather_phases(recording)
    )


def _read_stops(recording: Recording) -> tuple[StopFigures, ...]:
    return tuple(
        StopFigures(
            rank=stop.rank,
            error=stop.error or "",
            open_phases=tuple(begin.name for begin in stop.open_spans),
        )
        for stop in recording.stops
    )


def read_changes(changes: Changes) -> ComparisonFigures:
    """Read the changes between two recordings, worse ones first."""
    rows = sorted(hide_input_rows(changes.rows), key=_order_change)
    return ComparisonFigures(
        before=changes.before,
        after=changes.after,
        num_changes=sum(row.repeat for row in changes.rows),
        num_worse=sum(row.repeat for row in changes.rows if row.is_worse),
        totals={
            str(total.area): (total.before, total.after)
            for total in changes.totals
            if changes.of(total.area)
        },
        changes=tuple(map(_read_change, rows)),
        notes=changes.notes,
    )


def summarize_changes(changes: Changes) -> str:
    """The number of changes, and the totals of the areas that changed, on one line."""
    num_changes = sum(row.repeat for row in changes.rows)
    num_worse = sum(row.repeat for row in changes.rows if row.is_worse)
    worse = f"{num_worse:,} worse" if num_worse else "none worse"
    head = f"{plural(num_changes, 'change')}, {worse}" if num_changes else "no change"
    totals = [
        f"{total.area}: {total.before} → {total.after}"
        for total in changes.totals
        if changes.of(total.area)
    ]
    return "; ".join([f"{changes.before} → {changes.after}: {head}", *totals])


def _order_change(row: Change) -> tuple[bool, bool]:
    return not row.is_worse, row.is_worse is None


def _read_change(row: Change) -> ChangeFigures:
    return ChangeFigures(
        area=str(row.area),
        what=row.what,
        before=row.before,
        after=row.after,
        unit=str(row.unit),
        module=None if row.path is None else name_path(row.path),
        repeat=row.repeat,
        is_worse=row.is_worse,
        because=row.because,
    )
