"""An empty folder to trace in, as no launcher would start it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # What Python itself would leave beside a target is not what we leave.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path
