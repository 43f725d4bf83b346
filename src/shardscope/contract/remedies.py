"""What to do about a breach."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.contract.breach import BreachKind, Evidence
from shardscope.contract.limits import CauseKind, Figure, Limit

__all__ = ["advise", "say_what_to_run", "suggest_names"]

_VERBS = {
    Figure.PEAK_MEMORY: "memory",
    Figure.GRAPH_BREAKS: "explain",
    Figure.RECOMPILES: "explain",
    Figure.SKIPPED_FUNCTIONS: "explain",
    Figure.UNCOVERED_OPS: "coverage",
    Figure.MISSING_OPS: "coverage",
    Figure.WRONG_OPS: "coverage",
    Figure.REPLICATED_OPS: "coverage",
    Figure.FALLBACKS: "parallelize",
}
_RAISE = "If it is meant to be so, change the limit."
_REMEDIES = {
    Figure.PEAK_MEMORY: "Hold less at the peak: shard or recompute what is largest there.",
    Figure.GRAPH_BREAKS: "Change the lines that break, or leave them out of what is compiled.",
    Figure.RECOMPILES: "Keep what the failed guards look at the same, or mark it as dynamic.",
    Figure.SKIPPED_FUNCTIONS: "Change what the compiler gave up on.",
    Figure.FALLBACKS: "Give the ops placements that they have a rule for.",
    Figure.FINDINGS: "Do what the findings say: shardscope show prints them with a remedy each.",
    Figure.GAPS: "Find out what was not understood: shardscope show prints it.",
}
_UNASKED = "Give the op inputs that lie as it needs them, or redistribute where it costs least."


def advise(limit: Limit, kind: BreachKind, evidence: Sequence[Evidence]) -> str:
    """What would bring the figure back."""
    if kind is BreachKind.TOO_LITTLE:
        return f"Find out what no longer communicates: a reduction may be missing. {_RAISE}"
    if evidence and evidence[0].remedy:
        return evidence[0].remedy
    if limit.is_on_comm:
        is_unasked = any("unasked, for" in one.cause for one in evidence[:1])
        return _UNASKED if is_unasked or CauseKind.UNASKED in limit.causes else _RAISE
    return _REMEDIES.get(limit.figure, "Replace the ops, or keep their inputs whole.")


def say_what_to_run(limit: Limit) -> str:
    """Which instrument measures it."""
    verb = _VERBS.get(limit.figure, "trace")
    return (
        f"Run `shardscope {verb} TARGET -o {verb}.json` and give {verb}.json to the check as well, "
        "or take the limit out."
    )


def suggest_names(noun: str, known: Sequence[str]) -> str:
    """Names that there are."""
    if not known:
        return f"The recording knows no {noun} at all. Take the limit out, or record again."
    names = ", ".join(repr(name) for name in known)
    return f"Correct the {noun}: there is {names}."
