"""What of an explanation wants attention."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.record import BreakSite, Explanation, Finding, Severity, Source

__all__ = ["find_problems"]

_MANY_RECOMPILES = 3  # of one function: it will go on


def find_problems(explanation: Explanation) -> Iterator[Finding]:
    """Findings, of one rank."""
    yield from _find_failure(explanation)
    yield from _find_skips(explanation)
    yield from _find_breaks(explanation)
    yield from _find_recompiles(explanation)


def _find_failure(explanation: Explanation) -> Iterator[Finding]:
    if explanation.failure:
        yield Finding(
            rule="raised",
            severity=Severity.ERROR,
            subject=explanation.target or "the function",
            fact=f"it raised {explanation.failure}; what was compiled until then is explained",
            remedy="call it without torch.compile to see whether it raises there too",
            rank=explanation.rank,
        )


def _find_skips(explanation: Explanation) -> Iterator[Finding]:
    for skip in explanation.skipped_frames:
        site = None if skip.break_site is None else explanation.break_sites[skip.break_site]
        is_limit = "too often" in skip.reason
        yield Finding(
            rule="recompile-limit" if is_limit else "skipped-frame",
            severity=Severity.ERROR if is_limit else Severity.WARNING,
            subject=skip.function,
            fact=f"{'the rest of it' if skip.is_rest else 'all of it'} runs eagerly: "
            f"{skip.reason}{_at(site)}",
            remedy=_STOP_RECOMPILING if is_limit else _remedy(site),
            rank=explanation.rank,
            source=skip.source,
        )


_STOP_RECOMPILING = (
    "turn the changing value into a tensor, or call mark_dynamic on sizes; see the recompilations"
)


def _at(site: BreakSite | None) -> str:
    return "" if site is None else f", at {_place(site.source)} ({site.reason})"


def _place(source: Source) -> str:
    return f"{source.file}:{source.line}"


def _remedy(site: BreakSite | None) -> str:
    if site is None:
        return "compile its caller, so that it becomes part of that graph"
    return site.fix or (site.hints[0] if site.hints else "move the line out of what is compiled")


def _find_breaks(explanation: Explanation) -> Iterator[Finding]:
    """One finding for all breaks that were resumed: the report has a row for each."""
    skipped = {skip.break_site for skip in explanation.skipped_frames}
    sites = [one for index, one in enumerate(explanation.break_sites) if index not in skipped]
    if not sites:
        return
    worst = max(sites, key=lambda one: one.num_events)
    lines = "1 line breaks" if len(sites) == 1 else f"{len(sites):,} lines break"
    yield Finding(
        rule="graph-break",
        severity=Severity.WARNING,
        subject=explanation.target or worst.source.function,
        fact=f"{lines} its graphs; most often {_place(worst.source)}: {worst.reason}",
        remedy=_remedy(worst),
        rank=explanation.rank,
        source=worst.source,
    )


def _find_recompiles(explanation: Explanation) -> Iterator[Finding]:
    last = {(one.function, one.source): one for one in explanation.recompiles}
    for one in last.values():
        if one.number >= _MANY_RECOMPILES:
            yield Finding(
                rule="recompiles",
                severity=Severity.WARNING,
                subject=one.function,
                fact=f"it was compiled {one.number + 1} times; the last time because "
                f"{one.description}",
                remedy=_STOP_RECOMPILING,
                rank=explanation.rank,
                source=one.source,
            )
