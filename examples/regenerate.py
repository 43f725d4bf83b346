"""Writes the recordings of the examples, and the screenshot of the report, again: `make examples`.

There is one recording for each example, with the results of all of its commands. Times, which
differ from run to run, are left out. The screenshot is of the report of examples/llama.py. Its PNG
file also has the text that the page showed, by which a test notices that the report now says
something else; colours and sizes are not compared.

`make gallery` does the same for the large models of examples/gallery, which takes minutes: a
recording and a picture for each. When the site is built, its reports are made of the recordings.

`make pictures` takes all pictures again, of the recordings as they are.
"""

from __future__ import annotations

import shlex
import shutil
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec
from click.testing import CliRunner

from shardscope.cli import main
from shardscope.record import Recording, load, merge, save

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOLDER = Path(__file__).parent / "recordings"
SHOWN = FOLDER / "llama.json.gz"
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

GALLERY = Path(__file__).parent / "gallery" / "recordings"
PICTURES = Path(__file__).parents[1] / "docs" / "assets" / "gallery"
_LLAMA3_8B = "examples/gallery/llama3_8b.py --mesh dp=8"
_LLAMA3_405B = "examples/gallery/llama3_405b.py --mesh dp=64,tp=8"
_DEEPSEEK_V3 = "examples/gallery/deepseek_v3.py --mesh dp=8,ep=64"
_VIT = "examples/gallery/vit.py --mesh dp=8"
GALLERY_COMMANDS = {
    "llama3_8b": (
        f"trace {_LLAMA3_8B}",
        f"memory {_LLAMA3_8B} --gpu-memory 80GiB",
        f"audit {_LLAMA3_8B} --no-step",
    ),
    "llama3_405b": (
        f"trace {_LLAMA3_405B}",
        f"memory {_LLAMA3_405B} --gpu-memory 80GiB",
        f"audit {_LLAMA3_405B} --no-step",
    ),
    "deepseek_v3": (
        f"trace {_DEEPSEEK_V3}",
        f"memory {_DEEPSEEK_V3} --gpu-memory 141GiB",
        f"audit {_DEEPSEEK_V3} --no-step",
    ),
    "vit": (
        f"trace {_VIT}",
        f"memory {_VIT} --gpu-memory 24GiB",
        "explain examples/gallery/vit.py",
    ),
}


def regenerate(name: str, folder: Path, commands: Sequence[str] = ()) -> Path:
    """Run an example's commands, and keep what they find as FOLDER/NAME.json.gz."""
    recordings = [_record(command) for command in commands or COMMANDS[name]]
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
            field: new if is_meant(field) else change(member, is_meant, new)
            for field, member in value.items()
        }
    if isinstance(value, list | tuple):
        return [change(member, is_meant, new) for member in value]
    return value


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Chromium, without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell") or shutil.which("chromium"),
            args=["--no-sandbox"],
        )
        yield browser
        browser.close()


def open_report(browser: Browser, recording: Path, folder: Path) -> Page:
    """The overview of a recording's report, as pictures show it."""
    file = folder / "report.html"
    file.write_text(load(recording).html(), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
    page.goto(file.as_uri())
    page.get_by_role("tab", name="Overview").click()
    return page


def take_picture(recording: Path, picture: Path) -> None:
    """Write a picture of the overview of a recording's report, with the text that it shows."""
    with TemporaryDirectory() as folder, open_browser() as browser:
        page = open_report(browser, recording, Path(folder))
        picture.write_bytes(add_text(page.screenshot(), page.inner_text("body")))
    print(picture, flush=True)


def regenerate_examples() -> None:
    """The recordings of the examples, and the screenshot."""
    FOLDER.mkdir(exist_ok=True)
    for example in COMMANDS:
        print(regenerate(example, FOLDER))
    take_screenshot()


def regenerate_gallery() -> None:
    """The recordings of the gallery's models, and a picture of each report."""
    for folder in (GALLERY, PICTURES):
        folder.mkdir(exist_ok=True)
    for name, commands in GALLERY_COMMANDS.items():
        print(regenerate(name, GALLERY, commands), flush=True)
    take_gallery_pictures()


def take_pictures() -> None:
    """The pictures of all reports, of the recordings as they are."""
    take_screenshot()
    take_gallery_pictures()


def take_screenshot() -> None:
    """The picture of the README and of the site's first page."""
    take_picture(SHOWN, SCREENSHOT)


def take_gallery_pictures() -> None:
    """A picture of the overview of each report of the gallery."""
    for name in GALLERY_COMMANDS:
        take_picture(GALLERY / f"{name}.json.gz", PICTURES / f"{name}.png")


# The keyword of a PNG's chunk of compressed text, and its method of compression.
_SHOWN_TEXT = b"shown text\0\0"


def add_text(picture: bytes, text: str) -> bytes:
    """A PNG with a zTXt chunk before the last chunk, which has 12 bytes."""
    body = b"zTXt" + _SHOWN_TEXT + zlib.compress(text.encode())
    size = struct.pack(">I", len(body) - 4)
    return picture[:-12] + size + body + struct.pack(">I", zlib.crc32(body)) + picture[-12:]


def read_text(picture: bytes) -> str:
    """The text that `add_text` added."""
    _, _, compressed = picture.partition(b"zTXt" + _SHOWN_TEXT)
    return zlib.decompressobj().decompress(compressed).decode()


if __name__ == "__main__":
    actions = {
        "examples": regenerate_examples,
        "gallery": regenerate_gallery,
        "pictures": take_pictures,
    }
    actions[sys.argv[1] if len(sys.argv) > 1 else "examples"]()
