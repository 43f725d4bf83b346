"""Reads stacks: py-spy dumps (text and JSON), faulthandler's, and tracebacks in text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct

from shardscope.hang.evidence import FileFormat, FileReport, Frame, RankEvidence, ThreadStack

_MAX_FRAMES = 500  # of a stack
_MAX_THREADS = 2000  # of a file
_FAULT_THREAD = re.compile(
    r"^(?:Current thread|Thread) 0x[0-9a-fA-F]+(?: \[(?P<name>[^\]]*)\])? "
    r"\(most recent call first\)"
)
_FAULT_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+|\?+)(?:,)? in (?P<name>.+)$')
_SPY_PROCESS = re.compile(r"^Process (?P<pid>\d+): (?P<command>.*)$")
_SPY_PARENT = re.compile(r"^Parent [Pp]rocess (?P<pid>\d+)")
_SPY_THREAD = re.compile(r'^Thread (?P<id>\S+) \((?P<state>[^)]*)\)(?:: "(?P<name>[^"]*)")?')
_SPY_FRAME = re.compile(r"^\s+(?P<name>.+?) \((?P<file>[^()]+?)(?::(?P<line>\d+))?\)$")
_TRACEBACK = "Traceback (most recent call last):"
_TRACE_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+), in (?P<name>.+)$')
_ERROR = re.compile(
    r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Timeout)?)(?::|$)"
)
_RANK_OPTION = re.compile(r"--(?:local[-_])?rank[= ](\d{1,7})\b")


def is_py_spy(text: str) -> bool:
    """Whether a text begins as a dump of py-spy does."""
    return _SPY_PROCESS.search(text) is not None or bool(
        re.search(r"(?m)^Process \d+: .*\n(?:Python v|$)", text)
    )


def is_faulthandler(text: str) -> bool:
    """Whether a text has a stack of faulthandler's."""
    return "(most recent call first)" in text


def read_stacks(data: bytes, path: str) -> FileReport:
    """The last dump of each process in a text of py-spy's or faulthandler's."""
    text = data.decode("utf-8", "replace")
    lines = text.splitlines()
    if any(map(_SPY_PROCESS.match, lines)):
        processes = list(_read_spy(lines, path))
        return FileReport(path=path, format=FileFormat.PY_SPY, ranks=tuple(processes))
    stacks, num_dumps = parse_fault_stacks(lines)
    detail = f"the last of {num_dumps} dumps" if num_dumps > 1 else ""
    evidence = RankEvidence(path=path, format=FileFormat.FAULTHANDLER, stacks=tuple(stacks))
    return FileReport(path=path, format=FileFormat.FAULTHANDLER, ranks=(evidence,), detail=detail)


class _SpyFrame(Struct):
    name: str
    filename: str = ""
    line: int = 0


class _SpyThread(Struct):
    pid: int
    frames: list[_SpyFrame]
    thread_name: str | None = None
    active: bool | None = None


def read_spy_json(data: bytes, path: str) -> FileReport | None:
    """A dump of `py-spy dump --json`; None if it is no such dump."""
    try:
        threads = msgspec.json.decode(data, type=list[_SpyThread], strict=False)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    stacks: dict[int, list[ThreadStack]] = {}
    for thread in threads[:_MAX_THREADS]:
        frames = tuple(
            Frame(frame.name, frame.filename, frame.line) for frame in thread.frames[:_MAX_FRAMES]
        )
        name = thread.thread_name or ""
        stacks.setdefault(thread.pid, []).append(
            ThreadStack(name, frames, _is_main(name, frames), thread.active)
        )
    ranks = tuple(
        RankEvidence(path=path, format=FileFormat.PY_SPY, pid=pid, stacks=tuple(found))
        for pid, found in stacks.items()
    )
    return FileReport(path=path, format=FileFormat.PY_SPY, ranks=ranks)


def _read_spy(lines: list[str], path: str) -> Iterator[RankEvidence]:
    starts = [index for index, line in enumerate(lines) if _SPY_PROCESS.match(line)]
    seen: dict[int, RankEvidence] = {}
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        header = _SPY_PROCESS.match(lines[start])
        assert header is not None
        block = lines[start + 1 : end]
        if any(map(_SPY_PARENT.match, block[:4])):
            continue  # a worker of a data loader, which is not a rank
        pid = int(header["pid"]) if len(header["pid"]) < 10 else 0
        option = _RANK_OPTION.search(header["command"])
        seen[pid] = RankEvidence(
            path=path,
            format=FileFormat.PY_SPY,
            pid=pid,
            rank=int(option[1]) if option and "--rank" in option[0] else None,
            stacks=tuple(parse_spy_stacks(block)),
        )
    yield from seen.values()  # the last dump of each process


def parse_spy_stacks(lines: Iterable[str]) -> list[ThreadStack]:
    """The threads of a process in py-spy's text."""
    stacks: list[ThreadStack] = []
    header: re.Match[str] | None = None
    frames: list[Frame] = []

    def finish() -> None:
        if header is not None:
            name = header["name"] or ""
            main = _is_main(name, tuple(frames))
            stacks.append(ThreadStack(name, tuple(frames), main, header["state"] != "idle"))

    for line in lines:
        thread = _SPY_THREAD.match(line)
        if thread is not None:
            finish()
            header, frames = thread, []
        elif header is not None and (frame := _SPY_FRAME.match(line)) and len(frames) < _MAX_FRAMES:
            frames.append(Frame(frame["name"], frame["file"], int(frame["line"] or 0)))
    finish()
    return stacks[:_MAX_THREADS]


def parse_fault_stacks(lines: Iterable[str]) -> tuple[list[ThreadStack], int]:
    """The threads of the last dump in faulthandler's text, and how many dumps there are.

    A dump lists each thread once, the current thread or the most recent first.
    """
    dumps: list[list[ThreadStack]] = []
    seen: set[str] = set()
    name: str | None = None
    frames: list[Frame] = []

    def finish() -> None:
        nonlocal name
        if name is not None and dumps:
            dumps[-1].append(ThreadStack(name, tuple(frames), _is_main(name, tuple(frames))))
        name = None

    for line in lines:
        thread = _FAULT_THREAD.match(line)
        if thread is not None:
            finish()
            identity = line.partition("0x")[2].partition(" ")[0]
            if identity in seen or not dumps:
                dumps.append([])
                seen.clear()
            seen.add(identity)
            name, frames = thread["name"] or "", []
        elif name is not None and (frame := _FAULT_FRAME.match(line)) and len(frames) < _MAX_FRAMES:
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            frames.append(Frame(frame["name"], frame["file"], min(number, 2**31)))
    finish()
    last = dumps[-1] if dumps else []
    return _mark_main(last)[:_MAX_THREADS], len(dumps)


def _mark_main(stacks: list[ThreadStack]) -> list[ThreadStack]:
    """Take a thread for the main one, if none shows that it is: faulthandler lists it last."""
    if not stacks or any(stack.is_main for stack in stacks):
        return stacks
    return [*stacks[:-1], msgspec.structs.replace(stacks[-1], is_main=len(stacks) == 1)]


def _is_main(name: str, frames: tuple[Frame, ...]) -> bool:
    if name == "MainThread":
        return True
    outermost = frames[-1] if frames else None
    return outermost is not None and outermost.function == "<module>"


def parse_traceback(lines: list[str], start: int) -> tuple[tuple[Frame, ...], str, int]:
    """The frames, innermost first, and the error of the traceback at a line, and where it ends.

    Of chained exceptions, each has a traceback of its own.
    """
    frames: list[Frame] = []
    index = start + 1
    while index < len(lines):
        line = lines[index]
        match = _TRACE_FRAME.match(line)
        if match is not None:
            if len(frames) < _MAX_FRAMES:
                number = min(int(match["line"][:9]), 2**31)
                frames.append(Frame(match["name"], match["file"], number))
        elif line and not line[0].isspace():
            error = _ERROR.match(line)
            return tuple(reversed(frames)), line if error else "", index
        index += 1
    return tuple(reversed(frames)), "", index


def is_traceback(line: str) -> bool:
    """Whether a traceback begins at a line."""
    return line.endswith(_TRACEBACK)
