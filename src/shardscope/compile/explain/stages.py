"""Compile time by stage: what torch measures includes what is called, what we show does not."""

from __future__ import annotations

from shardscope._torch.compile_times import Durations
from shardscope.record import StageTime

__all__ = ["measure_stages"]

_IN_BACKWARD = "inductor in backward"
# What each stage calls, whose time is taken off.
_CALLS = {
    "frames": ("tracing", "guards", "backend"),
    "backend": ("aot",),
    "aot": ("inductor",),
    "backward": (_IN_BACKWARD,),
}
_NAMES = {"frames": "other"}


def measure_stages(before: Durations, after: Durations) -> tuple[StageTime, ...]:
    """The stages that ran in between."""
    spent = {name: _subtract(after[name], before[name]) for name in after}
    return tuple(
        StageTime(
            stage=_NAMES.get(name, name),
            num_calls=num_calls,
            total_ns=_measure_own(name, spent),
        )
        for name, (num_calls, _) in spent.items()
        if num_calls and name != _IN_BACKWARD
    )


def _measure_own(name: str, spent: Durations) -> int | None:
    """What a stage took without those that it calls, in nanoseconds; None where nobody knows.

    A stage that something else called as well, as backends of other kinds may do, took more than
    the one that is supposed to have called it.
    """
    called = sum(spent[one][1] for one in _CALLS.get(name, ()) if one in spent)
    if name == "aot" and spent.get("backward", (0, 0.0))[0]:
        called -= spent[_IN_BACKWARD][1]
    own_ns = round((spent[name][1] - called) * 1e9)
    return own_ns if own_ns >= 0 else None


def _subtract(after: tuple[int, float], before: tuple[int, float]) -> tuple[int, float]:
    return after[0] - before[0], after[1] - before[1]
