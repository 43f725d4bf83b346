"""Real gloo ranks hold what an audit of the simulated rank says, name by name, byte by byte."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import audited_models
from audited_models import SHARDED, audit_named
from rank_processes import run_ranks
from shardscope import load, merge, simulate
from shardscope.record import Parameter, Recording


@pytest.fixture(scope="module", params=[2, 4], ids=["two ranks", "four ranks"])
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Recording]]:
    """What each real rank found."""
    folder = tmp_path_factory.mktemp("audits")
    for code, printed in run_ranks(request.param, Path(audited_models.__file__), str(folder)):
        assert code == 0, printed
    return [
        {name: load(folder / f"{name}-{rank}.json.gz") for name in SHARDED}
        for rank in range(request.param)
    ]


@pytest.mark.parametrize("name", SHARDED)
def test_simulated_ranks_hold_what_real_ones_do(
    real: list[dict[str, Recording]], name: str
) -> None:
    for rank, audits in enumerate(real):
        with simulate(mesh={"world": len(real)}, rank=rank):
            simulated = audit_named(name)
        assert simulated.modules == audits[name].modules
        assert simulated.findings == audits[name].findings
        assert not audits[name].gaps


@pytest.mark.parametrize("name", SHARDED)
def test_ranks_together_hold_each_parameter_as_often_as_it_is_replicated(
    real: list[dict[str, Recording]], name: str
) -> None:
    held: dict[str, list[Parameter]] = {}
    for audits in real:
        for module in audits[name].modules:
            for parameter in module.parameters:
                held.setdefault(f"{module.name}.{parameter.name}", []).append(parameter)
    sizes = {axis.name: axis.size for axis in real[0][name].run.axes}
    assert len(held) > 10
    for ones in held.values():
        num_copies = len(real) // num_parts(ones[0], sizes, world_size=len(real))
        assert sum(one.local_bytes for one in ones) == ones[0].global_bytes * num_copies


def num_parts(parameter: Parameter, sizes: dict[str, int], *, world_size: int) -> int:
    """Into how many the parameter is cut; FSDP1, which has no placements, cuts over all ranks."""
    if parameter.fsdp_group is not None and not parameter.placements:
        return world_size
    placed = zip(parameter.axes, parameter.placements, strict=True)
    return math.prod(sizes[axis] for axis, placement in placed if "Shard" in placement)


def test_audits_of_all_ranks_merge(real: list[dict[str, Recording]]) -> None:
    merged = merge(audits["shard_by_fsdp_and_tp"] for audits in real)
    assert merged.gaps == ()
    assert {span.count for module in merged.modules for span in module.ranks} <= {1, 2, 4}
