"""The script that makes the recordings and pictures of the examples, as a module."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from page_blocks import ROOT

EXAMPLES = ROOT / "examples"


def _load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("regenerate", EXAMPLES / "regenerate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = _load_script()
