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
_RAISE = "If the change is intended, update the limit."
_REMEDIES = {
    Figure.PEAK_MEMORY: "Reduce the peak: shard or recompute the largest tensors there.",
    Figure.GRAPH_BREAKS: "Change the lines that break, or leave them out of what is compiled.",
    Figure.RECOMPILES: "Keep the values in the failed guards constant, or mark them as dynamic.",
    Figure.SKIPPED_FUNCTIONS: "Rewrite the code that the compiler skipped.",
    Figure.FALLBACKS: "Give the ops placements that have a sharding rule.",
    Figure.FINDINGS: "Follow the findings: shardscope show prints each with a remedy.",
    Figure.GAPS: "Find out what was not understood: shardscope show prints it.",
}
_UNASKED = "Give the op inputs with placements it can use, or redistribute where it costs least."


def advise(limit: Limit, kind: BreachKind, evidence: Sequence[Evidence]) -> str:
    """What would bring the figure back."""
    if kind is BreachKind.TOO_LITTLE:
        return f"Find out which collective is gone: a reduction may be missing. {_RAISE}"
    if evidence and evidence[0].remedy:
        return evidence[0].remedy
    if limit.is_on_comm:
        is_unasked = any(one.cause.startswith("implicit ") for one in evidence[:1])
        return _UNASKED if is_unasked or CauseKind.UNASKED in limit.causes else _RAISE
    return _REMEDIES.get(limit.figure, "Replace the ops, or keep their inputs replicated.")


def say_what_to_run(limit: Limit) -> str:
    """Which instrument measures it."""
    verb = _VERBS.get(limit.figure, "trace")
    return (
        f"Run `shardscope {verb} TARGET -o {verb}.json` and give {verb}.json to the check as well, "
        "or remove the limit."
    )


def suggest_names(noun: str, known: Sequence[str]) -> str:
    """Names that there are."""
    if not known:
        return f"The recording has no {noun} at all. Remove the limit, or record again."
    names = ", ".join(repr(name) for name in known)
    return f"Correct the {noun}: there is {names}."
