"""A pattern selects the same modules wherever a user may give one."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as DTensorShard

from sample_recordings import make_collective, make_run
from shardscope import Recording, audit, simulate
from shardscope.cli.visualize import find_layouts
from shardscope.contract.collective_totals import ModuleIndex
from shardscope.parallel import Plan, Shard
from shardscope.parallel.plan.program_index import index_model
from shardscope.parallel.plan.resolve import resolve
from shardscope.record import Module, RankSpan
from shardscope.report.compare.compare_recordings import compare
from shardscope.report.model.select import keep_modules
from shardscope.shard.coverage.model_run import read_layout
from source_trees import list_nodes

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shardscope"

# Each pattern, and the modules that it matches as a regular expression.
PATTERNS = {
    "head": r"head",
    "*": r"embed|layers|head",
    "**": r".*",
    "layers.*": r"layers\.\d+",
    "layers.*.attn": r"layers\.\d+\.attn",
    "layers.*.attn.w[qk]": r"layers\.\d+\.attn\.(wq|wk)",
    "layers.[8-11].norm": r"layers\.(8|9|10|11)\.norm",
    "layers.?.norm": r"layers\.\d\.norm",
    "layers.1*.attn.w?": r"layers\.(1|10|11)\.attn\.w.",
    "layers.[!2-9]*.norm": r"layers\.(0|1|10|11)\.norm",
    "**.wq": r"layers\.\d+\.attn\.wq",
    "layers.**.wo": r"layers\.\d+\.attn\.wo",
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 4))
        self.wq, self.wk, self.wo = (nn.Linear(4, 4, bias=False) for _ in range(3))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 4))
        self.attn = Attention()
        self.norm = nn.Linear(4, 4, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList([Layer() for _ in range(12)])
        self.head = nn.Linear(4, 4, bias=False)


MODEL = Model()
NAMES = [name for name, _ in MODEL.named_modules()]
OWNERS = {name.rpartition(".")[0] for name, _ in MODEL.named_parameters()}
"""Modules with parameters of their own: plans, and visualize, place those."""


def record(num_calls: int = 1) -> Recording:
    """A recording in which every module issues collectives."""
    ranks = (RankSpan(0),)
    return Recording(
        run=make_run(world_size=2),
        modules=tuple(Module(name=name, type="Linear", ranks=ranks) for name in NAMES),
        collectives=tuple(make_collective(owner=name) for name in NAMES for _ in range(num_calls)),
    )


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with simulate({"tp": 2}) as world:
        yield world.mesh


def select_for_show(pattern: str, mesh: DeviceMesh) -> set[str]:
    selected = keep_modules(record(), pattern)
    return set() if selected is None else {str(call.owner) for call in selected.collectives}


def select_for_diff(pattern: str, mesh: DeviceMesh) -> set[str]:
    changes = compare(record(), record(num_calls=2), is_folded=False)
    return {name for row in changes.only_modules(pattern).rows for name in row.modules}


def select_for_visualize(pattern: str, mesh: DeviceMesh) -> set[str]:
    sharded = Model()
    for name, parameter in list(sharded.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        placed = nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()]))
        setattr(sharded.get_submodule(owner), attribute, placed)
    return {layout.name.rpartition(".")[0] for layout in find_layouts(sharded, (pattern,))}


def select_for_contract(pattern: str, mesh: DeviceMesh) -> set[str]:
    return set(ModuleIndex(record(), ()).match(pattern))


def select_for_audit(pattern: str, mesh: DeviceMesh) -> set[str]:
    modules = audit(MODEL, plan={pattern: [DTensorShard(0)]}).modules
    return {module.name for module in modules if any(tensor.rule for tensor in module.parameters)}


def select_for_coverage(pattern: str, mesh: DeviceMesh) -> set[str]:
    layout = read_layout(MODEL, {pattern: DTensorShard(0)}, mesh)
    selected = set()
    for name, parameter in MODEL.named_parameters():
        placed = layout.lay_out(parameter, parameter.device)
        assert isinstance(placed, DTensor)
        if placed.placements == (DTensorShard(0),):
            selected.add(name.rpartition(".")[0])
    return selected


def select_for_parallelize(pattern: str, mesh: DeviceMesh) -> set[str]:
    resolved = resolve(Plan({pattern: Shard(0)}), index_model(MODEL), {"tp": 2})
    return {name.rpartition(".")[0] for name in resolved.tensors}


Select = Callable[[str, DeviceMesh], set[str]]
SELECT_MODULES: list[Select] = [
    select_for_contract,
    select_for_audit,
    select_for_coverage,
    select_for_parallelize,
]
SELECT_SUBTREES: list[Select] = [select_for_show, select_for_diff, select_for_visualize]
OF_PARAMETERS = {
    select_for_audit,
    select_for_coverage,
    select_for_parallelize,
    select_for_visualize,
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("select", [*SELECT_MODULES, *SELECT_SUBTREES])
def test_a_pattern_selects_the_same_modules_everywhere(
    select: Select, pattern: str, mesh: DeviceMesh
) -> None:
    below = r"(\..*)?" if select in SELECT_SUBTREES else ""
    matching = re.compile(f"({PATTERNS[pattern]}){below}")
    expected = {name for name in NAMES if matching.fullmatch(name)}
    if select in OF_PARAMETERS:
        expected &= OWNERS
    assert select(pattern, mesh) == expected


def test_one_file_compares_names_with_patterns() -> None:
    importing = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for node in list_nodes(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and "fnmatch" in {getattr(node, "module", None), *(alias.name for alias in node.names)}
    }
    of_files = {"compile/diagnose/worker/sandbox.py"}
    assert importing - of_files == {"record/patterns.py"}
