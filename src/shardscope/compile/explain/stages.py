"""Compile time by stage: what torch measures includes what is called, what we show does not."""

from __future__ import annotations

from shardscope._torch.compile_times import Durations
from shardscope.record import StageTime

__all__ = ["measure_stages"]

# What each stage calls, whose time is taken off.
_CALLS = {
    "frames": ("tracing", "guards", "backend"),
    "backend": ("aot",),
    "aot": ("inductor",),
}
_NAMES = {"frames": "other"}


def measure_stages(before: Durations, after: Durations) -> tuple[StageTime, ...]:
    """The stages that ran in between."""
    spent = {name: _subtract(after[name], before[name]) for name in after}
    return tuple(
        StageTime(
            stage=_NAMES.get(name, name),
            num_calls=num_calls,
            total_ns=max(0, round((seconds - _called_by(name, spent)) * 1e9)),
        )
        for name, (num_calls, seconds) in spent.items()
        if num_calls
    )


def _called_by(name: str, spent: Durations) -> float:
    # A backend of another kind may call inductor without AOT autograd's own stage in between.
    called = [one for one in _CALLS.get(name, ()) if one in spent]
    return sum(spent[one][1] for one in called)


def _subtract(after: tuple[int, float], before: tuple[int, float]) -> tuple[int, float]:
    return after[0] - before[0], after[1] - before[1]
