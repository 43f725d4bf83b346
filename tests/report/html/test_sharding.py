"""Placements of parameters: rectangles computed by hand, and the table."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from sample_recordings import make_llama, make_parallel, make_recording, make_run
from shardscope.record import (
    Axis,
    Finding,
    Group,
    Module,
    Parameter,
    RankSpan,
    Recording,
    Severity,
    Slice,
    TensorLayout,
    compress_ranks,
)
from shardscope.report.html.html import build_page
from shardscope.report.html.page_views import Drawing, ShardingTable


def parameter(shape: tuple[int, ...], placed: dict[str, str], **changes: Any) -> Parameter:
    facts: dict[str, Any] = {
        "name": "weight",
        "local_shape": shape,
        "dtype": "float32",
        "placements": tuple(placed.values()),
        "axes": tuple(placed),
    }
    return Parameter(shape=shape, **(facts | changes))


def hold(
    *parameters: Parameter,
    mesh: dict[str, int],
    ranks: tuple[int, ...] | None = None,
    world_size: int | None = None,
    **changes: Any,
) -> Recording:
    size = 1
    for number in mesh.values():
        size *= number
    size = world_size or size
    ranks = tuple(range(size)) if ranks is None else ranks
    axes = tuple(Axis(name=name, size=number) for name, number in mesh.items())
    module = Module(name="up", type="Linear", ranks=compress_ranks(ranks), parameters=parameters)
    run = make_run(world_size=size, ranks=ranks, axes=axes)
    return make_recording(**({"run": run, "modules": (module,)} | changes))


def read(recording: Recording) -> ShardingTable:
    sharding = build_page(recording).sharding
    assert sharding is not None
    return sharding


def draw(shape: tuple[int, ...], placed: dict[str, str], mesh: dict[str, int]) -> Drawing:
    table = read(hold(parameter(shape, placed), mesh=mesh))
    (drawing,) = table.drawings
    assert table.parameters.drawing == (0,)
    return drawing


def rectangles(drawing: Drawing) -> list[tuple[str, str, float, float, float, float]]:
    return [
        (shard.ranks, shard.indices, shard.left, shard.top, shard.width, shard.height)
        for shard in drawing.shards
    ]


def test_rows_sharded_on_a_single_axis() -> None:
    drawing = draw((8, 4), {"tp": "Shard(0)"}, {"tp": 2})
    assert drawing.description == "rows sharded 2 ways over tp"
    assert (drawing.vertical, drawing.horizontal, drawing.note) == ("dim 0: 8", "dim 1: 4", "")
    assert rectangles(drawing) == [
        ("0", "[0:4, :]", 0, 0, 1, 0.5),
        ("1", "[4:8, :]", 0, 0.5, 1, 0.5),
    ]


def test_column_shards_are_side_by_side() -> None:
    drawing = draw((8, 4), {"tp": "Shard(1)"}, {"tp": 2})
    assert drawing.description == "columns sharded 2 ways over tp"
    assert rectangles(drawing)[1] == ("1", "[:, 2:4]", 0.5, 0, 0.5, 1)


def test_two_axes_shard_two_dims() -> None:
    drawing = draw((8, 4), {"dp": "Shard(0)", "tp": "Shard(1)"}, {"dp": 2, "tp": 2})
    assert drawing.description == "rows sharded 2 ways over dp, columns sharded 2 ways over tp"
    assert rectangles(drawing) == [
        ("0", "[0:4, 0:2]", 0, 0, 0.5, 0.5),
        ("1", "[0:4, 2:4]", 0.5, 0, 0.5, 0.5),
        ("2", "[4:8, 0:2]", 0, 0.5, 0.5, 0.5),
        ("3", "[4:8, 2:4]", 0.5, 0.5, 0.5, 0.5),
    ]


def test_two_axes_shard_the_same_dim_nested() -> None:
    drawing = draw((8,), {"dp": "Shard(0)", "tp": "Shard(0)"}, {"dp": 2, "tp": 2})
    assert [shard.indices for shard in drawing.shards] == ["[0:2]", "[2:4]", "[4:6]", "[6:8]"]
    assert [shard.ranks for shard in drawing.shards] == ["0", "1", "2", "3"]
    assert (drawing.vertical, drawing.horizontal) == ("", "dim 0: 8")


def test_fsdp_shards_within_tensor_parallel_shards() -> None:
    # torch: tp cuts rows in 0:4 and 4:8 first, then dp cuts each of these in two.
    drawing = draw((8, 4), {"dp": "StridedShard(0)", "tp": "Shard(0)"}, {"dp": 2, "tp": 2})
    indices_by_ranks = {shard.ranks: shard.indices for shard in drawing.shards}
    assert indices_by_ranks == {"0": "[0:2, :]", "1": "[4:6, :]", "2": "[2:4, :]", "3": "[6:8, :]"}
    assert drawing.description == "rows sharded 2 ways over tp and again 2 ways over dp"


def test_sizes_that_do_not_divide_are_sharded_like_torch_chunk() -> None:
    drawing = draw((7, 4), {"tp": "Shard(0)"}, {"tp": 4})
    assert [shard.indices for shard in drawing.shards] == [
        "[0:2, :]",
        "[2:4, :]",
        "[4:6, :]",
        "[6:7, :]",
    ]
    assert drawing.note == "Dim 0 is sharded unevenly, in shards of 2 and 1."
    drawing = draw((3,), {"tp": "Shard(0)"}, {"tp": 4})
    assert [shard.ranks for shard in drawing.shards] == ["0", "1", "2"]
    assert drawing.note == "Dim 0 is sharded unevenly, in shards of 1; 1 empty shard."


def test_replicated_and_partial_placements() -> None:
    drawing = draw((8, 4), {"dp": "Replicate", "tp": "Shard(0)"}, {"dp": 4, "tp": 2})
    assert drawing.description == "rows sharded 2 ways over tp, replicated over dp (4)"
    assert [shard.ranks for shard in drawing.shards] == ["0-6/2", "1-7/2"]
    drawing = draw((8, 4), {"tp": "Partial(sum)"}, {"tp": 2})
    assert drawing.description == "partial sums over tp (2)"
    assert rectangles(drawing) == [("0-1", "[:, :]", 0, 0, 1, 1)]


def test_three_dims_show_the_last_two_that_are_sharded() -> None:
    mesh = {"a": 2, "b": 2, "c": 2}
    placed = {"a": "Shard(0)", "b": "Shard(1)", "c": "Shard(2)"}
    drawing = draw((4, 8, 4), placed, mesh)
    assert (drawing.vertical, drawing.horizontal) == ("dim 1: 8", "dim 2: 4")
    assert drawing.description.startswith("dim 0 sharded 2 ways over a, dim 1 sharded")
    assert [shard.ranks for shard in drawing.shards] == ["0,4", "1,5", "2,6", "3,7"]


@pytest.mark.parametrize(
    ("shape", "note"), [((), ""), ((0, 4), "It has no elements.")], ids=["scalar", "empty"]
)
def test_a_number_and_an_empty_tensor(shape: tuple[int, ...], note: str) -> None:
    placed = {"tp": "Shard(0)" if shape else "Replicate"}
    drawing = draw(shape, placed, {"tp": 2})
    assert (len(drawing.shards), drawing.note) == (not shape, note)


def test_shards_cover_the_tensor_and_do_not_overlap() -> None:
    mesh = {"dp": 3, "tp": 4}
    drawing = draw((50, 30), {"dp": "Shard(0)", "tp": "Shard(1)"}, mesh)
    area = sum(shard.width * shard.height for shard in drawing.shards)
    assert area == pytest.approx(1, abs=1e-4)
    corners = sorted((shard.top, shard.left) for shard in drawing.shards)
    assert all(corner < next_corner for corner, next_corner in pairwise(corners))


def test_too_many_shards_show_the_coarser_sharding() -> None:
    drawing = draw((4096, 64), {"dp": "Shard(0)", "tp": "Shard(1)"}, {"dp": 128, "tp": 8})
    assert drawing.note == "Each shard is split further in 128 along dp."
    assert [shard.indices for shard in drawing.shards][:2] == ["[:, 0:8]", "[:, 8:16]"]
    assert drawing.shards[1].ranks == "1-1017/8"
    drawing = draw((4096,), {"dp": "Shard(0)"}, {"dp": 128})
    assert (drawing.shards, drawing.note) == ((), "128 shards are too many to draw.")


def test_of_axes_that_shard_the_same_dim_the_first_is_drawn() -> None:
    # Strided: tp cuts first. Without it, dp's pieces would lie elsewhere.
    placed = {"dp": "StridedShard(0)", "tp": "Shard(0)"}
    drawing = draw((4096, 4), placed, {"dp": 4, "tp": 32})
    assert len(drawing.shards) == 32
    assert drawing.note == "Each shard is split further in 4 along dp."
    assert drawing.shards[0].ranks == "0-96/32"


def test_a_flattened_axis_has_the_size_of_its_group_and_unnamed_ranks() -> None:
    flat = Group(name="f", torch_name="9", ranks=(RankSpan(0, 4),), num_ranks=4, axis="dp_cp")
    tensor = parameter((8,), {"dp_cp": "Shard(0)"})
    (drawing,) = read(hold(tensor, mesh={"dp": 2, "cp": 2}, groups=(flat,))).drawings
    assert [shard.ranks for shard in drawing.shards] == ["dp_cp 0", "dp_cp 1", "dp_cp 2", "dp_cp 3"]
    (drawing,) = read(hold(tensor, mesh={"dp": 2, "cp": 2}, groups=())).drawings
    assert drawing.description == "elements sharded over dp_cp"
    assert drawing.note == "The number of ranks of its mesh is not known."


def test_a_stage_of_a_pipeline_holds_its_own_parameters() -> None:
    tensor = parameter((8,), {"tp": "Shard(0)"})
    mesh = {"pp": 2, "tp": 2}
    (drawing,) = read(hold(tensor, mesh=mesh, ranks=(2,), world_size=4)).drawings
    assert [shard.ranks for shard in drawing.shards] == ["2", "3"]
    recording = hold(tensor, mesh=mesh)
    everywhere = read(recording).drawings[0]
    assert [shard.ranks for shard in everywhere.shards] == ["0-2/2", "1-3/2"]
    second = replace(recording.modules[0], ranks=(RankSpan(2, 2),))
    (drawing,) = read(replace(recording, modules=(second,))).drawings
    assert [shard.ranks for shard in drawing.shards] == ["2", "3"]


def test_the_table_says_all_that_is_known_of_a_parameter() -> None:
    tensor = parameter(
        (8, 4),
        {"dp": "Shard(0)", "tp": "Replicate"},
        local_shape=(4, 4),
        global_bytes=128,
        local_bytes=64,
        live_name="_orig_mod.up.weight",
        checkpoint_key="up.weight",
        fsdp_group="",
        alias_group="up.weight",
        rule="up.*",
    )
    plain = Parameter(
        name="scale", shape=(), local_shape=(), dtype="float32", global_bytes=4, local_bytes=4
    )
    finding = Finding(
        rule="replicated", severity=Severity.WARNING, subject="up.weight", fact="", remedy=""
    )
    page = build_page(hold(tensor, plain, mesh={"dp": 2, "tp": 2}, findings=(finding,)))
    assert page.sharding is not None
    table = page.sharding.parameters
    assert table.name == ("up.weight", "up.scale")
    assert (table.shape[0], table.local_shape[0], table.shape[1]) == ("8 × 4", "4 × 4", "a number")
    assert table.placement == ("dp: Shard(0), tp: Replicate", "not distributed")
    assert table.drawing == (0, -1)
    assert (table.fsdp_group[0], table.rule[0], table.ranks[0]) == ("(root)", "up.*", "0-3")
    assert table.flags == ("replicated", "")
    assert [page.modules.path[at] for at in table.module] == ["up", "up"]
    sizes = (page.sharding.global_bytes, page.sharding.local_bytes, page.sharding.replicated_bytes)
    assert sizes == (132, 68, 68)


def test_a_finding_on_a_pattern_flags_every_layer() -> None:
    llama = make_llama(num_layers=2)
    finding = Finding(
        rule="thin",
        severity=Severity.INFO,
        subject="layers.*.attention.wq.weight (×2)",
        fact="",
        remedy="",
    )
    table = read(replace(llama, findings=(finding,))).parameters
    flagged = [name for name, flag in zip(table.name, table.flags, strict=True) if flag]
    assert flagged == ["layers.0.attention.wq.weight", "layers.1.attention.wq.weight"]


def test_parameters_with_equal_placements_share_a_drawing() -> None:
    table = read(make_llama(num_layers=3))
    assert len(table.parameters.name) == 3 * 9 + 3
    assert len(table.drawings) == 1


def test_a_layout_is_drawn_from_its_slices() -> None:
    layout = TensorLayout(
        name="w",
        shape=(4, 2),
        axes=(Axis(name="tp", size=2),),
        placements=("Shard(0)",),
        slices=tuple(
            Slice(ranks=(RankSpan(rank),), stretches=(stretches, ((0, 2),)))
            for rank, stretches in enumerate([((0, 1), (2, 3)), ((1, 2), (3, 4))])
        ),
    )
    table = read(make_recording(layouts=(layout,)))
    assert [(row.name, row.drawing) for row in table.layouts] == [("w", 0)]
    (drawing,) = table.drawings
    assert [(shard.ranks, shard.top, shard.color) for shard in drawing.shards] == [
        ("0", 0, 0),
        ("0", 0.5, 0),
        ("1", 0.25, 1),
        ("1", 0.75, 1),
    ]


def test_a_parallel_program_shows_its_parameters() -> None:
    recording = make_parallel()
    program = recording.parallel[0]
    weight = replace(
        program.placed[0],
        name="layers.0.up.weight",
        shape=(8, 2),
        local_shape=(4, 2),
        placements=("S(0)", "R"),
        local_bytes=32,
        rules=("layers.*",),
    )
    axes = (Axis(name="dp", size=2), Axis(name="tp", size=4))
    program = replace(program, placed=(weight,), axes=axes, inserted=(), fallbacks=())
    recording = replace(recording, parallel=(program,), run=make_run(axes=axes))
    page = build_page(recording)
    assert page.sharding is not None
    table = page.sharding.parameters
    assert (table.placement, table.rule) == (("dp: Shard(0), tp: Replicate",), ("layers.*",))
    assert (table.global_bytes, table.local_bytes) == ((64,), (32,))
    assert page.modules.path == ("", "layers", "layers.0", "layers.0.up")
    assert [shard.ranks for shard in page.sharding.drawings[0].shards] == ["0-3", "4-7"]
