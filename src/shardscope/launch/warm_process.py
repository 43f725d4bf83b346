"""The warm process as its parent sees it: requests go in, events come out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol, Self, final

import msgspec

from shardscope.launch.request import Event, Job, JobEnded, Reason, Request, RequestEnded

OnEvent = Callable[[Event], None]


@final
class _Termination(KeyboardInterrupt):
    """SIGTERM or SIGHUP, whose number is the first argument."""


@final
class Interruption:
    """Whether and by which signal the run was interrupted."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def note(self, interrupt: KeyboardInterrupt) -> None:
        """Remember the signal."""
        self.signal = interrupt.args[0] if isinstance(interrupt, _Termination) else signal.SIGINT

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise KeyboardInterrupt on SIGTERM and SIGHUP too, unless the caller handles them."""

        def terminate(number: int, frame: FrameType | None) -> None:
            raise _Termination(number)

        is_main = threading.current_thread() is threading.main_thread()
        numbers = [
            number
            for number in (signal.SIGTERM, signal.SIGHUP)
            if is_main and signal.getsignal(number) is signal.SIG_DFL
        ]
        for number in numbers:
            signal.signal(number, terminate)
        try:
            yield
        finally:
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)


class _Terminable(Protocol):
    """A process that can be asked to end."""

    def terminate(self) -> None:
        """Ask it to end."""


_COMMAND = (sys.executable, "-m", "shardscope.launch.server")


@contextmanager
def _started(command: Sequence[str], requests: int, events: int) -> Iterator[_Terminable]:
    """The process of this command, which gets two file descriptors; they are closed here."""
    process = subprocess.Popen(
        [*command, str(requests), str(events), str(os.getpid())],
        pass_fds=[requests, events],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    os.close(requests)
    os.close(events)
    try:
        yield process
        process.wait()
    finally:
        if process.poll() is None:
            process.kill()  # its children notice, and end
            process.wait()


@final
class WarmProcess:
    """A process that has imported torch and runs one request after the other, inside a context.

    An interrupt ends the jobs of the running request, and those of all further ones.
    """

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption

    def __enter__(self) -> Self:
        read_requests, self._requests = os.pipe()
        read_events, write_events = os.pipe()
        with ExitStack() as stack:
            self._process = stack.enter_context(_started(_COMMAND, read_requests, write_events))
            stack.callback(os.close, self._requests)  # then it ends
            self._events = stack.enter_context(open(read_events, "rb"))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def run(self, request: Request, on_event: OnEvent) -> list[JobEnded]:
        """Run the jobs of a request; returns how each has ended."""
        jobs: dict[Job, JobEnded | None] = dict.fromkeys(request.jobs)
        if not jobs or self._interruption.signal:
            return []
        file = Path(request.scratch, "request.json")
        file.write_bytes(msgspec.json.encode(request))
        try:
            os.write(self._requests, f"{file}\n".encode())
            self._read_events(jobs, on_event)
        except BrokenPipeError:
            pass  # it has died, which is reported below
        except KeyboardInterrupt as interrupt:
            self._interruption.note(interrupt)
            self._process.terminate()
            self._read_events(jobs, on_event)  # the jobs save what they have recorded
        is_alone = not any(jobs.values())  # the warm process itself has failed
        is_interrupted = self._interruption.signal is not None
        reason = None if is_alone and not is_interrupted else Reason.NOT_STARTED
        return [
            ended or JobEnded(job=job, ending=None, reason=reason) for job, ended in jobs.items()
        ]

    def _read_events(self, jobs: dict[Job, JobEnded | None], on_event: OnEvent) -> None:
        """Follow the running request to its end, or to that of the process."""
        for line in self._events:
            event = msgspec.json.decode(line, type=Event | RequestEnded)
            if isinstance(event, RequestEnded):
                return
            if isinstance(event, JobEnded):
                jobs[event.job] = event
            on_event(event)


def run_jobs(request: Request, on_event: OnEvent) -> list[JobEnded]:
    """Run the jobs of a request; returns how each has ended. An interrupt ends all of them."""
    interruption = Interruption()
    with interruption.watched(), WarmProcess(interruption) as process:
        ended = process.run(request, on_event)
    if interruption.signal:
        raise KeyboardInterrupt
    return ended
