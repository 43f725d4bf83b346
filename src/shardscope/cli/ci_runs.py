"""Records the programs of `shardscope ci`, at the checkout and at its base commit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from shardscope.cli.ci_settings import RecordCommand
from shardscope.errors import ShardscopeError

_RECORDED = (0, 1)  # exit codes: 1 is a finding, and the recording is saved
_MAX_LINES = 20  # of a failed command's output
_SHORT = 10  # digits of a commit


class RecordRun(Struct, frozen=True):
    """What came of a command: a recording's file, or the last lines that it printed."""

    command: RecordCommand
    path: str
    failure: str = ""

    @property
    def is_recorded(self) -> bool:
        """Whether there is a recording."""
        return not self.failure


class BaseCheckout(Struct, frozen=True):
    """The base commit, checked out in a folder of its own.

    `folder` corresponds to the current one. `environment` lets Python import the base's packages
    where it would import those of the checkout.
    """

    commit: str
    folder: Path
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        """The commit, abbreviated."""
        return self.commit[:_SHORT]


def record(
    commands: Sequence[RecordCommand],
    output: Path,
    report: Callable[[str], None],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RecordRun]:
    """Run commands in `folder`, and save their recordings as `output/1-trace.json.gz`, …"""
    output.mkdir(parents=True, exist_ok=True)
    for number, command in enumerate(commands, start=1):
        report(command.text)
        path = (output / f"{number}-{command.verb}.json.gz").resolve()
        path.unlink(missing_ok=True)  # a failure must not leave an older run's recording
        process = subprocess.run(
            # -P: as for the installed command, the current folder is not on the path.
            [sys.executable, "-P", "-m", "shardscope", *command.with_output(str(path))],
            cwd=folder,
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        failure = ""
        if process.returncode not in _RECORDED or not path.is_file():
            lines = process.stdout.decode("utf-8", "replace").rstrip().splitlines()
            failure = "\n".join(lines[-_MAX_LINES:]) or f"exit code {process.returncode}"
        yield RecordRun(command, str(path), failure)


@contextmanager
def checked_out(reference: str) -> Iterator[BaseCheckout]:
    """Check out the commit at which this branch left `reference`, and remove it afterwards.

    A reference that the checkout lacks is fetched from origin. In a shallow clone, which has no
    common ancestor, the reference itself is taken.
    """
    root = Path(_git("rev-parse", "--show-toplevel")).resolve()
    tip = _find_commit(reference)
    commit = _try_git("merge-base", "HEAD", tip) or tip
    with tempfile.TemporaryDirectory(prefix="shardscope-base-") as temporary:
        tree = Path(temporary).resolve() / root.name
        _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            folder = tree / Path.cwd().resolve().relative_to(root)
            if not folder.is_dir():
                raise ShardscopeError(
                    f"the base {commit[:_SHORT]} has no folder {folder.relative_to(tree)}. Run "
                    "shardscope ci in a folder that both commits have."
                )
            yield BaseCheckout(commit, folder, _map_paths(root, tree))
        finally:
            _try_git("worktree", "remove", "--force", str(tree))


def _find_commit(reference: str) -> str:
    for name in (reference, f"origin/{reference}"):
        commit = _try_git(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
        )
        if commit:
            return commit
    branch = reference.removeprefix("origin/")
    if _try_git("fetch", "--quiet", "--no-tags", "--depth=1", "origin", "--", branch) is not None:
        commit = _try_git("rev-parse", "--verify", "--quiet", "FETCH_HEAD^{commit}")
        if commit:
            return commit
    raise ShardscopeError(
        f"git knows no commit {reference!r}, and origin has no such branch. Give --base a branch "
        "or a commit that can be fetched, or give --no-base."
    )


def _map_paths(root: Path, tree: Path) -> dict[str, str]:
    """An environment in which Python looks in `tree` for what it would find in `root`."""
    folders = [Path(path).resolve() for path in sys.path if path]
    inside = [folder.relative_to(root) for folder in folders if folder.is_relative_to(root)]
    mapped = [tree / path for path in dict.fromkeys([Path("src"), *inside])]
    previous = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(path) for path in mapped if path.is_dir()]
    paths += [path for path in previous if path and not Path(path).resolve().is_relative_to(root)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _git(*arguments: str) -> str:
    try:
        process = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, errors="replace"
        )
    except OSError as error:
        raise ShardscopeError(
            f"git cannot be started ({error.strerror}), so there is no base to compare with. "
            "Install git, or give --no-base."
        ) from error
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise ShardscopeError(
            f"git {arguments[0]} failed: {reason}. Run shardscope ci in a checkout, or give "
            "--no-base."
        )
    return process.stdout.strip()


def _try_git(*arguments: str) -> str | None:
    try:
        return _git(*arguments)
    except ShardscopeError:
        return None
