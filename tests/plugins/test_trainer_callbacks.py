"""Callbacks wait for their trainer: nothing is imported before one is made."""

from __future__ import annotations

import subprocess
import sys

import pytest

import shardscope.plugins.step_recorder as step_recorder
from shardscope.errors import PluginError

_PROGRAM = """
import sys
from shardscope.plugins.lightning import ShardscopeCallback
from shardscope.plugins.transformers import ShardscopeCallback
trainers = ("lightning", "pytorch_lightning", "transformers", "accelerate", "tensorboard")
print([name for name in trainers if name in sys.modules])
"""


def test_importing_the_plugins_imports_no_trainer() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_the_error_for_a_missing_trainer_says_what_to_install() -> None:
    with pytest.raises(PluginError, match=r"needs Some Trainer, .* pip install nobody_has_this$"):
        step_recorder.find_bases(("nobody_has_this.core",), "Callback", package="Some Trainer")


def test_a_trainer_that_cannot_be_imported_says_why(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with open(f"{tmp_path}/torn_trainer.py", "w") as file:
        file.write("import nobody_has_this_either")
    with pytest.raises(ModuleNotFoundError, match="nobody_has_this_either"):
        step_recorder.find_bases(("torn_trainer",), "Callback", package="Torn Trainer")
