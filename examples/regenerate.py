"""Writes the recordings of the examples anew: `make examples`, or this file, from the root.

One recording for each example, with all that its commands have found. What differs from run to run
(times) is left out, so that only what changed is seen to change.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from click.testing import CliRunner

from shardscope.cli import main
from shardscope.record import Recording, load, merge, save

FOLDER = Path(__file__).parent / "recordings"
COMMANDS = {
    "llama": (
        "trace examples/llama.py --mesh dp=16,tp=4",
        "memory examples/llama.py --mesh dp=16,tp=4 --gpu-memory 80GiB",
        "audit examples/llama.py --mesh dp=16,tp=4",
    ),
    "moe": (
        "trace examples/moe.py --mesh dp=4,ep=8",
        "memory examples/moe.py --mesh dp=4,ep=8 --gpu-memory 80GiB",
        "coverage examples/moe.py --mesh dp=2,ep=2",
        "audit examples/moe.py --mesh dp=4,ep=8",
    ),
    "vision": (
        "trace examples/vision.py --mesh dp=8 --data",
        "explain examples/vision.py",
    ),
}


def regenerate(name: str, folder: Path) -> Path:
    """Run an example's commands, and keep what they find as FOLDER/NAME.json.gz."""
    recordings = [_record(command) for command in COMMANDS[name]]
    return save(without_times(merge(recordings)), folder / f"{name}.json.gz", force=True)


def _record(command: str) -> Recording:
    args = shlex.split(command)
    sys.argv = ["shardscope", *args]  # which the recording tells
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recording.json"
        done = CliRunner().invoke(main, [*args, "-o", str(path)])
        if done.exit_code == 2:
            raise SystemExit(f"shardscope {command}: {done.output}")
        return load(path)


def without_times(recording: Recording) -> Recording:
    """The recording as if no time had been recorded."""
    return msgspec.convert(change(msgspec.to_builtins(recording), _is_time, None), Recording)


def _is_time(field: str) -> bool:
    return field.endswith(("_ns", "_s"))


def change(value: Any, is_meant: Callable[[str], bool], new: Any) -> Any:
    """Records as dicts and lists, with another value in the fields that are meant."""
    if isinstance(value, dict):
        return {
            field: new if is_meant(field) else change(one, is_meant, new)
            for field, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [change(one, is_meant, new) for one in value]
    return value


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for example in COMMANDS:
        print(regenerate(example, FOLDER))
