"""Whether parallel versions are right, and how they were cut, in two recordings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from shardscope.record import (
    FINE,
    Agreement,
    Axis,
    Parallelization,
    Placed,
    Recording,
    TensorKind,
    TensorVerdict,
)
from shardscope.report.compare.changes import Area, AreaTotal, Change, Unit
from shardscope.report.compare.facts import Fact, match_facts
from shardscope.report.compare.names import CleanNames
from shardscope.report.layout import plural

__all__ = ["compare_parity", "compare_programs", "total_parity", "total_programs"]

_AGREES = "agrees"
_TOLERABLE = (Agreement.ROUNDED, Agreement.RANDOM)
Programs = Sequence[Parallelization]


def compare_parity(
    before: Recording, after: Recording, names: tuple[CleanNames, CleanNames]
) -> Iterator[Change]:
    """Verdicts on tensors, and where the two versions part."""
    is_alone = all(len(one.parity) + len(one.parallel) == 1 for one in (before, after))
    yield from match_facts(
        Area.PARITY,
        *(
            list(_list_verdicts(one, clean, is_alone))
            for one, clean in zip((before, after), names, strict=True)
        ),
    )


def compare_programs(
    before: Programs, after: Programs, names: tuple[CleanNames, CleanNames]
) -> Iterator[Change]:
    """What was put into programs, what did not fit, where tensors lie, what ranks hold."""
    is_alone = len(before) == len(after) == 1
    yield from match_facts(
        Area.PARALLEL,
        *(
            [
                fact
                for one in some
                for fact in _list_program(one, clean, "" if is_alone else _name(one))
            ]
            for some, clean in zip((before, after), names, strict=True)
        ),
    )


def total_parity(before: Recording, after: Recording) -> AreaTotal:
    """How many tensors differ."""
    words = [_summarize_parity(one) for one in (before, after)]
    return AreaTotal(area=Area.PARITY, before=words[0], after=words[1])


def total_programs(before: Programs, after: Programs) -> AreaTotal:
    """Collectives and fallbacks."""
    words = [
        f"{plural(sum(len(one.inserted) for one in some), 'collective')}, "
        f"{plural(sum(len(one.fallbacks) for one in some), 'fallback')}"
        for some in (before, after)
    ]
    return AreaTotal(area=Area.PARALLEL, before=words[0], after=words[1])


def _summarize_parity(recording: Recording) -> str:
    tensors = [one for parity in recording.parity for one in parity.tensors]
    tensors += [one for program in recording.parallel for one in program.verdicts]
    differing = sum(_badness(one.agreement) > 1 for one in tensors)
    return f"{differing:,} of {len(tensors):,} differ"


def _name(program: Parallelization) -> str:
    return f"{program.program} on {_mesh(program.axes)}".strip()


def _mesh(axes: tuple[Axis, ...]) -> str:
    return " × ".join(f"{axis.name}={axis.size:,}" for axis in axes)


def _badness(agreement: Agreement) -> float:
    return 0.0 if agreement in FINE else 1.0 if agreement in _TOLERABLE else 2.0


def _list_verdicts(recording: Recording, names: CleanNames, is_alone: bool) -> Iterator[Fact]:
    for parity in recording.parity:
        prefix = "" if is_alone else f"{_mesh(parity.axes)}: "
        yield from (_tensor_fact(one, names, prefix) for one in parity.tensors)
        for first in parity.divergences:
            yield Fact(
                module=names.clean(first.module),
                what=f"{prefix}parts in {first.phase}",
                value=first.suspect.replace("_", " "),
                unit=Unit.WORDS,
                badness=1.0,
                because=first.detail,
            )
    for program in recording.parallel:
        prefix = "" if is_alone else f"{_name(program)}: "
        yield from (_tensor_fact(one, names, prefix) for one in program.verdicts)
        words = program.unverified or "done"
        what = f"{prefix}verification"
        yield Fact(what=what, value=words, unit=Unit.WORDS, badness=float(bool(program.unverified)))


def _tensor_fact(one: TensorVerdict, names: CleanNames, prefix: str) -> Fact:
    name = names.clean(one.name)
    module, _, last = name.rpartition(".")
    is_own = one.kind is not TensorKind.OUTPUT  # of the model's, which is no module's
    said = _AGREES if one.agreement in FINE else one.agreement.replace("_", " ")
    return Fact(
        module=module if is_own else None,
        what=f"{prefix}{one.kind} {last if is_own else name}".rstrip(),
        value=said,
        unit=Unit.WORDS,
        badness=_badness(one.agreement),
        because=one.detail,
    )


def _list_program(one: Parallelization, names: CleanNames, name: str) -> Iterator[Fact]:
    prefix = f"{name}: " if name else ""
    yield from _list_inserted(one, names, prefix)
    yield from _list_fallbacks(one, names, prefix)
    yield from (_placed_fact(placed, names, prefix) for placed in one.placed)
    peak = max((held.peak_bytes for held in one.rank_memory), default=0)
    if peak:
        what = f"{prefix}peak of tensors"
        yield Fact(what=what, value=peak, unit=Unit.BYTES, badness=peak)


def _list_inserted(one: Parallelization, names: CleanNames, prefix: str) -> Iterator[Fact]:
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    causes: dict[tuple[str, str], str] = {}
    for call in one.inserted:
        key = (names.clean(call.module), f"{prefix}{call.kind}[{call.axis}] in {call.phase}")
        counts[key] += 1
        sizes[key] += call.size_bytes
        causes.setdefault(key, call.cause)
    for (module, what), count in counts.items():
        because = causes[module, what]
        yield Fact(module=module, what=what, value=count, badness=count, because=because)
    for (module, what), size in sizes.items():
        said = f"{what}, input"
        yield Fact(module=module, what=said, value=size, unit=Unit.BYTES, badness=size)


def _list_fallbacks(one: Parallelization, names: CleanNames, prefix: str) -> Iterator[Fact]:
    counts: Counter[tuple[str, str]] = Counter()
    remedies: dict[tuple[str, str], str] = {}
    for fallback in one.fallbacks:
        what = f"{prefix}fallback of {fallback.op} along {fallback.axis} ({fallback.kind})"
        key = (names.clean(fallback.module), what)
        counts[key] += 1
        remedies.setdefault(key, fallback.remedy)
    for (module, what), count in counts.items():
        because = remedies[module, what]
        yield Fact(module=module, what=what, value=count, badness=count, because=because)


def _placed_fact(placed: Placed, names: CleanNames, prefix: str) -> Fact:
    module, _, last = names.clean(placed.name).rpartition(".")
    shape = "×".join(map(str, placed.local_shape)) or "scalar"
    words = f"{', '.join(placed.placements)}; {shape} {placed.dtype}"
    return Fact(
        module=module or None, what=f"{prefix}{placed.kind} {last}", value=words, unit=Unit.WORDS
    )
