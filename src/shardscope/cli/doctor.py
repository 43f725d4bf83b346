"""`shardscope doctor`: prints versions, and tries what works on this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import selectors
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import click
import msgspec
from msgspec import Struct
from rich.table import Table
from rich.text import Text

from shardscope.cli.console import print_line, print_out, show_progress
from shardscope.cli.doctor_checks import (
    CHECKS,
    CheckEnd,
    CheckResult,
    CheckStart,
    Status,
    make_problem,
)
from shardscope.cli.json_result import current_json
from shardscope.cli.verb import Verb
from shardscope.record.text import sanitize_text
from shardscope.report.result.figures import CheckFigures, EnvironmentFigures, Figures
from shardscope.version import TESTED_TORCH, __version__

_SILENCE_S = 60  # without a line, after which a check counts as hanging; torch's import is slow
_MARKS = {Status.OK: ("✓", "green"), Status.MISSING: ("–", "yellow"), Status.FAILED: ("✗", "red")}
_OPTIONAL = (
    "numpy",
    "duckdb",
    "pyarrow",
    "pandas",
    "polars",
    "mcp",
    "tensorboard",
    "wandb",
    "mlflow-skinny",
    "lightning",
    "transformers",
    "accelerate",
    "ray",
    "spmd-types",
    "ipython",
)


class PackageVersion(Struct, frozen=True):
    """An installed package, or None for a version that is not there."""

    name: str
    version: str | None


class DoctorReport(Struct, frozen=True, kw_only=True):
    """What is installed, and what works here."""

    shardscope: str
    python: str
    platform: str
    tested_torch: tuple[str, ...]
    packages: tuple[PackageVersion, ...]
    checks: tuple[CheckResult, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether nothing failed; optional parts may be missing."""
        return all(check.status is not Status.FAILED for check in self.checks)


@click.command(
    "doctor",
    cls=Verb,
    examples=["shardscope doctor", "shardscope doctor --json"],
    fails_if="A check failed. What is missing and optional is no failure.",
)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Print versions, and try what works on this machine.

    Each check runs in another process, so that one that crashes or hangs is only a line of the
    result. Nothing is downloaded, and nothing is left behind.
    """
    with show_progress("checking") as report:
        result = examine(report)
    if document := current_json():
        document.add_figures(
            Figures(environment=_read_figures(result)),
            _count_checks(result),
            has_problems=not result.is_healthy,
        )
    else:
        _print(result)
    ctx.exit(int(not result.is_healthy))


def _read_figures(result: DoctorReport) -> EnvironmentFigures:
    return EnvironmentFigures(
        python=result.python,
        platform=result.platform,
        tested_torch=result.tested_torch,
        packages={package.name: package.version for package in result.packages},
        checks=tuple(
            CheckFigures(
                name=check.name,
                status=str(check.status),
                detail=check.detail,
                disables=check.disables,
                remedy=check.remedy,
            )
            # What works is of least interest.
            for check in sorted(result.checks, key=lambda check: check.status is Status.OK)
        ),
    )


def examine(report: Callable[[str], None] = lambda _: None) -> DoctorReport:
    """Run all checks: those that need torch in one process, the others beside it in another."""
    groups = [
        [name for name, check in CHECKS.items() if check.needs_torch is needs_torch]
        for needs_torch in (True, False)
    ]
    with ThreadPoolExecutor(len(groups)) as pool:
        parts = list(pool.map(lambda names: list(_run_checks(names, report)), groups))
    results = {result.name: result for part in parts for result in part}
    return DoctorReport(
        shardscope=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        tested_torch=TESTED_TORCH,
        packages=tuple(map(_find_version, ("torch", *_OPTIONAL))),
        checks=tuple(results[name] for name in CHECKS),
    )


def _find_version(name: str) -> PackageVersion:
    try:
        return PackageVersion(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return PackageVersion(name, None)


def _run_checks(names: Sequence[str], report: Callable[[str], None]) -> Iterator[CheckResult]:
    """Run checks in a process; one that ends it is a failure, and the rest gets another process."""
    remaining = list(names)
    while remaining:
        failure = "the process ended before it began"
        for message in _run_process(remaining):
            if isinstance(message, CheckStart):
                report(message.name)
            elif isinstance(message, CheckEnd):
                remaining.remove(message.result.name)
                yield message.result
            else:
                failure = message
        if remaining:
            yield make_problem(remaining.pop(0), Status.FAILED, failure)


def _run_process(names: Sequence[str]) -> Iterator[CheckStart | CheckEnd | str]:
    """What a process reports about the checks; a text says how it ended early."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "shardscope.cli.doctor_checks", *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    decoder = msgspec.json.Decoder(CheckStart | CheckEnd)
    try:
        for line in _read_lines(process):
            if line is None:
                yield f"no answer within {_SILENCE_S} s"
                return
            yield decoder.decode(line)
        code = process.wait(_SILENCE_S)
        if code:
            yield f"the process {_describe_end(code)}"
    finally:
        # Also what a check has started; the session has no other processes.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def _read_lines(process: subprocess.Popen[bytes]) -> Iterator[bytes | None]:
    """The lines of standard output; None if there was none for too long. Errors are discarded."""
    assert process.stdout is not None
    assert process.stderr is not None
    buffer = b""
    with selectors.DefaultSelector() as selector:
        for pipe in (process.stdout, process.stderr):
            selector.register(pipe, selectors.EVENT_READ)
        while process.stdout in {key.fileobj for key in selector.get_map().values()}:
            events = selector.select(_SILENCE_S)
            if not events:
                yield None
                return
            for key, _ in events:
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    yield from lines


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _print(result: DoctorReport) -> None:
    installed = [package for package in result.packages if package.version is not None]
    absent = [package.name for package in result.packages if package.version is None]
    print_line(f"shardscope {result.shardscope}, Python {result.python}, {result.platform}")
    print_line(", ".join(f"{package.name} {package.version}" for package in installed))
    if absent:
        print_line(f"not installed, and optional: {', '.join(absent)}")
    print_line(f"tested with torch {', '.join(result.tested_torch)}")
    print_line()
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in result.checks:
        mark, style = _MARKS[check.status]
        text = Text(sanitize_text(check.detail))
        if check.disables:
            text.append(f"\nwithout it: {check.disables}", "dim")
            text.append(f"\n{check.remedy}", "green")
        table.add_row(Text(mark, style), check.name, text)
    print_out(table)
    print_line()
    print_line(_count_checks(result))


def _count_checks(result: DoctorReport) -> str:
    counts = Counter(check.status for check in result.checks)
    return (
        f"{counts[Status.OK]} work, {counts[Status.MISSING]} missing, "
        f"{counts[Status.FAILED]} failed"
    )
