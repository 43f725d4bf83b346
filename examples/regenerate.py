"""Writes the recordings of the examples, and the screenshot of the report, again: `make examples`.

There is one recording for each example, with the results of all of its commands. Times, which
differ from run to run, are left out. The screenshot is of the report of examples/llama.py; a hash
of that report in the PNG file shows whether it is current.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from click.testing import CliRunner

from shardscope.cli import main
from shardscope.record import Recording, load, merge, save

FOLDER = Path(__file__).parent / "recordings"
SCREENSHOT = Path(__file__).parents[1] / "docs" / "assets" / "report.png"
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
        "trace examples/vision.py --mesh dp=8",
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


def render_report() -> str:
    """The report that the screenshot shows."""
    return load(FOLDER / "llama.json.gz").html()


def hash_report() -> bytes:
    """What the screenshot's file holds of the report that it shows."""
    return hashlib.sha256(render_report().encode()).hexdigest()[:16].encode()


def take_screenshot() -> Path:
    """Open the report in Chromium, on its tab Communication, and save a picture of it."""
    from playwright.sync_api import sync_playwright

    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "report.html"
        page.write_text(render_report(), encoding="utf-8")
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.get_by_role("tab", name="Communication").click()
        picture = tab.screenshot()
        browser.close()
    SCREENSHOT.write_bytes(_add_text(picture, b"report\0" + hash_report()))
    return SCREENSHOT


def _add_text(picture: bytes, text: bytes) -> bytes:
    """A PNG with a tEXt chunk before the last chunk, which has 12 bytes."""
    body = b"tEXt" + text
    chunk = struct.pack(">I", len(text)) + body + struct.pack(">I", zlib.crc32(body))
    return picture[:-12] + chunk + picture[-12:]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for example in COMMANDS:
        print(regenerate(example, FOLDER))
    print(take_screenshot())
