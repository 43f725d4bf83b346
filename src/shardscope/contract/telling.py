"""A breach as people read it: what was expected, what is, where, why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from shardscope.contract.breach import Breach, Evidence
from shardscope.contract.limits import Figure
from shardscope.contract.sizes import describe_size
from shardscope.contract.words import name_module
from shardscope.record import RankSpan, Source, count_ranks, format_ranks, make_inert

__all__ = ["Row", "list_rows", "render_breaches", "render_plain", "summarize"]

Label = Literal["expected", "actual", "module", "cause", "line", "remedy"]
_WIDTH = 10  # of a label, and the gap behind it
_MAX_TEXT = 300
_MAX_MODULES = 3
# Which bytes evidence shows; of a count those that cost time.
_WAYS = {
    Figure.COUNT: " sent",
    Figure.WIRE_BYTES: " sent",
    Figure.BYTES: " of input",
    Figure.OUTPUT_BYTES: " of output",
}


class Row(NamedTuple):
    """One thing to say, under its label."""

    label: Label
    text: str


def summarize(breaches: Sequence[Breach], num_limits: int) -> str:
    """`2 of 14 limits broken`."""
    if not breaches:
        return f"{'all ' if num_limits > 1 else ''}{_plural(num_limits)} kept"
    broken = len({one.limit for one in breaches})
    return f"{broken:,} of {_plural(num_limits)} broken"


def render_breaches(breaches: Sequence[Breach]) -> str:
    """All of them as plain text."""
    return "\n\n".join(map(render_plain, breaches))


def render_plain(breach: Breach) -> str:
    """One of them as plain text, for where there are no colours."""
    lines = [make_inert(breach.title)]
    lines += [f"  {row.label:<{_WIDTH}}{row.text}" for row in list_rows(breach)]
    return "\n".join(lines)


def list_rows(breach: Breach) -> Iterator[Row]:
    """What there is to say, in this order; a stranger's text made safe to print."""
    yield Row("expected", breach.expected)
    yield Row("actual", _clean(f"{breach.actual}{_name_ranks(breach.ranks)}"))
    if breach.modules:
        yield Row("module", _clean(_name_modules(breach.modules)))
    for one in breach.evidence:
        yield Row("cause", _clean(_describe(one, breach)))
        if one.source is not None:
            yield Row("line", _clean(_describe_source(one.source)))
    if breach.remedy:
        yield Row("remedy", _clean(breach.remedy))


def _describe(one: Evidence, breach: Breach) -> str:
    """`all_reduce[tp], forward ×2, 64 MiB sent in layers.0.attn: call of dist.all_reduce`."""
    times = f" ×{one.count:,}" if one.count > 1 else ""
    way = _WAYS.get(breach.limit.figure, "")
    size = f", {describe_size(one.num_bytes)}{way}" if one.num_bytes else ""
    is_known = one.module is None or (one.module,) == breach.modules
    where = "" if is_known else f" in {name_module(one.module or '')}"
    return f"{one.what}{times}{size}{where}{f': {one.cause}' if one.cause else ''}"


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
    safe = make_inert(text)
    return safe if len(safe) <= _MAX_TEXT else f"{safe[: _MAX_TEXT - 1]}…"


def _plural(count: int) -> str:
    return f"{count:,} limit{'' if count == 1 else 's'}"
