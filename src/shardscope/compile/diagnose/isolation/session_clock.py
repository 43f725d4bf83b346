"""`SessionClock`: time as the processes of a session see it, however busy the machine is.

It is pasted into scripts too, so it knows nothing but Python.
"""

from __future__ import annotations

import glob
import os
import time
from typing import final

__all__ = ["SessionClock"]


@final
class SessionClock:
    """Counts the seconds in which the processes of a session ran, or slept of their own accord.

    A process group will do for a session.

    Seconds in which one of them was ready to run, or waited for a disk, and nothing was done for
    it do not count: load on the machine makes nothing look slow. Without /proc all seconds count.
    """

    LONGEST_STEP = 1.0  # who looks later than that was not given a processor either

    def __init__(self, session: int) -> None:
        self.session = session
        self.seconds = 0.0
        self.processes: set[str] = set()  # seen so far
        self._used = 0.0
        self._last = 0.0

    def look(self) -> float:
        """Count what has passed since the last look; all seconds so far."""
        now, used, is_ready = time.monotonic(), 0.0, False
        for stat in glob.glob("/proc/[0-9]*/stat"):
            fields = self._read(stat)
            if len(fields) > 14 and str(self.session) in fields[2:4]:
                self.processes.add(stat)
                used += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
                threads = glob.glob(os.path.join(os.path.dirname(stat), "task", "*", "stat"))
                is_ready |= any(self._read(one)[:1] in (["R"], ["D"]) for one in threads)
        if self._last:
            passed = min(now - self._last, self.LONGEST_STEP)
            self.seconds += min(passed, max(0.0, used - self._used)) if is_ready else passed
        self._last, self._used = now, used
        return self.seconds

    def _read(self, stat: str) -> list[str]:
        """What the kernel says of a process or thread after its name: its state comes first."""
        try:
            with open(stat) as file:
                return file.read().rpartition(")")[2].split()
        except OSError:  # it has ended
            return []
