"""Writes the recordings of the examples anew: `make examples`, or this file, from the root.

What differs from run to run (times) is set to zero, so that only what changed is seen to change.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner

from shardscope.cli import main
from shardscope.record import Recording, load, save

FOLDER = Path(__file__).parent / "recordings"
COMMANDS = {
    "llama-trace": "trace examples/llama.py --mesh dp=16,tp=4",
    "llama-audit": "audit examples/llama.py --mesh dp=16,tp=4",
    "llama-memory": "memory examples/llama.py --mesh dp=16,tp=4 --gpu-memory 80GiB",
    "moe-trace": "trace examples/moe.py --mesh dp=4,ep=8",
    "moe-audit": "audit examples/moe.py --mesh dp=4,ep=8",
    "moe-memory": "memory examples/moe.py --mesh dp=4,ep=8 --gpu-memory 80GiB",
    "vision-trace": "trace examples/vision.py --mesh dp=8 --data",
    "vision-explain": "explain examples/vision.py",
}


def regenerate(name: str, folder: Path) -> Path:
    """Run one command, and keep its recording as FOLDER/NAME.json.gz."""
    path = folder / f"{name}.json.gz"
    args = shlex.split(COMMANDS[name])
    sys.argv = ["shardscope", *args]  # which the recording tells
    done = CliRunner().invoke(main, [*args, "-o", str(path), "--force"])
    if done.exit_code == 2:
        raise SystemExit(f"shardscope {COMMANDS[name]}: {done.output}")
    return save(without_times(load(path)), path, force=True)


def without_times(recording: Recording) -> Recording:
    """The recording with every figure of time set to zero."""
    return msgspec.convert(_change(msgspec.to_builtins(recording), _is_time, 0), Recording)


def _is_time(key: str) -> bool:
    return key.endswith(("_ns", "_s"))


def _change(value: Any, is_meant: Callable[[str], bool], new: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: new if is_meant(key) else _change(one, is_meant, new) for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [_change(one, is_meant, new) for one in value]
    return value


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in COMMANDS:
        print(regenerate(name, FOLDER))
