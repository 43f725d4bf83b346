"""Code whose module another process cannot import: of a script, a target, a notebook."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from shardscope.compile.diagnose.worker.by_value import ByValue, is_installed, pickle_for_script
from shardscope.compile.diagnose.worker.serialization import pack, unpack

_CODE = """
import functools

import torch
import torch.nn.functional as strange

SCALE = 2.0


@functools.cache
def factor():
    return SCALE


def scale(x):
    return SCALE * x


def scale_by_factor(x):
    return factor() * x


class Block(torch.nn.Module):
    def forward(self, x):
        return scale(strange.gelu(x))
"""

Way = tuple[Callable[[object], Any], Callable[[Any], Any]]
_TO_WORKER: Way = (lambda value: pack(value).copy().buffers, unpack)
_TO_SCRIPT: Way = (pickle_for_script, pickle.loads)


@pytest.fixture(params=["__main__", "shardscope_target_train", "papermill.cells"])
def home(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """A module that is known here alone."""
    module = ModuleType(request.param)
    if request.param != "__main__":
        sys.modules[request.param] = module
    exec(_CODE, module.__dict__)
    yield module
    for name in ("__main_elsewhere__", module.__name__):
        if name != "__main__":
            sys.modules.pop(name, None)


@pytest.mark.parametrize("way", [_TO_WORKER, _TO_SCRIPT], ids=["worker", "script"])
def test_what_it_defines_compiles_where_it_arrives(home: ModuleType, way: Way) -> None:
    send, receive = way
    model = nn.Sequential(home.Block(), home.Block())
    x = torch.randn(4, 4)
    expected = model(x)
    sent = send(model)
    if home.__name__ != "__main__":
        del sys.modules[home.__name__]
    arrived = receive(sent)
    names = arrived[0].forward.__globals__
    assert names is arrived[1].forward.__globals__ is names["scale"].__globals__
    torch.compiler.reset()
    compiled = torch.compile(arrived, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)


def test_the_program_that_runs_there_keeps_its_own_names(home: ModuleType) -> None:
    before = dict(vars(sys.modules["__main__"]))
    send, receive = _TO_WORKER
    assert receive(send(home.scale))(3.0) == 6.0
    assert vars(sys.modules["__main__"]) == before


@pytest.mark.parametrize("way", [_TO_WORKER, _TO_SCRIPT], ids=["worker", "script"])
def test_functions_that_remember_results_arrive_without_them(home: ModuleType, way: Way) -> None:
    send, receive = way
    assert home.scale_by_factor(3.0) == 6.0
    sent = send((home.scale_by_factor, home.factor))
    sys.modules.pop(home.__name__ if home.__name__ != "__main__" else "", None)
    scale_by_factor, factor = receive(sent)
    assert factor.cache_info() == (0, 0, None, 0)
    assert scale_by_factor(3.0) == 6.0
    assert factor.cache_info().misses == 1


def test_packages_are_installed_in_whatever_folder_pip_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "targeted_package/__init__.py": "",
        "targeted_package/inner/__init__.py": "",
        "targeted_package/inner/leaf.py": "",
        "targeted_module.py": "",
        "script_beside_them.py": "",
        "targeted-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: targeted\nVersion: 1\n",
    }
    recorded = [name for name in files if name.startswith("targeted")]
    files["targeted-1.dist-info/RECORD"] = "".join(f"{name},,\n" for name in recorded)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    names = [
        "targeted_package",
        "targeted_package.inner",
        "targeted_package.inner.leaf",
        "targeted_module",
        "script_beside_them",
    ]
    for name in names:
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    assert [name for name in names if is_installed(name)] == names[:-1]


def test_cloudpickle_is_not_sent_by_means_of_itself() -> None:
    with ByValue(lambda name: False) as by_value:
        by_value.consider("cloudpickle.cloudpickle")
        assert not cloudpickle.list_registry_pickle_by_value()


@pytest.mark.parametrize("way", [_TO_WORKER, _TO_SCRIPT], ids=["worker", "script"])
def test_ops_and_their_namespaces_arrive_as_themselves(way: Way) -> None:
    send, receive = way
    aten = torch.ops.aten
    for value in (torch.ops, aten, torch.ops.shardscope_unknown, aten.sin, aten.add.Tensor):
        assert receive(send(value)) is value
    assert receive(send(lambda x: aten.sin(x)))(torch.zeros(1)).item() == 0.0


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


@pytest.mark.parametrize("way", [_TO_WORKER, _TO_SCRIPT], ids=["worker", "script"])
def test_parametrized_modules_arrive_with_their_parametrizations(way: Way) -> None:
    send, receive = way
    layer = parametrize.register_parametrization(nn.Linear(3, 3), "weight", Symmetric())
    model = nn.Sequential(layer, parametrizations.weight_norm(nn.Linear(3, 3)))
    copied = receive(send(model))
    assert torch.equal(copied(torch.eye(3)), model(torch.eye(3)))
    with torch.no_grad():
        copied[0].parametrizations.weight.original.zero_()
    assert not copied[0].weight.any()
    assert model[0].weight.any(), "nothing is shared"
