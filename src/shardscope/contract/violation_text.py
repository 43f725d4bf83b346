"""Violations as text: what was expected, what was found, where and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from shardscope.contract.limits import CauseKind, Evidence, Figure, Limit, Violation
from shardscope.record import (
    RankSpan,
    Source,
    count_ranks,
    format_ranks,
    sanitize_text,
)
from shardscope.record.units import describe_size

_ROOT = "the root module"
_NAMES = {
    Figure.COUNT: "collectives",
    Figure.BYTES: "input bytes",
    Figure.WIRE_BYTES: "wire bytes",
    Figure.OUTPUT_BYTES: "output bytes",
}


def describe_limit(limit: Limit) -> str:
    """What is limited: `all_reduce[tp] in layers.*.attn, forward`."""
    if limit.figure is Figure.TYPES:
        return f"types of {limit.tensor}"
    if not limit.is_on_comm:
        what = limit.rule or (f"{limit.severity}" if limit.severity else "")
        return f"{limit.figure.replace('_', ' ')}{f' ({what})' if what else ''}"
    what = _join(limit.kinds) or ("collectives" if limit.figure is Figure.COUNT else "")
    if limit.axes:
        what = f"{what or 'all'}[{_join(limit.axes)}]"
    if limit.figure is not Figure.COUNT:
        what = f"{_NAMES[limit.figure]}{f' of {what}' if what else ''}"
    where = "" if limit.module is None else f" in {name_module(limit.module)}"
    causes = "" if not limit.causes else f", {_join(map(_name_cause, limit.causes))}"
    phases = "" if not limit.phases else f", {_join(limit.phases)}"
    return f"{what}{where}{phases}{causes}"


def describe_bound(limit: Limit) -> str:
    """`exactly 2`, `at most 64 MiB`, `1 to 3`."""
    if limit.figure is Figure.TYPES:
        return limit.types
    least, most = limit.least, limit.most
    if least is not None and most is not None:
        if least == most:
            return f"exactly {describe_value(limit, most)}"
        return f"{describe_value(limit, least)} to {describe_value(limit, most)}"
    if most is not None:
        return f"at most {describe_value(limit, most)}" if most else "none"
    assert least is not None
    return f"at least {describe_value(limit, least)}"


def describe_value(limit: Limit, value: int) -> str:
    """`2`, `64 MiB`."""
    return describe_size(value) if limit.figure.is_size else f"{value:,}"


def name_module(name: str) -> str:
    """A module's name; "the root module" for the root, whose name is empty."""
    return name or _ROOT


def _name_cause(cause: CauseKind) -> str:
    special = {CauseKind.UNASKED: "implicit", CauseKind.UNKNOWN: "of unknown cause"}
    return special.get(cause, f"by {cause}")


def _join(words: Sequence[str] | map[str]) -> str:
    return " or ".join(map(str, words))


Label = Literal["expected", "actual", "module", "cause", "line", "remedy"]
_WIDTH = 10  # of a label, and the gap behind it
_MAX_TEXT = 300
_MAX_MODULES = 3
# Which bytes evidence shows; for a count, those on the wire.
_BYTES_SUFFIX = {
    Figure.COUNT: " sent",
    Figure.WIRE_BYTES: " sent",
    Figure.BYTES: " of input",
    Figure.OUTPUT_BYTES: " of output",
}


class Row(NamedTuple):
    """A labelled line of a violation's description."""

    label: Label
    text: str


def summarize(violations: Sequence[Violation], num_limits: int) -> str:
    """`2 of 14 limits broken`."""
    if not violations:
        return f"{'all ' if num_limits > 1 else ''}{_plural(num_limits)} kept"
    broken = len({violation.limit for violation in violations})
    return f"{broken:,} of {_plural(num_limits)} broken"


def render_violations(violations: Sequence[Violation]) -> str:
    """Violations as plain text."""
    return "\n\n".join(map(render_plain, violations))


def render_plain(violation: Violation) -> str:
    """A violation as plain text, without colours."""
    lines = [sanitize_text(violation.title)]
    lines += [f"  {row.label:<{_WIDTH}}{row.text}" for row in list_rows(violation)]
    return "\n".join(lines)


def list_rows(violation: Violation) -> Iterator[Row]:
    """The lines that describe a violation, in order; untrusted text is sanitized."""
    yield Row("expected", violation.expected)
    yield Row("actual", _clean(f"{violation.actual}{_name_ranks(violation.ranks)}"))
    if violation.modules:
        yield Row("module", _clean(_name_modules(violation.modules)))
    for item in violation.evidence:
        yield Row("cause", _clean(_describe(item, violation)))
        if item.source is not None:
            yield Row("line", _clean(_describe_source(item.source)))
    if violation.remedy:
        yield Row("remedy", _clean(violation.remedy))


def _describe(evidence: Evidence, violation: Violation) -> str:
    """`all_reduce[tp], forward ×2, 64 MiB sent in layers.0.attn: call of dist.all_reduce`."""
    times = f" ×{evidence.count:,}" if evidence.count > 1 else ""
    way = _BYTES_SUFFIX.get(violation.limit.figure, "")
    size = f", {describe_size(evidence.num_bytes)}{way}" if evidence.num_bytes else ""
    is_known = evidence.module is None or (evidence.module,) == violation.modules
    where = "" if is_known else f" in {name_module(evidence.module or '')}"
    return f"{evidence.what}{times}{size}{where}{f': {evidence.cause}' if evidence.cause else ''}"


def _describe_source(source: Source) -> str:
    function = f" {source.function}" if source.function else ""
    text = f"  {source.text.strip()}" if source.text.strip() else ""
    return f"{source.file}:{source.line}{function}{text}"


def _name_modules(modules: Sequence[str]) -> str:
    names = ", ".join(name_module(name) for name in modules[:_MAX_MODULES])
    more = len(modules) - _MAX_MODULES
    return f"{names} and {more:,} more" if more > 0 else names


def _name_ranks(ranks: Sequence[RankSpan]) -> str:
    if not ranks:
        return ""
    return f" on rank{'s' if count_ranks(ranks) > 1 else ''} {format_ranks(ranks)}"


def _clean(text: str) -> str:
    safe = sanitize_text(text)
    return safe if len(safe) <= _MAX_TEXT else f"{safe[: _MAX_TEXT - 1]}…"


def _plural(count: int) -> str:
    return f"{count:,} limit{'' if count == 1 else 's'}"
