"""`SessionClock`: time as the processes of a session experience it, independent of machine load.

Its source is pasted into scripts, so it uses Python only.
"""

from __future__ import annotations

import glob
import os
import time
from typing import final


@final
class SessionClock:
    """Counts the seconds in which the processes of a session ran or slept voluntarily.

    `session` may be a process group.

    Seconds in which a process was ready to run, or waited for a disk, without progress do not
    count, so load on the machine does not look like a slow program. Without /proc all seconds
    count.
    """

    LONGEST_STEP = 1.0  # a longer gap means that this process had no CPU, either

    def __init__(self, session: int) -> None:
        self.session = session
        self.seconds = 0.0
        self.processes: set[str] = set()  # seen so far
        self._used = 0.0
        self._last = 0.0

    def look(self) -> float:
        """Count the time since the last call; returns all seconds so far."""
        now, used, is_ready = time.monotonic(), 0.0, False
        for stat in glob.glob("/proc/[0-9]*/stat"):
            fields = self._read(stat)
            if len(fields) > 14 and str(self.session) in fields[2:4]:
                self.processes.add(stat)
                used += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
                threads = glob.glob(os.path.join(os.path.dirname(stat), "task", "*", "stat"))
                is_ready |= any(self._read(thread)[:1] in (["R"], ["D"]) for thread in threads)
        if self._last:
            passed = min(now - self._last, self.LONGEST_STEP)
            self.seconds += min(passed, max(0.0, used - self._used)) if is_ready else passed
        self._last, self._used = now, used
        return self.seconds

    def _read(self, stat: str) -> list[str]:
        """The fields of /proc/…/stat after the process name; the first is its state."""
        try:
            with open(stat) as file:
                return file.read().rpartition(")")[2].split()
        except OSError:  # it has ended
            return []
