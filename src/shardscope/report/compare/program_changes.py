"""Compares the runs, findings, gaps, parity verdicts and parallel programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from shardscope.record import (
    FINE,
    Agreement,
    Axis,
    Fallback,
    Finding,
    Gap,
    Inserted,
    Parallelization,
    Placed,
    Recording,
    RunInfo,
    Severity,
    TensorVerdict,
    format_ranks,
)
from shardscope.record.patterns import is_pattern, matches_name
from shardscope.record.units import plural
from shardscope.report.compare.changes import Area, AreaTotal, Change, Unit, Value
from shardscope.report.compare.facts import CleanNames, Fact, match_facts


def compare_runs(before: RunInfo, after: RunInfo) -> Iterator[Change]:
    """Compare world, mesh, ranks, versions and instruments; not the command, which names files."""
    yield from match_facts(Area.RUN, *map(_list_facts, (before, after)))


def total_runs(before: RunInfo, after: RunInfo) -> AreaTotal:
    """Name the mesh, or the number of ranks if there is no mesh."""
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
    for label, value in facts.items():
        if value != "":
            unit = Unit.WORDS if isinstance(value, str) else Unit.COUNT
            yield Fact(what=label, value=value, unit=unit)


_BADNESS = {Severity.ERROR: 2.0, Severity.WARNING: 1.0, Severity.INFO: 0.0}


def compare_findings(
    before: Recording, after: Recording, names: tuple[CleanNames, CleanNames]
) -> Iterator[Change]:
    """Match findings with equal text first, then those with the same rule and subject."""
    first, second = (
        list(_list_findings(recording.findings, clean))
        for recording, clean in zip((before, after), names, strict=True)
    )
    unchanged = {_identify(fact) for fact in first} & {_identify(fact) for fact in second}
    remaining = [
        [fact for fact in facts if _identify(fact) not in unchanged] for facts in (first, second)
    ]
    yield from match_facts(Area.FINDINGS, *remaining)


def compare_gaps(before: Sequence[Gap], after: Sequence[Gap]) -> Iterator[Change]:
    """Compare what could not be understood or was lost."""
    yield from match_facts(Area.GAPS, *map(_list_gaps, (before, after)))


def total_findings(before: Recording, after: Recording) -> AreaTotal:
    """Count findings by severity, not once per rank."""
    return AreaTotal(area=Area.FINDINGS, before=_count(before), after=_count(after))


def total_gaps(before: Sequence[Gap], after: Sequence[Gap]) -> AreaTotal:
    """Count gaps, not once per rank."""
    counts = [f"{len({(gap.place, gap.fact) for gap in gaps}):,}" for gaps in (before, after)]
    return AreaTotal(area=Area.GAPS, before=counts[0], after=counts[1])


def _identify(fact: Fact) -> tuple[object, ...]:
    return (fact.module, fact.what, fact.value)


def _find_module(rule: str, subject: str, known: set[str]) -> tuple[str | None, str]:
    """Find the module that a finding is about, or None, and a label for the finding."""
    if subject in known:
        return subject, rule
    module, _, name = subject.rpartition(".")
    if module and module in known:
        return module, f"{rule} of {name}"
    return None, f"{rule} of {subject}"


def _match_modules(subject: str, names: CleanNames) -> tuple[str, ...]:
    """The modules that a finding is about, if it names them by a pattern."""
    if subject in names.names or not is_pattern(subject):
        return ()
    return tuple(name for name in names.names if matches_name(subject, name))


def _list_findings(findings: Sequence[Finding], names: CleanNames) -> Iterator[Fact]:
    """List findings; a finding of several ranks is listed once."""
    known = set(names.names)
    seen: set[tuple[str, ...]] = set()
    for finding in findings:
        subject = names.clean(finding.subject)
        key = (finding.rule, subject, finding.severity, finding.fact)
        if key in seen:
            continue
        seen.add(key)
        modules = _match_modules(subject, names)
        module, label = _find_module(finding.rule, subject, known)
        yield Fact(
            module=module,
            modules=modules,
            what=finding.rule if modules else label,
            key=(finding.rule, subject) if modules else None,
            value=f"{finding.severity}: {finding.fact}",
            unit=Unit.WORDS,
            badness=_BADNESS[finding.severity],
            because=f"→ {finding.remedy}",
            source=finding.source,
        )


def _list_gaps(gaps: Sequence[Gap]) -> Iterator[Fact]:
    for location, fact in dict.fromkeys((gap.place, gap.fact) for gap in gaps):
        yield Fact(what=location, key=(location, fact), value=fact, unit=Unit.WORDS, badness=1.0)


def _count(recording: Recording) -> str:
    findings = {
        (finding.rule, finding.subject, finding.severity, finding.fact)
        for finding in recording.findings
    }
    counts = {level: sum(severity is level for _, _, severity, _ in findings) for level in Severity}
    words = [
        f"{count:,} {severity}" if severity is Severity.INFO else plural(count, severity)
        for severity, count in counts.items()
        if count
    ]
    return ", ".join(words) or "none"


_AGREES = "agrees"
_TOLERABLE = (Agreement.ROUNDED, Agreement.RANDOM)
Programs = Sequence[Parallelization]


def compare_parity(
    before: Recording, after: Recording, names: tuple[CleanNames, CleanNames]
) -> Iterator[Change]:
    """Compare the verdicts on tensors and the divergences from the single device."""
    is_alone = all(
        len(recording.parity) + len(recording.parallel) == 1 for recording in (before, after)
    )
    yield from match_facts(
        Area.PARITY,
        *(
            list(_list_verdicts(recording, clean, is_alone))
            for recording, clean in zip((before, after), names, strict=True)
        ),
    )


def compare_programs(
    before: Programs, after: Programs, names: tuple[CleanNames, CleanNames]
) -> Iterator[Change]:
    """Compare inserted collectives, fallbacks, placements and memory of parallel programs."""
    is_alone = len(before) == len(after) == 1
    yield from match_facts(
        Area.PARALLEL,
        *(
            [
                fact
                for program in programs
                for fact in _list_program(
                    program, clean, "" if is_alone else _program_name(program)
                )
            ]
            for programs, clean in zip((before, after), names, strict=True)
        ),
    )


def total_parity(before: Recording, after: Recording) -> AreaTotal:
    """Count the tensors that differ."""
    words = [_summarize_parity(recording) for recording in (before, after)]
    return AreaTotal(area=Area.PARITY, before=words[0], after=words[1])


def total_programs(before: Programs, after: Programs) -> AreaTotal:
    """Count inserted collectives and fallbacks."""
    words = [
        f"{plural(sum(len(program.inserted) for program in programs), 'collective')}, "
        f"{plural(sum(len(program.fallbacks) for program in programs), 'fallback')}"
        for programs in (before, after)
    ]
    return AreaTotal(area=Area.PARALLEL, before=words[0], after=words[1])


def _summarize_parity(recording: Recording) -> str:
    tensors = [tensor for parity in recording.parity for tensor in parity.tensors]
    tensors += [verdict for program in recording.parallel for verdict in program.verdicts]
    differing = sum(_badness(tensor.agreement) > 1 for tensor in tensors)
    return f"{differing:,} of {len(tensors):,} differ"


def _program_name(program: Parallelization) -> str:
    return f"{program.program} on {_mesh(program.axes)}".strip()


def _mesh(axes: tuple[Axis, ...]) -> str:
    return " × ".join(f"{axis.name}={axis.size:,}" for axis in axes)


def _badness(agreement: Agreement) -> float:
    return 0.0 if agreement in FINE else 1.0 if agreement in _TOLERABLE else 2.0


def _list_verdicts(recording: Recording, names: CleanNames, is_alone: bool) -> Iterator[Fact]:
    for parity in recording.parity:
        prefix = "" if is_alone else f"{_mesh(parity.axes)}: "
        yield from (_tensor_fact(tensor, names, prefix) for tensor in parity.tensors)
        for first in parity.divergences:
            yield Fact(
                module=names.clean(first.module),
                what=f"{prefix}parts in {first.phase}",
                value=first.suspect.replace("_", " "),
                unit=Unit.WORDS,
                badness=1.0,
                because=first.detail,
                source=first.source,
                phase=str(first.phase),
            )
    for program in recording.parallel:
        prefix = "" if is_alone else f"{_program_name(program)}: "
        yield from (_tensor_fact(verdict, names, prefix) for verdict in program.verdicts)
        words = program.unverified or "done"
        label = f"{prefix}verification"
        yield Fact(
            what=label, value=words, unit=Unit.WORDS, badness=float(bool(program.unverified))
        )


def _tensor_fact(verdict: TensorVerdict, names: CleanNames, prefix: str) -> Fact:
    name = names.clean(verdict.name)
    module, _, last = name.rpartition(".")
    is_own = verdict.module is not None
    step = "" if verdict.step is None else f" in step {verdict.step}"
    words = _AGREES if verdict.agreement in FINE else verdict.agreement.replace("_", " ")
    return Fact(
        module=module if is_own else None,
        what=f"{prefix}{verdict.kind} {last if is_own else name}".rstrip() + step,
        value=words,
        unit=Unit.WORDS,
        badness=_badness(verdict.agreement),
        because=verdict.detail,
    )


def _list_program(program: Parallelization, names: CleanNames, name: str) -> Iterator[Fact]:
    prefix = f"{name}: " if name else ""
    yield from _list_inserted(program, names, prefix)
    yield from _list_fallbacks(program, names, prefix)
    yield from (_placed_fact(placed, names, prefix) for placed in program.placed)
    peak = max((memory.peak_bytes for memory in program.rank_memory), default=0)
    if peak:
        label = f"{prefix}peak of tensors"
        yield Fact(what=label, value=peak, unit=Unit.BYTES, badness=peak)


def _list_inserted(program: Parallelization, names: CleanNames, prefix: str) -> Iterator[Fact]:
    groups: defaultdict[tuple[str, str], list[Inserted]] = defaultdict(list)
    for call in program.inserted:
        key = (names.clean(call.module), f"{prefix}{call.kind}[{call.axis}] in {call.phase}")
        groups[key].append(call)
    counts, sizes = [], []
    for (module, label), calls in groups.items():
        fact = Fact(
            module=module,
            what=label,
            value=len(calls),
            badness=len(calls),
            because=calls[0].cause,
            axis=calls[0].axis,
            kind=str(calls[0].kind),
            phase=str(calls[0].phase),
        )
        size = sum(call.size_bytes for call in calls)
        counts.append(fact)
        sizes.append(
            replace(
                fact,
                what=f"{label}, input",
                value=size,
                unit=Unit.BYTES,
                badness=size,
                because="",
            )
        )
    yield from counts
    yield from sizes


def _list_fallbacks(program: Parallelization, names: CleanNames, prefix: str) -> Iterator[Fact]:
    groups: defaultdict[tuple[str, str], list[Fallback]] = defaultdict(list)
    for fallback in program.fallbacks:
        label = f"{prefix}fallback of {fallback.op} along {fallback.axis} ({fallback.kind})"
        groups[names.clean(fallback.module), label].append(fallback)
    for (module, label), fallbacks in groups.items():
        yield Fact(
            module=module,
            what=label,
            value=len(fallbacks),
            badness=len(fallbacks),
            because=fallbacks[0].remedy,
            axis=fallbacks[0].axis,
        )


def _placed_fact(placed: Placed, names: CleanNames, prefix: str) -> Fact:
    module, _, last = names.clean(placed.name).rpartition(".")
    shape = "×".join(map(str, placed.local_shape)) or "scalar"
    words = f"{', '.join(placed.placements)}; {shape} {placed.dtype}"
    return Fact(
        module=module or None, what=f"{prefix}{placed.kind} {last}", value=words, unit=Unit.WORDS
    )
