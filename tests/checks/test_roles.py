"""Which ranks of a large world are run, and which of them stands for any other."""

from __future__ import annotations

from shardscope.checks.roles import FEW_RANKS, Roles
from shardscope.record import Axis

MESH = [Axis(name="pp", size=16), Axis(name="dp", size=128), Axis(name="tp", size=8)]


def test_all_of_few_ranks_are_run() -> None:
    assert Roles(FEW_RANKS, (), ()).ranks == tuple(range(FEW_RANKS))


def test_each_stage_of_a_pipeline_and_the_ends_of_other_axes_are_run() -> None:
    roles = Roles(16_384, MESH, ["pp"])
    assert len(roles.ranks) < 32
    stages = {rank // (128 * 8) for rank in roles.ranks}
    assert stages == set(range(16))
    assert {0, 1, 7, 8, 127 * 8, 16_383} <= set(roles.ranks)


def test_every_rank_has_a_representative_of_its_stage() -> None:
    roles = Roles(16_384, MESH, ["pp"])
    represented = roles.list_represented(16_384)
    assert sum(map(len, represented.values())) == 16_384
    for rank, ranks in represented.items():
        assert rank in ranks
        assert {other // 1024 for other in ranks} == {rank // 1024}


def test_a_world_of_several_meshes_is_taken_as_a_line() -> None:
    roles = Roles(64, [Axis(name="dp", size=4)], ())
    assert roles.ranks == (0, 1, 63)
    assert roles.find_representative(40) == 1
