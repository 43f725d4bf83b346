"""An audit and a tensor's layout as people read them."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from audited_models import SHARDED
from sample_recordings import HOSTILE_NAMES, make_recording, make_run
from shardscope import Recording, audit, show, simulate, visualize_sharding
from shardscope.record import Mark, MarkKind, Module, Parameter, RankSpan, TensorLayout
from shardscope.report.text.sharding import format_tree
from shardscope.report.text.summary import render_text


class Block(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(256, 64, bias=False)


@pytest.fixture(scope="module")
def recording() -> Recording:
    with simulate({"dp": 2, "tp": 2}) as world:
        model = nn.Sequential(nn.Embedding(100, 64), *(Block() for _ in range(4)))
        for block in model[1:]:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, world.mesh["tp"], plan)
            fully_shard(block, mesh=world.mesh["dp"])
        return audit(fully_shard(model, mesh=world.mesh["dp"]))


def test_repeated_layers_are_folded_on_request(recording: Recording) -> None:
    assert format_tree(recording.modules, is_folded=True) == (
        "[Sequential] FULLY SHARDED\n"
        "    0[Embedding]\n"
        "    1-4[Block] FULLY SHARDED ×4\n"
        "        1.up[Linear]\n"
        "        1.down[Linear]\n"
    )
    assert format_tree(recording.modules).count("[Block] FULLY SHARDED\n") == 4


def test_layers_that_differ_are_not_folded(recording: Recording) -> None:
    with simulate({"dp": 2}) as world:
        model = nn.Sequential(Block(), Block(), Block())
        fully_shard(model[1], mesh=world.mesh)
        tree = format_tree(audit(model).modules, is_folded=True)
    assert [line.split()[0] for line in tree.splitlines() if "Block" in line] == [
        "0[Block]",
        "1[Block]",
        "2[Block]",
    ]


def test_a_summary_shows_marks_placements_and_bytes(recording: Recording) -> None:
    text = render_text(recording, width=140)
    assert "9 parameters, 537 KiB in all, 140 KiB on rank 0" in text
    assert "1-4[Block] ×4 FULLY SHARDED  FSDP2 over dp, 2 parameters, reshards after" in text
    assert "1.up[Linear]  ColwiseParallel over tp" in text
    row = next(line for line in text.splitlines() if line.startswith("*.up.weight ×4"))
    assert row.split() == [
        *("*.up.weight", "×4", "256×64", "→", "64×64", "float32", "dp:S(0)", "tp:S(0)", "*"),
        *("64.0", "KiB", "16.0", "KiB"),
    ]
    assert "No collectives were recorded" not in text


def test_every_layer_is_shown_when_not_folded(recording: Recording) -> None:
    text = render_text(recording, is_folded=False, width=140)
    assert sum(f"{index}.up.weight" in text for index in range(1, 5)) == 4


@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_fit_the_terminal(recording: Recording, width: int) -> None:
    assert max(map(len, render_text(recording, width=width).splitlines())) <= width


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHARDED)
def test_every_kind_of_sharding_can_be_shown(name: str) -> None:
    with simulate({"world": 4}):
        text = render_text(audit(SHARDED[name]()), width=120)
    assert "embed[Embedding]" in text
    assert "units.*.up.weight ×2" in text or "units.0.up.weight" in text


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_are_sanitized(name: str) -> None:
    parameter = Parameter(
        name=name,
        shape=(2,),
        local_shape=(2,),
        dtype=name,
        placements=(name,),
        axes=(name,),
        live_name=name,
        fsdp_group=name,
        alias_group=name,
        rule=name,
    )
    mark = Mark(kind=MarkKind.TENSOR_PARALLEL, detail=name, axes=(name,))
    module = Module(
        name=name, type=name, ranks=(RankSpan(0),), parameters=(parameter,), marks=(mark,)
    )
    layout = TensorLayout(name=name, shape=(2,), axes=(), placements=(name,), slices=())
    text = render_text(
        make_recording(modules=(module,), layouts=(layout,), run=make_run(instruments=("audit",))),
        width=100,
    )
    assert [char for char in text if not char.isprintable() and char != "\n"] == []
    assert len(text) < 20_000


def lay(world_axes: dict[str, int], *shape: int, plan: object) -> TensorLayout:
    with simulate(world_axes) as world:
        model = nn.Linear(shape[1], shape[0], bias=False)
        parallelize_module(model, world.mesh["tp"], plan)  # type: ignore[arg-type]
        if "dp" in world_axes:
            fully_shard(model, mesh=world.mesh["dp"])
        assert isinstance(model.weight, DTensor)
        return visualize_sharding(model.weight, name="weight")


def test_two_sharded_dims_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    show(lay({"dp": 2, "tp": 3}, 4, 7, plan=RowwiseParallel()))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "weight  4×7 · dp=2: Shard(0), tp=3: Shard(1)"
    assert [cell.strip() for cell in lines[3].strip("│").split("│")] == [
        "dim 0",
        "dim 1: 0:3",
        "dim 1: 3:6",
        "dim 1: 6:7",
    ]
    assert [cell.strip() for cell in lines[5].strip("│").split("│")] == ["0:2", "0", "1", "2"]
    assert [cell.strip() for cell in lines[7].strip("│").split("│")] == ["2:4", "3", "4", "5"]


def test_a_picture_without_room_is_a_table() -> None:
    layout = lay({"dp": 8, "tp": 8}, 64, 64, plan=RowwiseParallel())
    wide, narrow = (
        render_text(make_recording(layouts=(layout,)), width=width) for width in (200, 40)
    )
    assert "│" in wide
    assert "│" not in narrow
    assert "24-31" not in narrow
    assert "63" in narrow


def test_other_layouts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    show(lay({"tp": 4}, 6, 2, plan=ColwiseParallel()))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [
        ["ranks", "dim", "0", "dim", "1", "elements"],
        ["0", "0:2", "0:2", "4"],
        ["1", "2:4", "0:2", "4"],
        ["2", "4:6", "0:2", "4"],
        ["3", "nothing", "0:2", "0"],
    ]


def test_show_refuses_what_it_cannot_show() -> None:
    with pytest.raises(TypeError, match=r"show\(\) got int\. Give it a recording"):
        show(3)


def test_show_prints_a_recording(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    show(recording)
    assert "Sharded modules" in capsys.readouterr().out


def test_an_audit_of_a_model_without_parameters_is_a_tree() -> None:
    text = render_text(audit(nn.Sequential(nn.ReLU())))
    assert "[Sequential]\n    0[ReLU]\n" in text
    assert "No collectives" not in text
