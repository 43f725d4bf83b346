"""The likely causes of a hang in words: what happened on which ranks, who waits, what to do."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from shardscope.record import Finding, Recording, format_ranks
from shardscope.record.base import name_line
from shardscope.record.hang_records import CauseKind, HangAnalysis, HangCall, HangCause, HangWait
from shardscope.record.ranks import compress_ranks, count_ranks, expand_ranks
from shardscope.record.units import format_bytes, format_duration
from shardscope.report.text.problems import render_finding
from shardscope.report.text.style import SourceLine, make_text, make_title

_MAX_CAUSES = 4
_MAX_NAMES = 32  # characters of a list of ranks in the sentence
_MAX_WAITS = 40  # of an analysis: there may be more

# What happened on a rank, and on several.
_CAUSES = {
    CauseKind.MISMATCH: (
        "passes other arguments to a collective than the rest of its group",
        "pass other arguments to a collective than the rest of their group",
    ),
    CauseKind.DIFFERENT_CALL: (
        "issues another collective than the rest of its group",
        "issue another collective than the rest of their group",
    ),
    CauseKind.SKIPPED_CALL: ("skipped a collective", "skipped a collective"),
    CauseKind.WRONG_ORDER: (
        "issues collectives in another order",
        "issue collectives in different orders",
    ),
    CauseKind.UNMATCHED_TRANSFER: (
        "has a send or receive that does not match",
        "have a send or receive that does not match",
    ),
    CauseKind.OUT_OF_MEMORY: ("ran out of memory", "ran out of memory"),
    CauseKind.CRASH: ("ended", "ended"),
    CauseKind.STOPPED: (
        "does not run: its process is stopped or does not answer",
        "do not run: their processes are stopped or do not answer",
    ),
    CauseKind.LOST: ("is stopped or gone", "are stopped or gone"),
    CauseKind.DATA_LOADING: ("is in its data loader", "are in their data loaders"),
    CauseKind.FILE_SYSTEM: ("is reading or writing files", "are reading or writing files"),
    CauseKind.COMPILING: ("is compiling", "are compiling"),
    CauseKind.DIFFERENT_COMPILE: (
        "compiled another graph than the others",
        "compiled different graphs",
    ),
    CauseKind.SLOW: ("has not reached a collective", "have not reached a collective"),
}
# Causes of a group, all of whose ranks wait.
_SHARED = {
    CauseKind.NETWORK: "a collective that all ranks of {group} have issued does not complete: the "
    "network or a device",
    CauseKind.UNKNOWN: "a collective that all ranks of {group} have issued had not completed, and "
    "the files do not say why",
}


def describe_hang(hang: HangAnalysis) -> str:
    """What an analysis found, in a sentence without its period.

    Args:
        hang: The analysis.

    Examples:
        >>> describe_hang(recording.hangs[0])
        'rank 3 skipped a collective, and all other ranks wait for it (likely) in all_reduce 4 B …'
    """
    if hang.causes:
        return _describe_first(hang, hang.causes[0])
    if hang.slow_ranks:
        slow = hang.slow_ranks[0]
        return (
            f"no rank waits; the others waited for rank {slow.rank} "
            f"{format_duration(slow.excess_ns)} in all"
        )
    if hang.is_hang:
        return "ranks wait, and the files do not say for what"
    if has_single_rank(hang):
        return "the files of a single rank do not show who waits for whom"
    return "no rank waits for another in these files"


def has_single_rank(hang: HangAnalysis) -> bool:
    """Whether files of other ranks, which may wait, are missing."""
    return not hang.is_hang and count_ranks(hang.ranks) < 2


def summarize_hang(hang: HangAnalysis) -> str:
    """The same as a sentence that stands alone."""
    words = describe_hang(hang)
    return f"It hangs: {words}." if hang.is_hang else f"{words[0].upper()}{words[1:]}."


def _describe_first(hang: HangAnalysis, cause: HangCause) -> str:
    if cause.kind in _SHARED or not cause.ranks:
        group = "a group" if cause.group is None else cause.group
        shared = _SHARED.get(cause.kind, _SHARED[CauseKind.UNKNOWN]).format(group=group)
        return f"{shared} ({cause.certainty})"
    sentence = f"{describe_ranks(cause)} ({cause.certainty})"
    waiters = _name_waiters(hang, cause)
    if not waiters:
        return sentence
    it = "it" if count_ranks(cause.ranks) == 1 else "them"
    return f"{sentence}, and {waiters} for {it}{_describe_wait(_find_wait(hang, cause))}"


def describe_ranks(cause: HangCause) -> str:
    """`rank 3 skipped a collective`: what happened on the ranks of a cause."""
    ranks = format_ranks(cause.ranks)
    if not ranks:
        return "a collective does not complete"
    is_single = count_ranks(cause.ranks) == 1
    if cause.kind in _SHARED:
        return f"a collective of {'rank' if is_single else 'ranks'} {ranks} does not complete"
    phrases = _CAUSES[cause.kind]
    return f"rank {ranks} {phrases[0]}" if is_single else f"ranks {ranks} {phrases[1]}"


def _name_waiters(hang: HangAnalysis, cause: HangCause) -> str:
    """Who waits, with the verb; empty if no wait is known."""
    responsible = set(expand_ranks(cause.ranks))
    waiters = {rank for wait in hang.waits for rank in expand_ranks(wait.waiters)} - responsible
    others = set(expand_ranks(hang.ranks)) - responsible
    if not waiters:
        return ""
    if len(others) > 1 and (waiters >= others or len(hang.waits) >= _MAX_WAITS):
        return "all other ranks wait" if waiters >= others else "other ranks wait"
    names = format_ranks(compress_ranks(sorted(waiters)))
    if len(names) > _MAX_NAMES:
        return f"{len(waiters):,} other ranks wait"
    return f"rank {names} waits" if len(waiters) == 1 else f"ranks {names} wait"


def _find_wait(hang: HangAnalysis, cause: HangCause) -> HangWait | None:
    """The wait for what the cause is about, which its ranks would issue next."""
    missing = set(expand_ranks(cause.ranks))
    for wait in hang.waits:
        is_same = (wait.group, wait.position) == (cause.group, cause.position)
        if is_same and not missing.isdisjoint(expand_ranks(wait.missing)):
            return wait
    return None


def _describe_wait(wait: HangWait | None) -> str:
    if wait is None:
        return ""
    call = describe_hang_call(wait.call)
    line = name_line(wait.call.source)
    return f" in {call}{f' at {line}' if line else ''}" if call else ""


def describe_hang_call(call: HangCall | None) -> str:
    """`all_reduce 4.00 MiB`, `send 1.00 MiB peer 3`; empty if not known."""
    if call is None:
        return ""
    words = [str(call.kind) if call.kind is not None else call.op]
    if call.num_bytes is not None:
        words.append(format_bytes(call.num_bytes))
    if call.peer is not None:
        words.append(f"peer {call.peer}")
    return " ".join(filter(None, words))


def render_hang_causes(recording: Recording, hang: HangAnalysis) -> Iterator[RenderableType]:
    """The likely cause with its evidence and remedy, then others in short; slow ranks."""
    findings = recording.findings
    if hang.causes:
        yield from _render_first(hang.causes[0], next(iter(findings), None))
    elif findings:
        yield make_title("Slow ranks", "what the other ranks waited for")
        for finding in findings[:_MAX_CAUSES]:
            yield render_finding(finding)
    others = list(zip(hang.causes[1:_MAX_CAUSES], findings[1:_MAX_CAUSES], strict=False))
    if others:
        yield make_title("Other causes that fit")
        for cause, finding in others:
            yield _make_head(cause, finding)
            yield _indent(make_text(cause.fact, width=400))


def _render_first(cause: HangCause, finding: Finding | None) -> Iterator[RenderableType]:
    yield make_title("Likely cause")
    yield _make_head(cause, finding)
    facts = cause.fact.split("; ")
    is_plain = len(facts) > 1 and facts[0].endswith((" is behind", " are behind"))
    for fact in facts[is_plain:]:  # the head says that a rank is behind
        yield _indent(make_text(f"– {fact}", width=600))
    for item in cause.evidence:
        if item not in cause.fact:
            yield _indent(make_text(f"– {item}", width=600))
    yield _indent(make_text(f"→ {cause.remedy}", "green"))
    if cause.source is not None:
        yield _indent(SourceLine(cause.source))


def _make_head(cause: HangCause, finding: Finding | None) -> Text:
    """`rank 3 skipped a collective  likely  call-skipped  group tp[2-3], position 24`."""
    words = describe_ranks(cause)
    head = make_text(words[0].upper() + words[1:], "bold")
    head.append(f"  {cause.certainty}", "yellow")
    if finding is not None:
        head.append_text(make_text(f"  {finding.rule}", "dim", width=60))
    if cause.group is not None:
        position = "" if cause.position is None else f", position {cause.position:,}"
        head.append_text(make_text(f"  group {cause.group}{position}", "dim"))
    return head


def _indent(item: RenderableType) -> Padding:
    return Padding(item, (0, 0, 0, 2))
