"""Examples run as they are committed, and their recordings are what they give."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples_script import EXAMPLES, SCRIPT
from page_blocks import ROOT
from shardscope.record import Recording, load

MAX_LINES = 120
MAX_BYTES = 300_000
# Versions, and numbers that count what the process did before.
_INCIDENTAL = ("torch_version", "shardscope_version", "torch_name", "compile_id")


def comparable(recording: Recording) -> Any:
    """All of a recording that does not depend on when and where it was made.

    Tensors that die together are released in an order that depends on what the process did before,
    so allocations are compared without it, and samples of the memory by their number.
    """
    values = SCRIPT.change(msgspec.to_builtins(recording), _INCIDENTAL.__contains__, "")
    for profile, record in zip(values["memory"], recording.memory, strict=True):
        del profile["allocations"]
        profile["samples"] = len(record.samples)
        profile["allocated"] = sorted(
            (use.num_bytes, use.kind, use.phase, use.module or "", str(use.source))
            for use in (record.allocations.list_allocations() if record.allocations else ())
        )
    return values


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", SCRIPT.COMMANDS)
def test_a_committed_recording_is_what_its_command_gives(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", sys.argv)
    made = load(SCRIPT.regenerate(name, tmp_path))
    committed = load(SCRIPT.FOLDER / f"{name}.json.gz")
    if made.run.torch_version == committed.run.torch_version:
        assert comparable(made) == comparable(committed), "run make examples"
    else:  # its ops may be others, but not what the ranks say
        kinds, committed_kinds = (
            [collective.kind for collective in recording.collectives]
            for recording in (made, committed)
        )
        assert kinds == committed_kinds


def test_every_recording_is_small_has_a_command_and_names_no_machine() -> None:
    files = sorted(SCRIPT.FOLDER.iterdir())
    assert {file.name.removesuffix(".json.gz") for file in files} == set(SCRIPT.COMMANDS)
    gallery = sorted(SCRIPT.GALLERY.iterdir())
    assert {file.name.removesuffix(".json.gz") for file in gallery} == set(SCRIPT.GALLERY_COMMANDS)
    for file in (*files, *gallery):
        assert file.stat().st_size <= MAX_BYTES
        text = msgspec.json.encode(load(file)).decode()
        assert re.findall(r'"(?:/|[A-Z]:\\)[^"]*"', text) == [], file
        assert str(Path.home()) not in text


def test_an_example_can_be_read_at_a_glance() -> None:
    scripts = [path for path in EXAMPLES.glob("*.py") if path.name != "regenerate.py"]
    assert len(scripts) == 3
    for path in scripts:
        assert len(path.read_text().splitlines()) <= MAX_LINES
