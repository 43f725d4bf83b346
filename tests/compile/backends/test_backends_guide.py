"""The tables of the backends' guide name what there is; its programs run as all pages' do."""

from __future__ import annotations

import re
from pathlib import Path

from shardscope.compile import backends

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "backends.md"


def test_the_tables_name_every_backend_and_no_other() -> None:
    rows = re.findall(r"(?m)^\| (`[^|]*) \|", GUIDE.read_text())
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    faults = {name.removeprefix("fault_") for name in backends.__all__ if name[0].islower()}
    ladder = {f"shardscope_{name}" for name in faults} | {"inductor", "ts"}
    assert faults <= named
    assert named <= faults | ladder
