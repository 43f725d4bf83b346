"""What a recording shows about a run, judged by rules: memory, compiled functions and results.

Each rule has a section in docs/guide/verdict.md; `traffic_judgements.py` has those on collectives,
and `verdict.py` puts all results in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum

from msgspec import Struct

from shardscope.record import (
    FINE,
    TOLERABLE,
    Check,
    CheckOutcome,
    Condition,
    Diagnosis,
    Explanation,
    FallbackKind,
    Finding,
    MemoryKind,
    MemoryProfile,
    OpVerdict,
    Parallelization,
    Parity,
    Recording,
    RunComparison,
    Severity,
    Source,
)
from shardscope.record.finding_rules import FINDING_RULES
from shardscope.record.units import describe_all, format_bytes, plural
from shardscope.report.model.holdings import sum_holdings
from shardscope.report.model.memory_peaks import (
    find_worst,
    most_bytes,
)
from shardscope.report.text.compiler import fold_explanations, name_condition
from shardscope.report.text.hang import summarize_hang
from shardscope.report.text.memory_profile import describe_room
from shardscope.report.text.run_comparison import summarize_comparison
from shardscope.report.text.style import format_share

TIGHT = 0.9  # share of the device's memory


class Judgement(StrEnum):
    """How good what was recorded is, the worst first."""

    WRONG = "wrong"  # it computes something else
    FAILS = "fails"  # it raises, hangs, or does not fit
    SUSPECT = "suspect"  # it may be wrong or fail, which depends on what was intended
    COSTLY = "costly"  # it works, and costs more than it needs
    UNKNOWN = "not judged"  # nothing that was recorded tells
    FINE = "fine"


class Concern(Struct, frozen=True, kw_only=True):
    """A judgement on one part of a recording.

    `fact` and `reason` are clauses without a full stop: what was recorded, and why that is bad or
    is not. `rule` is a heading of docs/guide/verdict.md, or the rule of a finding. `module` is a
    module's name, folded if it stands for several layers. `remedy` is what to do about it, in
    sentences; empty if nothing is known or needed.
    """

    judgement: Judgement
    rule: str
    fact: str
    reason: str
    view: str = ""
    module: str | None = None
    source: Source | None = None
    remedy: str = ""

    @property
    def words(self) -> str:
        """Fact and reason in one clause."""
        return f"{self.fact}: {self.reason}" if self.reason else self.fact


def judge_memory(recording: Recording) -> Iterator[Concern]:
    """Judge the rank that needs most memory."""
    if not recording.memory:
        return
    worst = find_worst(recording.memory)
    device, needed = worst.device_bytes, worst.needed_bytes
    if device is None or needed is None:
        judgement, rule = Judgement.UNKNOWN, "device-not-given"
        reason = "whether that fits is not known, as the memory of the device was not given"
    else:
        reason = describe_room(device, needed).plain.replace(": ", " and ")
        is_tight = needed > TIGHT * device
        judgement = Judgement.COSTLY if is_tight else Judgement.FINE
        rule = "little-memory-left" if is_tight else "fits"
        if needed > device:
            judgement, rule = Judgement.FAILS, "does-not-fit"
    yield Concern(
        judgement=judgement,
        rule=rule,
        fact=_describe_peak(worst),
        reason=reason,
        view="memory",
        module=worst.peak_module or None,
    )


def _describe_peak(profile: MemoryProfile) -> str:
    most = format_bytes(most_bytes(profile))
    sizes: Counter[str] = Counter()
    for use in profile.at_peak:
        sizes[use.kind] += use.num_bytes
    is_first = (profile.first_peak_bytes or 0) > profile.peak_bytes
    if not sizes or is_first:
        when = "in the first step" if is_first else f"in {profile.peak_phase}"
        return f"Memory peaks at {most} on rank {profile.rank:,}, {when}"
    kind, num_bytes = sizes.most_common(1)[0]
    where = f" of {profile.peak_module}" if profile.peak_module else ""
    share = format_share(num_bytes, profile.peak_bytes)
    noun = "gathered parameters" if kind == MemoryKind.GATHERED else kind.replace("_", " ")
    verb = "take" if noun.endswith("s") else "takes"
    return (
        f"{noun.capitalize()} {verb} {share} of the peak of {most} on rank "
        f"{profile.rank:,}, in {profile.peak_phase}{where}"
    )


def judge_sharding(recording: Recording) -> Iterator[Concern]:
    """Judge an audit that has found nothing; its errors and warnings are judged by themselves."""
    holdings = sum_holdings(recording)
    has_problems = any(
        finding.severity is not Severity.INFO
        and (rule := FINDING_RULES.get(finding.rule)) is not None
        and rule.instrument == "audit"
        for finding in recording.findings
    )
    if "audit" in recording.run.instruments and holdings is not None and not has_problems:
        yield Concern(
            judgement=Judgement.FINE,
            rule="sharding",
            fact=f"The audit of {plural(holdings.num_parameters, 'parameter')} found no mistake",
            reason="",
            view="sharding",
        )


def judge_programs(recording: Recording) -> Iterator[Concern]:
    """Judge compiled functions, op coverage and parallel programs, apart from their results."""
    for explanation, _ in fold_explanations(recording.explanations):
        yield from _judge_explanation(explanation)
    yield from _judge_coverage(recording)
    for program in recording.parallel:
        replicated = [item for item in program.fallbacks if item.kind is FallbackKind.REPLICATE]
        if replicated:
            worst = max(replicated, key=lambda item: item.size_bytes)
            moved = format_bytes(sum(item.size_bytes for item in replicated))
            yield Concern(
                judgement=Judgement.COSTLY,
                rule="fallbacks",
                fact=f"{plural(len(replicated), 'op')} of {program.program} ran on gathered "
                f"inputs, such as {worst.op}; {moved} moved",
                reason="every rank computes all of them",
                view="proof",
                module=worst.module or None,
                source=worst.source,
                remedy=worst.remedy,
            )


def _judge_explanation(explanation: Explanation) -> Iterator[Concern]:
    name = explanation.target or "the compiled function"
    breaks, skips = explanation.break_sites, explanation.skipped_frames
    counts = {
        "line that breaks its graph": len(breaks),
        "function that runs eagerly": len(skips),
        "recompilation": explanation.num_recompiles,
    }
    if any(counts.values()):
        words = [_count(count, noun) for noun, count in counts.items() if count]
        yield Concern(
            judgement=Judgement.COSTLY,
            rule="graph-breaks",
            fact=f"{name} has {', '.join(words)}",
            reason="each graph is optimized by itself, and Python runs between them",
            view="compiler",
            source=breaks[0].source if breaks else next((skip.source for skip in skips), None),
        )
    elif explanation.num_graphs and not explanation.failure:
        yield Concern(
            judgement=Judgement.FINE,
            rule="graph-breaks",
            fact=f"{name} is compiled to {plural(explanation.num_graphs, 'graph')} without a break",
            reason="",
            view="compiler",
        )


_PLURALS = {
    "line that breaks its graph": "lines that break its graph",
    "function that runs eagerly": "functions that run eagerly",
}


def _count(count: int, noun: str) -> str:
    return f"{count:,} {_PLURALS[noun]}" if count > 1 and noun in _PLURALS else plural(count, noun)


# The worst first, with what it means for an op.
_COVERED = {
    OpVerdict.WRONG: (Judgement.WRONG, "gives other numbers on sharded inputs"),
    OpVerdict.MISSING: (Judgement.FAILS, "raises an error on its inputs as they are sharded"),
    OpVerdict.REPLICATED: (Judgement.COSTLY, "runs only with every input replicated"),
}


def _judge_coverage(recording: Recording) -> Iterator[Concern]:
    """Judge the first level; without a plan nothing is known of the placements that are used."""
    for covered in recording.coverage[:1]:
        worst = next((v for v in _COVERED if any(op.verdict is v for op in covered.ops)), None)
        num_sharded = sum(op.verdict is not OpVerdict.LOCAL for op in covered.ops)
        if worst is None and not num_sharded:
            judgement, ops = Judgement.UNKNOWN, list(covered.ops[:1])
            fact = f"No input of {plural(len(covered.ops), 'op')} is sharded ({covered.level})"
            reason = "coverage had nothing to test"
        elif worst is None:
            judgement = Judgement.FINE
            runs = describe_all(num_sharded, "op", "run", "with sharded inputs")
            fact = f"{runs} ({covered.level})"
            ops, reason = list(covered.ops[:1]), ""
        else:
            judgement, clause = _COVERED[worst]
            ops = [op for op in covered.ops if op.verdict is worst]
            more = f" (and {plural(len(ops) - 1, 'other op')})" if len(ops) > 1 else ""
            fact, reason = f"{ops[0].op}{more} {clause}", ""
            if not covered.has_plan:
                judgement = Judgement.UNKNOWN
                reason = "without a plan every sharding was tried, used or not"
        if covered.ops:
            yield Concern(
                judgement=judgement,
                rule="coverage",
                fact=fact,
                reason=reason,
                view="coverage",
                source=next(iter(ops[0].sources), None) if worst else None,
                remedy=ops[0].remedy if worst else "",
            )


def judge_results(recording: Recording) -> Iterator[Concern]:
    """Judge whether results are those of a single device, or of eager execution."""
    for parity in recording.parity:
        yield _judge_parity(parity, recording.findings)
    yield from map(_judge_program, recording.parallel)
    for comparison in recording.comparisons:
        yield _judge_comparison(comparison, recording.findings)
    for diagnosis in recording.diagnoses:
        facts = (item for item in recording.findings if item.fact == diagnosis.fact)
        finding = next(facts, None)
        yield _judge_diagnosis(diagnosis, finding.remedy if finding else "")


def judge_hangs(recording: Recording) -> Iterator[Concern]:
    """Judge what the files of a hang show."""
    for hang in recording.hangs:
        first = next(iter(recording.findings), None)
        judgement = Judgement.FAILS if hang.is_hang else Judgement.FINE
        if hang.slow_ranks:
            judgement = Judgement.COSTLY
        yield Concern(
            judgement=judgement,
            rule="hang",
            fact=summarize_hang(hang).rstrip("."),
            reason="",
            view="communication",
            source=None if first is None else first.source,
            remedy="" if first is None else first.remedy,
        )


def judge_checks(recording: Recording) -> Iterator[Concern]:
    """Judge whether ranks diverge, as they are run or under a variation of what some see."""
    for check in recording.checks:
        finding = next(iter(recording.findings), None)
        judgement, fact, reason = _judge_check(check, finding)
        yield Concern(
            judgement=judgement,
            rule="check",
            fact=fact,
            reason=reason,
            view="proof",
            source=None if finding is None else finding.source,
            remedy="" if finding is None else finding.remedy,
        )


def _judge_check(check: Check, finding: Finding | None) -> tuple[Judgement, str, str]:
    """The judgement on a check with this finding first, a fact, and what was not tried."""
    if finding is not None and finding.severity is Severity.ERROR:
        return Judgement.FAILS, "Ranks diverge", finding.fact.rstrip(".")
    outcomes = [variation.outcome for variation in check.variations]
    num_left = outcomes.count(CheckOutcome.NOT_TRIED)
    reason = f"{plural(num_left, 'variation')} not tried" if num_left else ""
    conditions = [v.condition for v in check.variations if v.outcome is CheckOutcome.DIVERGED]
    if finding is not None and conditions:
        more = f", and under {len(conditions) - 1:,} more of " * (len(conditions) > 1)
        more += f"{len(outcomes) - num_left:,} conditions that were tried" if more else ""
        return Judgement.SUSPECT, f"Ranks diverge if {conditions[0]}{more}", reason
    num_tried = len(outcomes) - num_left
    varied = f", also under {plural(num_tried, 'variation')} of what some see" if num_tried else ""
    steps = plural(check.num_steps, "step")
    fact = f"All ranks that were run issue the same collectives in {steps}{varied}"
    return Judgement.FINE, fact, reason


_CAUSES = {
    "missing-reduction": "a missing reduction",
    "double-reduction": "a double reduction",
    "scaled": "a wrong scale",
    "wrong-slice": "a wrong slice",
    "permuted": "a wrong order",
    "wrong-group": "a wrong group",
    "wrong-dim": "a wrong dim",
    "broken-tie": "a broken tie",
    "randomness": "random numbers",
    "weights": "unequal weights",
    "norm": "a wrong norm",
    "clipping": "wrong clipping",
    "overwritten": "a value overwritten in place",
    "lost-hook": "a lost hook",
    "out-of-sync": "a missing synchronization",
    "rounding": "a lower precision",
    "stale": "a stale or missing value",
}
"""What a finding of `parity` says in a few words, by the end of its rule."""


def _judge_parity(parity: Parity, findings: Sequence[Finding]) -> Concern:
    wrong = [tensor for tensor in parity.tensors if tensor.agreement not in TOLERABLE]
    count = plural(len(parity.tensors), "tensor")
    if not wrong:
        is_empty = not parity.tensors
        return Concern(
            judgement=Judgement.UNKNOWN if is_empty else Judgement.FINE,
            rule="parity",
            fact="Parity compared nothing"
            if is_empty
            else f"{describe_all(len(parity.tensors), 'tensor', 'agree')} with a single device",
            reason="the step produced no tensors" if is_empty else "",
            view="proof",
        )
    first = next(iter(parity.divergences), None)
    # What a step computes outside the modules has a finding, but no divergence.
    cause = next((item for item in findings if item.rule.startswith("parity-")), None)
    where = f", first in {first.module or 'the model itself'}" if first else ""
    suspect = first.suspect.replace("_", "-") if first else ""
    if first is None and cause is not None:
        where = f", first in step {wrong[0].step}" if wrong[0].step else ""
        suspect = cause.rule.removeprefix("parity-")
    return Concern(
        judgement=Judgement.WRONG,
        rule="parity",
        fact=f"{len(wrong):,} of {count} differ from a single device{where}",
        reason=f"likely {_CAUSES[suspect]}" if suspect in _CAUSES else "the cause is not known",
        view="proof",
        module=(first.module or None) if first else None,
        source=first.source if first else cause.source if cause else None,
        remedy=first.remedy if first else cause.remedy if cause else "",
    )


def _judge_comparison(comparison: RunComparison, findings: Sequence[Finding]) -> Concern:
    judgement = Judgement.FINE
    if comparison.deviations:
        judgement = Judgement.WRONG
    elif comparison.incomparable or not comparison.num_compared:
        judgement = Judgement.UNKNOWN
    first = next(iter(findings), None) if comparison.deviations else None
    return Concern(
        judgement=judgement,
        rule="runs",
        fact=summarize_comparison(comparison).rstrip("."),
        reason="",
        view="proof",
        remedy=first.remedy if first else "",
    )


def _judge_program(program: Parallelization) -> Concern:
    name, count = f"the partitioned {program.program}", plural(len(program.verdicts), "tensor")
    differing = [verdict for verdict in program.verdicts if verdict.agreement not in FINE]
    if differing:
        judgement = Judgement.WRONG
        fact = f"{len(differing):,} of {count} of {name} differ from the original"
    elif program.verdicts:
        agreement = describe_all(len(program.verdicts), "tensor", "agree", f"of {name}")
        judgement, fact = Judgement.FINE, f"{agreement} with the original"
    else:
        judgement, fact = Judgement.UNKNOWN, f"Nothing of {name} was compared with the original"
    return Concern(
        judgement=judgement,
        rule="parallel-program",
        fact=fact,
        reason="" if program.verdicts else program.unverified.rstrip("."),
        view="proof",
    )


_WRONG = (Condition.WRONG_RESULT, Condition.NAN, Condition.MISSING_ERROR)


def _judge_diagnosis(diagnosis: Diagnosis, remedy: str) -> Concern:
    condition = diagnosis.condition
    if condition in _WRONG:
        judgement = Judgement.WRONG
    elif condition is Condition.NONDETERMINISTIC:
        judgement = Judgement.UNKNOWN
    else:
        judgement = Judgement.FAILS if condition.is_bad else Judgement.FINE
    suspect = next(iter(diagnosis.suspects), None)
    where = f", at {suspect.op}" if suspect else ""
    return Concern(
        judgement=judgement,
        rule="compiled-result",
        fact=f"{diagnosis.target} under {diagnosis.backend}: {name_condition(condition)}{where}",
        reason=diagnosis.fact.rstrip(".") if condition.is_bad else "",
        view="compiler",
        module=suspect.module if suspect else None,
        source=suspect.source if suspect else None,
        remedy=remedy if condition.is_bad else "",
    )
