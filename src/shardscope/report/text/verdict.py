"""The verdict on a recording: what dominates, whether it is bad, and what was not checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from shardscope.record import (
    CheckOutcome,
    Compiled,
    Finding,
    MarkKind,
    MemoryProfile,
    Recording,
    Severity,
    compress_ranks,
    count_ranks,
    format_ranks,
)
from shardscope.record.finding_rules import FINDING_RULES, Effect
from shardscope.record.units import plural
from shardscope.report.model.memory_peaks import find_worst
from shardscope.report.model.traffic_totals import IdenticalRanks
from shardscope.report.text.judgements import (
    Concern,
    Judgement,
    judge_checks,
    judge_hangs,
    judge_memory,
    judge_programs,
    judge_results,
    judge_sharding,
)
from shardscope.report.text.traffic_judgements import MIN_SHARE, judge_traffic

_BAD = (Judgement.WRONG, Judgement.FAILS, Judgement.SUSPECT, Judgement.COSTLY)

NOTHING_JUDGED = "nothing"
"""The rule of the only concern of a recording to which no rule applies."""

_LABELS = {
    Judgement.WRONG: "Wrong result",
    Judgement.FAILS: "Does not run",
    Judgement.SUSPECT: "Suspicious",
    Judgement.COSTLY: "Costs more than it needs",
    Judgement.UNKNOWN: "Not judged",
    Judgement.FINE: "As expected",
}

_RULE_LABELS = {"contract-exceeded": "Exceeds its contract"}
"""Labels of rules for which that of the judgement says too little."""

_PARALLEL = (
    "parity",
    "trace",
    "audit",
    "coverage",
    "check",
)  # instruments that a single rank needs not
_COMPILER = ("explain", "diagnose")


class Check(Struct, frozen=True, kw_only=True):
    """An instrument, the question that it answers, and whether it ran.

    `is_needless` means that the question does not arise: of a single rank, how it is sharded.
    """

    instrument: str
    subject: str
    question: str
    has_run: bool = False
    is_needless: bool = False


# The most important first.
_CHECKS = (
    Check(
        instrument="parity",
        subject="numerics",
        question="Does it compute what a single device does?",
    ),
    Check(
        instrument="trace",
        subject="communication",
        question="Which collectives does a step issue?",
    ),
    Check(instrument="memory", subject="memory", question="Does a step fit on the GPU?"),
    Check(instrument="audit", subject="sharding", question="Is the model sharded as intended?"),
    Check(instrument="coverage", subject="op coverage", question="Which ops cannot run sharded?"),
    Check(
        instrument="check",
        subject="hangs",
        question="Could its ranks wait for each other forever?",
    ),
    Check(instrument="explain", subject="graph breaks", question="What breaks compiled graphs?"),
    Check(
        instrument="diagnose",
        subject="compiled numerics",
        question="Does the compiled function compute the same?",
    ),
)
# The verdict does not name these: they find in advance what a trace observes.
_UNNAMED = ("coverage", "check")


class RunVerdict(Struct, frozen=True, kw_only=True):
    """What a recording shows, the worst first.

    `concerns` has at least one; the first is what the verdict is about. `unchecked` are short
    names of what no instrument looked at.
    """

    concerns: tuple[Concern, ...]
    unchecked: tuple[str, ...] = ()

    @property
    def judgement(self) -> Judgement:
        """The judgement on what the verdict is about."""
        return self.concerns[0].judgement

    @property
    def label(self) -> str:
        """The judgement on what the verdict is about, in two words or three."""
        return label_concern(self.concerns[0])

    @property
    def unchecked_words(self) -> str:
        """`Not checked: numerics, memory.`; empty if everything was."""
        return f"Not checked: {', '.join(self.unchecked)}." if self.unchecked else ""

    def with_concern(self, concern: Concern) -> RunVerdict:
        """Return the verdict with one more concern, in its place."""
        return replace(self, concerns=_sort_concerns((concern, *self.concerns)))

    @property
    def sentence(self) -> str:
        """All of it: `As expected: FSDP unshard … Not checked: numerics.`"""
        return f"{self.label}: {self.concerns[0].words}. {self.unchecked_words}".strip()


def label_concern(concern: Concern) -> str:
    """Return the judgement of a concern as the page and the terminal show it."""
    return _RULE_LABELS.get(concern.rule, _LABELS[concern.judgement])


def judge(recording: Recording, rank_sets: Sequence[IdenticalRanks]) -> RunVerdict:
    """Judge a recording of any instruments by the rules of docs/guide/verdict.md."""
    concerns = [
        *judge_hangs(recording),
        *judge_checks(recording),
        *judge_results(recording),
        *(() if recording.hangs else _judge_findings(recording)),
        *_judge_completeness(recording),
        *_drop_repeated(judge_traffic(recording, rank_sets)),
        *judge_memory(recording),
        *judge_programs(recording),
        *judge_sharding(recording),
    ]
    concerns = [_add_remedy(concern, recording.findings) for concern in concerns]
    return RunVerdict(
        concerns=_sort_concerns(concerns) or (_describe_nothing(recording),),
        unchecked=tuple(list_unchecked(recording)),
    )


# Where nothing is bad, what costs most is the subject of the verdict.
_ORDER = ("records", "comparison", "silent-axis", "dominating-cause")


def _sort_concerns(concerns: Sequence[Concern]) -> tuple[Concern, ...]:
    """Sort what is bad by how bad it is; then what is fine or not judged."""

    def rank(concern: Concern) -> tuple[int, int]:
        if concern.judgement in _BAD:
            return _BAD.index(concern.judgement), 0
        return len(_BAD), _ORDER.index(concern.rule) if concern.rule in _ORDER else len(_ORDER)

    return tuple(sorted(concerns, key=rank))


def _drop_repeated(concerns: Iterator[Concern]) -> Iterator[Concern]:
    """Leave out the dominating cause where a rule before it was about the same bytes."""
    has_implicit = False
    for concern in concerns:
        has_implicit |= concern.rule == "implicit-redistribution"
        is_repeated = concern.rule == "dominating-cause" and concern.judgement is Judgement.COSTLY
        if not (has_implicit and is_repeated):
            yield concern


# Rules of findings on what other judgements are about.
_JUDGED = {
    "implicit-gather",
    "implicit-all-to-all",
    "out-of-memory",
    "memory-advice",
    "graph-break",
    "skipped-frame",
    "recompiles",
}
_JUDGED_INSTRUMENTS = ("parity", "parallelize", "diagnose", "compare", "check")
_VIEWS = {
    "audit": "sharding",
    "trace": "communication",
    "hang": "communication",
    "explain": "compiler",
}


def _judge_findings(recording: Recording) -> Iterator[Concern]:
    """Judge errors and warnings, those of one rule together."""
    by_rule: dict[tuple[str, Severity], list[Finding]] = {}
    for finding in recording.findings:
        known = FINDING_RULES.get(finding.rule)
        is_judged = known is not None and known.instrument in _JUDGED_INSTRUMENTS
        if finding.severity is Severity.INFO or finding.rule in _JUDGED or is_judged:
            continue
        by_rule.setdefault((finding.rule, finding.severity), []).append(finding)
    for (rule, severity), group in by_rule.items():
        first, known = group[0], FINDING_RULES.get(rule)
        effect = known.effect if known else Effect.COST
        if effect is Effect.COST and _is_negligible(group, recording.memory):
            continue
        more = f" (and {len(group) - 1:,} more)" if len(group) > 1 else ""
        yield Concern(
            judgement=_judge_effect(effect, severity),
            rule=rule,
            fact=f"{first.subject}{more}: {first.fact.rstrip('.')}",
            reason="",
            view=_VIEWS.get(known.instrument, "") if known else "",
            source=first.source,
            remedy=first.remedy,
        )


def _is_negligible(findings: Sequence[Finding], profiles: Sequence[MemoryProfile]) -> bool:
    """Whether findings cost memory, as far as is known, and a small share of the peak only."""
    costs: Counter[int | None] = Counter()
    for finding in findings:
        if finding.memory_bytes is None or not profiles:
            return False
        costs[finding.rank] += finding.memory_bytes
    return max(costs.values()) < MIN_SHARE * find_worst(profiles).peak_bytes


# Rules of findings that say what to do about what another rule judges, the most urgent first.
_REMEDIES = {
    "implicit-redistribution": ("implicit-gather", "implicit-all-to-all"),
    "does-not-fit": ("out-of-memory", "memory-advice"),
    "little-memory-left": ("memory-advice",),
    "graph-breaks": ("graph-break", "skipped-frame", "recompiles"),
}


def _add_remedy(concern: Concern, findings: Sequence[Finding]) -> Concern:
    """Take the remedy of a finding on the same, if the concern is bad and has none."""
    if concern.remedy or concern.judgement not in _BAD:
        return concern
    remedies = (
        finding.remedy
        for rule in _REMEDIES.get(concern.rule, ())
        for finding in findings
        if finding.rule == rule
    )
    return replace(concern, remedy=next(remedies, ""))


def _judge_effect(effect: Effect, severity: Severity) -> Judgement:
    if effect in (Effect.COST, Effect.NOTE):
        return Judgement.COSTLY
    if severity is Severity.WARNING:
        return Judgement.SUSPECT
    return Judgement.WRONG if effect is Effect.WRONG_RESULT else Judgement.FAILS


def _judge_completeness(recording: Recording) -> Iterator[Concern]:
    """Ranks that stopped, and records that were lost: what is missing may have happened."""
    for stop in recording.stops:
        if stop.error is not None:
            yield Concern(
                judgement=Judgement.FAILS,
                rule="stopped",
                fact=f"Rank {stop.rank:,} stopped early",
                reason=f"it raised {stop.error}",
            )
            break
    else:
        if recording.stops:
            ranks = format_ranks(compress_ranks(sorted(stop.rank for stop in recording.stops)))
            yield Concern(
                judgement=Judgement.UNKNOWN,
                rule="records",
                fact=f"The recording of rank {ranks} stops before the step was over",
                reason="it was killed, or is still running",
            )
    num_lost = sum(gap.is_loss for gap in recording.gaps)
    if num_lost:
        yield Concern(
            judgement=Judgement.UNKNOWN,
            rule="records",
            fact=f"Records were lost ({plural(num_lost, 'gap')})",
            reason="figures are incomplete, and what is missing may have happened",
        )


def _describe_nothing(recording: Recording) -> Concern:
    is_traced = "trace" in recording.run.instruments
    return Concern(
        judgement=Judgement.UNKNOWN,
        rule=NOTHING_JUDGED,
        fact="No collectives were issued" if is_traced else "No rule applies to this recording",
        reason="",
    )


def list_unchecked(recording: Recording) -> Iterator[str]:
    """Name what no instrument looked at, and what is missing from those that did."""
    for check in list_checks(recording):
        if not check.has_run and not check.is_needless and check.instrument not in _UNNAMED:
            yield check.subject
    run = recording.run
    num_ranks = count_ranks(run.ranks)
    if recording.collectives and num_ranks < run.world_size:
        yield f"{run.world_size - num_ranks:,} of {run.world_size:,} ranks"
    outcomes = [item.outcome for check in recording.checks for item in check.variations]
    if num_left := outcomes.count(CheckOutcome.NOT_TRIED):
        yield plural(num_left, "variation")
    if recording.gaps:
        yield plural(len({(gap.place, gap.fact) for gap in recording.gaps}), "gap")


def list_checks(recording: Recording) -> tuple[Check, ...]:
    """List all instruments, and whether each has run or is needless."""
    run = recording.run
    has_run = {*run.instruments, *_infer_instruments(recording)}
    is_parallel = run.world_size > 1 or bool(run.axes)
    is_compiled = bool(recording.explanations) or _uses_compiler(recording)
    return tuple(
        replace(
            check,
            has_run=check.instrument in has_run,
            is_needless=(check.instrument in _PARALLEL and not is_parallel)
            or (check.instrument in _COMPILER and not is_compiled),
        )
        for check in _CHECKS
    )


def _infer_instruments(recording: Recording) -> Iterator[str]:
    """Name instruments whose results are there: old recordings do not list them."""
    records = {
        "trace": recording.collectives,
        "memory": recording.memory,
        "coverage": recording.coverage,
        "parity": recording.parity or any(program.verdicts for program in recording.parallel),
        "explain": recording.explanations,
        "diagnose": recording.diagnoses,
        "check": recording.checks,
    }
    yield from (instrument for instrument, results in records.items() if results)


def _uses_compiler(recording: Recording) -> bool:
    return any(
        mark.kind is MarkKind.COMPILED for module in recording.modules for mark in module.marks
    ) or any(isinstance(call.cause, Compiled) for call in recording.collectives)
