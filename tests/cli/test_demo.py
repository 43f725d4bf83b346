"""`shardscope demo`, small enough for a test, and what it must print."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from shardscope.cli import main
from shardscope.errors import OutputError
from shardscope.record import Recording, load


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_demo_simulates_1024_ranks_and_prints_the_result(here: Path) -> None:
    result = CliRunner().invoke(main, ["demo", "--layers", "3"])
    assert result.exit_code == 0, result.output
    recording = load(here / "demo.shardscope.json.gz")
    assert recording.run.world_size == 1024
    assert [(axis.name, axis.size) for axis in recording.run.axes] == [("dp", 128), ("tp", 8)]
    assert not recording.gaps
    assert not recording.findings
    assert {c.phase.value for c in recording.collectives} == {"forward", "backward", "outside"}
    for expected in ("×3", "By kind and mesh axis", "Most expensive modules", "saved "):
        assert expected in result.output


def test_demo_names_the_program_as_it_can_be_called(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [str(here / ".venv/bin/shardscope"), "demo"])
    monkeypatch.setenv("PATH", "")  # as after `make demo`, in a shell that knows no .venv
    result = CliRunner().invoke(main, ["demo", "--mesh", "dp=2,tp=1", "--layers", "1"])
    assert "look at it again with: .venv/bin/shardscope show demo." in result.output


def test_the_demo_has_the_collective_counts_of_megatron_and_fsdp(here: Path) -> None:
    CliRunner().invoke(main, ["demo", "--layers", "4", "-o", "four.json"])
    collectives = load(here / "four.json").collectives
    forward = [c for c in collectives if c.phase.value == "forward"]
    layer = [c for c in forward if (c.owner or "").startswith("layers.1")]
    # Sequence parallel: attention and feed-forward each gather their input and scatter their sum.
    assert [(c.kind.value, c.axis) for c in layer] == [
        ("all_gather", "dp"),
        ("all_gather", "tp"),
        ("reduce_scatter", "tp"),
        ("all_gather", "tp"),
        ("reduce_scatter", "tp"),
    ]
    reduced = [c for c in collectives if c.axis == "dp" and c.kind.value == "reduce_scatter"]
    assert sorted(c.owner or "" for c in reduced) == ["", *(f"layers.{i}" for i in range(4))]


def test_second_demo_does_not_overwrite_the_first(here: Path) -> None:
    for _ in range(2):
        assert CliRunner().invoke(main, ["demo", "--layers", "1", "--mesh", "dp=2"]).exit_code == 0
    names = sorted(path.name for path in here.iterdir())
    assert names == ["demo-2.shardscope.json.gz", "demo.shardscope.json.gz"]


def test_demo_saves_under_another_name_if_its_name_is_taken_meanwhile(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render_late(recording: Recording) -> str:
        (here / "demo.shardscope.json.gz").write_text("another demo's")
        return ""

    monkeypatch.setattr("shardscope.cli.demo.render_summary", render_late)
    result = CliRunner().invoke(main, ["demo", "--layers", "1", "--mesh", "dp=2"])
    assert result.exit_code == 0, result.output
    assert "saved demo-2.shardscope.json.gz" in result.output
    assert (here / "demo.shardscope.json.gz").read_text() == "another demo's"
    assert load(here / "demo-2.shardscope.json.gz").collectives


def test_demo_prints_its_result_even_if_it_cannot_save(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise OutputError("cannot write 'x': No space left on device. Choose a place.")

    monkeypatch.setattr("shardscope.cli.destination.save", fail)
    result = CliRunner().invoke(main, ["demo", "--layers", "1", "--mesh", "dp=2"])
    assert result.exit_code == 2
    assert "By kind and mesh axis" in result.stdout
    assert "No space left" in result.stderr


def test_mesh_with_an_axis_that_the_demo_does_not_use_is_refused(here: Path) -> None:
    result = CliRunner().invoke(main, ["demo", "--mesh", "dp=2,pp=2", "--layers", "1"])
    assert result.exit_code == 2
    assert "--mesh has the axis 'pp', and the demo is sharded over dp and tp only" in result.stderr
    assert not list(here.iterdir())


def test_mesh_that_does_not_fit_the_model_is_refused_in_one_sentence(here: Path) -> None:
    result = CliRunner().invoke(main, ["demo", "--mesh", "tp=3", "--layers", "1"])
    assert result.exit_code == 2
    assert "which do not divide" in result.output
    assert "Traceback" not in result.output
