"""The room's public names: listed, lazy, true."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from shardscope import parallel


def test_every_public_name_is_the_object_of_its_defining_module() -> None:
    assert parallel.__all__ == list(parallel._HOMES)
    assert dir(parallel) == sorted(parallel.__all__)
    for name, home in parallel._HOMES.items():
        assert getattr(parallel, name) is getattr(import_module(home), name)


def test_a_missing_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Columnwise'"):
        _ = parallel.Columnwise


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import shardscope.parallel, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("False", "")
