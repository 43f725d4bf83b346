"""The overview of a page: the run, its findings, and the metrics of each instrument."""

from __future__ import annotations

from typing import Any

from sample_recordings import (
    make_diagnosis,
    make_holdings,
    make_llama,
    make_parallel,
    make_ranks,
    make_recording,
    make_run,
)
from shardscope.record import (
    Axis,
    Condition,
    Finding,
    Gap,
    MemoryProfile,
    Module,
    Parameter,
    Phase,
    RankSpan,
    Recording,
    Severity,
    Source,
)
from shardscope.report.html.html import build_page
from shardscope.report.html.page import Fact


def facts(recording: Recording) -> dict[str, Fact]:
    return {fact.label: fact for fact in build_page(recording).facts}


def finding(subject: str = "x", **changes: Any) -> Finding:
    fields = {"rule": "odd", "severity": Severity.WARNING, "fact": "it is odd", "remedy": "mend it"}
    return Finding(subject=subject, **(fields | changes))


def test_the_title_names_the_model_and_its_mesh(llama: Recording) -> None:
    run = build_page(llama).run
    assert run.title == "Llama on dp=128 × tp=8"
    assert (run.ranks, run.world, run.world_size) == ("rank 0 of 1,024", "simulated", 1024)
    assert [(axis.name, axis.size) for axis in run.mesh] == [("dp", 128), ("tp", 8)]


def test_findings_come_gravest_first() -> None:
    severities = (Severity.INFO, Severity.ERROR, Severity.WARNING)
    recording = make_recording(
        findings=tuple(finding(str(severity), severity=severity) for severity in severities)
    )
    assert [finding.severity for finding in build_page(recording).findings] == [
        "error",
        "warning",
        "info",
    ]


def test_findings_that_differ_by_layer_or_rank_are_merged() -> None:
    line = Source(file="a.py", line=3)
    modules = tuple(
        Module(name=f"layers.{i}.up", type="Linear", ranks=(RankSpan(0),)) for i in range(4)
    )
    findings = tuple(
        finding(f"layers.{layer}.up", fact=f"layers.{layer}.up is odd", rank=rank, source=line)
        for layer in range(4)
        for rank in (1, 2)
    )
    page = build_page(make_recording(findings=(*findings, finding("other")), modules=modules))
    first, second = page.findings
    assert (first.subject, first.fact) == ("layers.0-3.up", "layers.0-3.up is odd")
    assert (first.count, first.ranks, second.count, second.ranks) == (8, "ranks 1-2", 1, "")
    (alone,) = build_page(make_recording(findings=findings[:1], modules=modules)).findings
    assert alone.ranks == "rank 1"
    assert page.modules.path[first.module] == "layers.0.up"
    assert (first.source, second.source, second.module) == (0, -1, -1)


def test_findings_with_stars_and_endless_numbers_are_kept() -> None:
    subjects = ("layers.*.up", "layers.0.up", f"layers.{'9' * 5000}.up", "layers.5.up")
    page = build_page(make_recording(findings=tuple(map(finding, subjects))))
    assert sum(finding.count for finding in page.findings) == 4


def test_gaps_of_several_ranks_are_merged() -> None:
    gaps = tuple(Gap(place="FSDP", fact="unread", rank=rank, is_loss=True) for rank in range(3))
    page = build_page(make_recording(gaps=(*gaps, Gap(place="here", fact="odd", rank=5))))
    first, second = page.gaps
    assert (first.place, first.ranks, first.is_loss) == ("FSDP", "ranks 0-2", True)
    assert (second.place, second.ranks, second.is_loss) == ("here", "rank 5", False)


def test_traffic_is_shown_per_rank() -> None:
    values = facts(make_ranks(4, [{"wire_bytes": 1024, "input_bytes": 512}] * 3))
    assert values["collectives per rank"].value == "3"
    assert values["collectives per rank"].note == "all ranks identical"
    assert values["sent per rank"].value == "3.00 KiB"
    assert values["sent per rank"].view == "communication"


def test_a_trace_without_collectives_is_stated() -> None:
    run = make_run(instruments=("trace",))
    assert facts(make_recording(run=run))["collectives per rank"].value == "0"


def test_memory_says_whether_it_fits() -> None:
    profile = MemoryProfile(
        rank=0,
        peak_bytes=2**30,
        peak_order=0,
        peak_phase=Phase.BACKWARD,
        device_bytes=2**31,
        needed_bytes=3 * 2**30,
    )
    fact = facts(make_recording(memory=(profile,)))["peak memory of a rank"]
    assert (fact.value, fact.view) == ("1.00 GiB", "memory")
    assert "does not fit in 2.00 GiB, 1.00 GiB too much" in fact.note
    assert "estimated" in fact.note


def test_parameters_are_those_of_the_fullest_rank() -> None:
    def hold(name: str, ranks: tuple[RankSpan, ...], local: int, placement: str) -> Module:
        weight = Parameter(
            name="w",
            shape=(4,),
            local_shape=(4,),
            dtype="float32",
            placements=(placement,),
            axes=("tp",),
            global_bytes=100,
            local_bytes=local,
        )
        return Module(name=name, type="M", ranks=ranks, parameters=(weight,))

    modules = (
        hold("both", (RankSpan(0, 2),), 10, "Shard(0)"),
        hold("first", (RankSpan(0),), 40, "Replicate"),
        hold("second", (RankSpan(1),), 30, "Shard(0)"),
    )
    run = make_run(world_size=2, ranks=(0, 1), axes=(Axis(name="tp", size=2),))
    fact = facts(make_recording(modules=modules, run=run))["parameters"]
    assert (fact.value, fact.note) == ("300 B", "50 B on a rank, 40 B of it replicated")


def test_every_instrument_has_its_fact() -> None:
    values = facts(make_holdings())
    assert values["op calls that shard (exported)"].value == "55%"
    assert values["parity"].value == "84 of 182 tensors differ"
    values = facts(make_parallel())
    assert values["parallel program"].view == "proof"
    bad = make_diagnosis(Condition.WRONG_RESULT, "f")
    values = facts(make_recording(diagnoses=(bad,)))
    assert values["f under f"].value == "wrong result"


def test_facts_lead_to_views_that_have_something() -> None:
    recordings = (make_llama(num_layers=1), make_holdings(), make_parallel())
    for recording in recordings:
        page = build_page(recording)
        for fact in page.facts:
            assert not fact.view or getattr(page, fact.view)
