"""Why it was said: collectives by what asked for them, each with a line of the program."""

from __future__ import annotations

from collections import defaultdict

from msgspec import Struct
from rich.console import RenderableType
from rich.text import Text

from shardscope.record import (
    BucketReduce,
    Call,
    Cause,
    Collective,
    Compiled,
    FullyShard,
    Recording,
    Redistribute,
)
from shardscope.report.layout import ByWidth, make_table, make_text
from shardscope.report.lines import format_source
from shardscope.report.traffic import RankClass, Tally, name_axis, tally
from shardscope.report.units import format_bytes, format_count, format_spread, spread

__all__ = ["describe_cause", "render_causes"]

_NO_CAUSE = "unknown cause"
_MAX_WHAT = 26


class _Reason(Struct, frozen=True):
    """A cause and what it led to."""

    words: str
    what: str


def render_causes(
    recording: Recording, classes: tuple[RankClass, ...], *, limit: int | None = None
) -> RenderableType:
    """A row for each cause and collective, the costliest first; `limit` keeps the first few."""
    sums: dict[_Reason, list[Tally]] = defaultdict(lambda: [Tally()] * len(classes))
    examples: dict[_Reason, Collective] = {}
    for index, one in enumerate(classes):
        for call in one.calls:
            axis = name_axis(call, recording.run.world_size)
            reason = _Reason(describe_cause(call.cause), f"{call.kind}[{axis}]")
            sums[reason][index] += tally(call)
            if call.source is not None:
                examples.setdefault(reason, call)
    ranked = sorted(sums.items(), key=lambda item: (-_sent(item[1]), item[0].words, item[0].what))
    return ByWidth(lambda width: _make_table(ranked, examples, width, limit))


def describe_cause(cause: Cause | None) -> str:
    """A cause in a few words; causes with the same words are counted together."""
    match cause:
        case Redistribute(before=before, after=after, asked_by=asked_by, is_implicit=is_implicit):
            word = "unasked, for" if is_implicit else "for"
            return f"DTensor {', '.join(before)} → {', '.join(after)} {word} {asked_by}"
        case FullyShard(action=action):
            return f"FSDP {action}"
        case BucketReduce():
            return "DDP gradient bucket"
        case Call(api=api):
            return f"call of {api}"
        case Compiled(graph=graph):
            return f"compiled graph {graph}"
    return _NO_CAUSE


def _sent(tallies: list[Tally]) -> int:
    return max((one.wire_bytes for one in tallies), default=0)


def _make_table(
    ranked: list[tuple[_Reason, list[Tally]]],
    examples: dict[_Reason, Collective],
    width: int,
    limit: int | None,
) -> RenderableType:
    what_width = max((len(reason.what) for reason, _ in ranked), default=0)
    room = max(24, width - min(what_width, _MAX_WHAT) - 26)
    rows: list[list[Text | str]] = [
        [
            make_text(reason.what, width=_MAX_WHAT),
            format_spread(spread(one.count for one in tallies), format_count),
            format_spread(spread(one.wire_bytes for one in tallies), format_bytes),
            _format_reason(reason, examples.get(reason), room),
        ]
        for reason, tallies in ranked[:limit]
    ]
    if limit is not None and len(ranked) > limit:
        more = f"… {len(ranked) - limit:,} more: --by cause shows all"
        rows.append(["", "", "", Text(more, "dim")])
    return make_table(("what", "count", "on wire", "cause"), rows)


def _format_reason(reason: _Reason, example: Collective | None, width: int) -> Text:
    text = make_text(reason.words, width=2 * width)
    if example is not None and example.source is not None:
        text.append("\n").append_text(format_source(example.source, width=width))
    return text
