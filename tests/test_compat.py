"""`shardscope.compat` has the names of torch's own tools, with torch's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from shardscope import compat, simulate

# What nobody imports: a step of one backend, a cache entry, a list that a module fills.
_INNER = {"AOTEagerOutputCode", "fwd_bwd_compiler", "invoke_subgraph_inner_compiler"}
_TOOLS = {
    "torch._dynamo.backends.debugging": [],
    "torch.distributed.fsdp._debug_utils": ["_get_sharded_module_tree_with_module_name_to_fqns"],
    "torch.distributed.tensor.debug._op_coverage": [],
    "torch.distributed.tensor.debug": ["CommDebugMode", "visualize_sharding"],
    "torch.distributed.tensor.experimental._tp_transform": ["tensor_parallel_transformation"],
    "torch._dynamo": ["explain"],
}


def list_names() -> Iterator[tuple[str, str]]:
    for module, names in _TOOLS.items():
        own = [
            name
            for name, value in vars(import_module(module)).items()
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module
        ]
        public = [name for name in own if not name.startswith("_") and name not in _INNER]
        is_package = module in ("torch._dynamo", "torch.distributed.tensor.debug")
        yield from (
            (module, name) for name in dict.fromkeys([*names, *([] if is_package else public)])
        )


@pytest.mark.parametrize(("module", "name"), list(list_names()))
def test_names_and_parameters_are_torchs(module: str, name: str) -> None:
    ours, user_code = getattr(compat, name), getattr(import_module(module), name)
    assert inspect.isclass(ours) == inspect.isclass(user_code)
    if not inspect.isclass(user_code):
        assert list_parameters(ours) == list_parameters(user_code)


def list_parameters(function: Any) -> list[tuple[str, Any]]:
    return [(one.name, one.kind) for one in inspect.signature(function).parameters.values()]


def test_visualize_sharding_prints_the_slices_of_each_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with simulate(mesh={"tp": 4}) as world:
        weight = distribute_tensor(torch.ones(8, 2), world.mesh, [Shard(0)])
        compat.visualize_sharding(weight, header="first layer")
    printed = capsys.readouterr().out
    assert printed.split("\n")[1] == "first layer  8×2 · tp=4: Shard(0)"
