"""What was found, and what was not understood."""

from __future__ import annotations

from compared_recordings import lines, list_changes, make_module
from sample_recordings import make_recording
from shardscope.record import Finding, Gap, Severity
from shardscope.report.compare.changes import Area
from shardscope.report.compare.compare_recordings import compare


def test_findings_are_new_gone_or_say_something_else():
    def finding(subject: str, fact: str, severity: Severity = Severity.WARNING, rank: int = 0):
        return Finding(
            rule="r", severity=severity, subject=subject, fact=fact, remedy="Do.", rank=rank
        )

    before = make_recording(findings=(finding("a", "1 MiB"), finding("b", "x"), finding("c", "y")))
    after = make_recording(
        findings=(
            finding("c", "y", rank=3),
            finding("a", "2 MiB"),
            finding("d", "z", Severity.ERROR),
            finding("e", "z", Severity.INFO),
        )
    )
    assert list_changes(before, after, Area.FINDINGS) == [
        "added worse | r of d: – → error: z",
        "changed other | r of a: warning: 1 MiB → warning: 2 MiB",
        "added other | r of e: – → info: z",
        "gone better | r of b: warning: x → –",
    ]


def test_findings_of_ranks_count_once_and_those_of_layers_fold():
    modules = tuple(make_module(f"layers.{index}.up") for index in range(3))
    findings = tuple(
        Finding(
            rule="r",
            severity=Severity.ERROR,
            subject=f"layers.{index}.up.weight",
            fact=f"layers.{index}.up.weight is whole",
            remedy="Cut it.",
            rank=rank,
        )
        for index in range(3)
        for rank in range(2)
    )
    before, after = (
        make_recording(modules=modules),
        make_recording(modules=modules, findings=findings),
    )
    assert list_changes(before, after, Area.FINDINGS) == [
        "added worse | layers.{0…2}.up ×3: r of weight: – → error: layers.{0…2}.up.weight is whole"
    ]
    (total,) = (total for total in compare(before, after).totals if total.area is Area.FINDINGS)
    assert (total.before, total.after) == ("none", "3 errors")


def test_a_finding_of_a_pattern_is_of_the_modules_that_it_matches():
    modules = tuple(make_module(f"layers.{index}.up") for index in range(3))
    finding = Finding(
        rule="r", severity=Severity.WARNING, subject="layers.*.up", fact="slow", remedy="Do."
    )
    before = make_recording(modules=modules)
    after = make_recording(modules=modules, findings=(finding,))
    (change,) = (row for row in compare(before, after).rows if row.area is Area.FINDINGS)
    assert change.modules == ("layers.0.up", "layers.1.up", "layers.2.up")
    assert (change.path, change.what) == ("layers.{0…2}.up", "r")


def test_gaps_are_compared_and_lost_records_noted():
    before = make_recording(gaps=(Gap(place="p", fact="f", rank=0),))
    after = make_recording(
        gaps=(Gap(place="p", fact="f", rank=1), Gap(place="q", fact="g", is_loss=True))
    )
    changes = compare(before, after)
    assert lines(changes, Area.GAPS) == ["added worse | q: – → g"]
    assert changes.notes == (
        "records of the second recording were lost: differences may come from that",
    )
