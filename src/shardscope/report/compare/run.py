"""What ran, in two recordings."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.record import RunInfo, format_ranks
from shardscope.report.compare.changes import Area, AreaTotal, Change, Unit, Value
from shardscope.report.compare.facts import Fact, match_facts

__all__ = ["compare_runs", "total_runs"]


def compare_runs(before: RunInfo, after: RunInfo) -> Iterator[Change]:
    """World, mesh, ranks, versions and instruments; not the command, which names files."""
    yield from match_facts(Area.RUN, *map(_list_facts, (before, after)))


def total_runs(before: RunInfo, after: RunInfo) -> AreaTotal:
    """The mesh, or how many ranks there are where there is none."""
    return AreaTotal(area=Area.RUN, before=_name(before), after=_name(after))


def _name(run: RunInfo) -> str:
    return _describe_mesh(run) or f"{run.world_size:,} ranks"


def _describe_mesh(run: RunInfo) -> str:
    return " × ".join(f"{axis.name}={axis.size:,}" for axis in run.axes)


def _list_facts(run: RunInfo) -> Iterator[Fact]:
    facts: dict[str, Value] = {
        "world size": run.world_size,
        "mesh": _describe_mesh(run),
        "ranks recorded": format_ranks(run.ranks),
        "process group": "simulated" if run.is_simulated else "real",
        "device": run.device_type or "",
        "torch": run.torch_version,
        "shardscope": run.shardscope_version,
        "instruments": ", ".join(run.instruments),
        "forward passes": "" if run.num_forwards is None else run.num_forwards,
    }
    for what, value in facts.items():
        if value != "":
            unit = Unit.WORDS if isinstance(value, str) else Unit.COUNT
            yield Fact(what=what, value=value, unit=unit)
