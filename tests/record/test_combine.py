"""What several instruments found out about one program becomes one recording."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sample_recordings import make_collective, make_run
from shardscope.errors import MergeError
from shardscope.record import (
    Coverage,
    Finding,
    Level,
    MemoryProfile,
    Module,
    Parameter,
    Phase,
    RankSpan,
    Recording,
    Severity,
    merge,
)

WEIGHT = Parameter(name="weight", shape=(4,), local_shape=(4,), dtype="float32")


def _record(instrument: str, *, world_size: int = 4, ranks=(0,), **content) -> Recording:
    run = replace(make_run(world_size=world_size, ranks=ranks), instruments=(instrument,))
    return Recording(run=run, **content)


def _module(name: str, *parameters: Parameter) -> Module:
    return Module(name=name, type="Linear", ranks=(RankSpan(0),), parameters=parameters)


TRACE = _record(
    "trace",
    collectives=(make_collective(rank=0, order=0, owner="up"),),
    modules=(_module(""), _module("up", WEIGHT)),
)
AUDIT = _record(
    "audit",
    modules=(_module(""), _module("up", replace(WEIGHT, live_name="_orig_mod.up.weight"))),
    findings=(
        Finding(rule="r", severity=Severity.WARNING, subject="up", fact="whole", remedy="cut it"),
    ),
)
MEMORY = _record(
    "memory",
    memory=(MemoryProfile(rank=0, peak_bytes=7, peak_order=1, peak_phase=Phase.FORWARD),),
)
COVERAGE = _record(
    "coverage",
    world_size=2,
    coverage=(Coverage(rank=0, level=Level.EXPORTED, axes=(), has_plan=False),),
)


def test_each_instruments_findings_are_there_and_the_trace_says_what_ran():
    combined = merge([COVERAGE, MEMORY, AUDIT, TRACE])
    assert combined.run == replace(TRACE.run, instruments=("audit", "coverage", "memory", "trace"))
    assert combined.collectives == TRACE.collectives
    assert combined.memory == MEMORY.memory
    assert combined.coverage == COVERAGE.coverage
    assert combined.findings == AUDIT.findings
    assert combined.modules == AUDIT.modules  # which knows more of the same
    assert combined.gaps == ()


def test_their_order_does_not_matter():
    parts = [TRACE, AUDIT, MEMORY, COVERAGE]
    assert merge(parts) == merge(parts[::-1])


def test_ranks_are_joined_first():
    second = replace(TRACE.collectives[0], rank=1)
    traces = [TRACE, _record("trace", ranks=(1,), collectives=(second,))]
    combined = merge([*traces, MEMORY])
    assert [collective.rank for collective in combined.collectives] == [0, 1]
    assert combined.memory == MEMORY.memory
    assert [gap.fact for gap in combined.gaps] == ["no recording of 2 of 4 ranks: 2-3"]


def test_modules_that_the_audit_does_not_know_are_kept_if_they_issued_collectives():
    spoke = replace(TRACE, modules=(*TRACE.modules, _module("late"), _module("silent")))
    call = make_collective(rank=0, order=1, owner="late")
    combined = merge([replace(spoke, collectives=(*TRACE.collectives, call)), AUDIT])
    assert [module.name for module in combined.modules] == ["", "up", "late"]


def test_a_memory_profile_of_another_mesh_is_refused():
    other = replace(MEMORY, run=replace(MEMORY.run, world_size=8))
    with pytest.raises(MergeError, match=r"trace is of a world of 4 ranks, memory of 8. Record"):
        merge([TRACE, other])


def test_two_traces_under_different_instruments_are_refused():
    both = replace(TRACE, run=replace(TRACE.run, instruments=("trace", "audit")))
    with pytest.raises(MergeError, match=r"more than one of these recordings has collectives"):
        merge([TRACE, both])
