"""When a thread of a rank last did something, by the phases that it recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from shardscope.record.recording import Recording, Stop


def find_last_activity(
    recording: Recording, stops: Mapping[int, Stop]
) -> dict[tuple[int, str], int]:
    """The time, on the rank's clock, when each thread of a killed rank last changed phase.

    Ranks that raised are left out: the error made them leave their phases.
    """
    seen_ns: defaultdict[tuple[int, str], int] = defaultdict(int)
    killed = {rank for rank, stop in stops.items() if stop.error is None}
    for span in recording.spans:
        if span.device == "cpu" and span.rank in killed:
            key = (span.rank, span.thread)
            seen_ns[key] = max(seen_ns[key], span.start_ns + span.duration_ns)
    for stop in stops.values():
        for begin in stop.open_spans:
            key = (stop.rank, begin.thread)
            seen_ns[key] = max(seen_ns[key], begin.start_ns)
    return seen_ns
