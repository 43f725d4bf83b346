"""An assertion about the ranks of a training program: none diverges, whatever a rank alone sees."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from rich.console import Group

from shardscope.checks import CheckResult, check
from shardscope.errors import LaunchError
from shardscope.record import Finding, Recording, load
from shardscope.record.units import plural
from shardscope.report.text.problems import render_problems
from shardscope.report.text.summary import render_plain

Checked: TypeAlias = str | os.PathLike[str] | Recording | CheckResult
"""A program or TARGET to check, or what was recorded of one."""

_RULES = ("divergence", "possible-divergence")
_RECORDED = (0, 1)  # exit codes: 1 is a finding, and the recording is saved


class DivergenceError(AssertionError):
    """Ranks of a program diverge, or may; `findings` say which, where and under which condition."""

    def __init__(self, name: str, recording: Recording, findings: Sequence[Finding]) -> None:
        self._summary = f"{name}: ranks diverge ({plural(len(findings), 'finding')})"
        details = render_plain(Group(*render_problems(recording)), width=100)
        super().__init__(f"{self._summary}\n{details}")
        self.findings = tuple(findings)
        self.recording = recording

    def __repr__(self) -> str:
        return f"DivergenceError({self._summary!r})"


def assert_no_divergence(
    given: Checked,
    *args: str,
    mesh: Mapping[str, int] | None = None,
    num_nodes: int = 1,
    num_per_node: int = 8,
    steps: int | None = None,
    data: bool | None = None,
    variations: bool = True,
    is_module: bool = False,
) -> None:
    """Fail if the ranks of a training program would wait for each other forever.

    Runs the program as several ranks without GPUs, as `shardscope check` does, and compares the
    collectives that they issue; then again as if some ranks saw something else.

    Args:
        given: The program that torchrun would start; with `mesh` a TARGET; or a recording or result
            of `check`, and then nothing runs.
        *args: The program's arguments.
        mesh: The mesh of a TARGET, such as `{"dp": 2, "tp": 2}`.
        num_nodes: The number of nodes of a program.
        num_per_node: The number of processes per node of a program.
        steps: Training steps after which the program is ended; by default small programs run to
            their end.
        data: Whether all ranks run with data on this machine; by default if there are few that
            compute little.
        variations: Whether to run the program again as if some ranks saw something else; otherwise
            only ranks that diverge as they are fail.
        is_module: Whether the program is a module's name, as for `python -m`.

    Examples:
        >>> assert_no_divergence("train.py", "--lr", "3e-4", num_per_node=4)
    """
    __tracebackhide__ = True
    name = "assert_no_divergence()"
    if isinstance(given, Recording | CheckResult):
        recording = given if isinstance(given, Recording) else given.recording
    elif mesh is not None:
        name = os.fspath(given)
        recording = _check_target(name, mesh, steps=steps, data=data, is_varied=variations)
    else:
        name = os.fspath(given)
        recording = check(
            name,
            *args,
            num_nodes=num_nodes,
            num_per_node=num_per_node,
            steps=steps,
            data=data,
            variations=variations,
            is_module=is_module,
        ).recording
    findings = [finding for finding in recording.findings if finding.rule in _RULES]
    if findings:
        raise DivergenceError(name, recording, findings)


def _check_target(
    target: str, mesh: Mapping[str, int], *, steps: int | None, data: bool | None, is_varied: bool
) -> Recording:
    """Run `shardscope check TARGET`, which alone knows how to build a TARGET."""
    axes = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    words = [target, "--mesh", axes, "--variations" if is_varied else "--no-variations"]
    words += [] if steps is None else ["--steps", str(steps)]
    words += [] if data is None else ["--data" if data else "--no-data"]
    with tempfile.TemporaryDirectory(prefix="shardscope-check-") as folder:
        path = Path(folder) / "check.json.gz"
        command = [sys.executable, "-m", "shardscope", "check", *words, "-o", str(path)]
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if process.returncode not in _RECORDED or not path.is_file():
            raise LaunchError(process.stderr.strip() or f"{target} could not be checked.")
        return load(path)
