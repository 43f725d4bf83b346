"""export to the formats of other tools: which files it writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sample_recordings import make_diagnosed, make_holdings, make_llama, make_recording
from shardscope.cli import main
from shardscope.record import save


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    save(make_llama(num_layers=1, dp=1, ranks=(0, 1)), "run.json.gz")
    save(make_holdings(), "held.json")
    return lambda *arguments: CliRunner().invoke(main, ["export", *arguments])


def test_chrome_is_the_trace_that_perfetto_reads(export: Callable[..., Result]) -> None:
    assert export("run.json.gz", "--to", "chrome").output == "saved run.chrome.json\n"
    export("run.json.gz", "--to", "perfetto")
    assert Path("run.chrome.json").read_bytes() == Path("run.perfetto.json").read_bytes()


def test_chakra_writes_a_trace_for_each_rank_and_their_groups(
    export: Callable[..., Result],
) -> None:
    result = export("run.json.gz", "--to", "chakra")
    assert result.output == "saved run.0.et … run.1.et (2 ranks)\nsaved run.groups.json\n"
    assert sorted(path.name for path in Path().glob("run.*.et")) == ["run.0.et", "run.1.et"]
    assert json.loads(Path("run.groups.json").read_bytes())
    assert export("run.json.gz", "--to", "chakra", "-o", "et-{rank}").exit_code == 0
    assert Path("et-1").read_bytes() == Path("run.1.et").read_bytes()
    assert Path("et.groups.json").exists()


def test_chakra_writes_nothing_if_one_of_its_files_exists(export: Callable[..., Result]) -> None:
    Path("run.1.et").write_text("precious")
    result = export("run.json.gz", "--to", "chakra")
    assert result.exit_code == 2
    assert "'run.1.et' already exists" in result.stderr
    assert not Path("run.0.et").exists()
    assert export("run.json.gz", "--to", "chakra", "--force").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("chakra", "-o", "one.et"), "2 ranks have a trace each, and 'one.et' is one file. Put"),
        (("chakra", "-o", "-"), "Chakra traces are several files"),
        (("tensorboard", "-o", "x.bin"), "TensorBoard would not find 'x.bin'"),
        (("tensorboard", "-o", "x.tfevents.gz"), "are not compressed"),
        (("json", "--table", "modules"), "--table is for --to csv"),
        (("csv", "--step", "3"), "--step is for --to tensorboard"),
        (("tensorboard", "--step", "-1"), "is not in the range"),
        (("csv", "--table", "nothing"), "'nothing' is not one of"),
        (("csv", "-o", "run.json.gz", "--force"), "is one of the recordings to read"),
        (
            ("markdown", "--against", "held.json", "-o", "held.json", "--force"),
            "would be overwritten",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_in_a_sentence(
    export: Callable[..., Result], arguments: tuple[str, ...], sentence: str
) -> None:
    result = export("run.json.gz", "--to", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert sorted(path.name for path in Path().iterdir()) == ["held.json", "run.json.gz"]


def test_tensorboard_files_are_named_so_that_it_finds_them(export: Callable[..., Result]) -> None:
    assert export("run.json.gz", "--to", "tensorboard").output == "saved run.tfevents\n"
    first = Path("run.tfevents").read_bytes()
    assert export("run.json.gz", "--to", "tensorboard", "-o", "-").stdout_bytes == first
    export("run.json.gz", "--to", "tensorboard", "--step", "7", "--force")
    assert Path("run.tfevents").read_bytes() != first


def test_tables_have_their_own_files_and_an_empty_one_lists_tables_with_rows(
    export: Callable[..., Result],
) -> None:
    result = export("held.json", "--to", "csv", "--table", "parameters")
    assert result.stdout == "saved held.parameters.csv\n"
    assert Path("held.parameters.csv").read_text().startswith("module,ranks,name,shape,")
    result = export("held.json", "--to", "csv")
    assert result.exit_code == 0
    assert (
        "has no collectives, so the table is empty. These tables have rows: coverage"
        in result.stderr
    )
    save(make_recording(), "empty.json")
    assert "All other tables are empty too" in export("empty.json", "--to", "csv").stderr


@pytest.mark.parametrize("form", ["perfetto", "chrome", "chakra"])
def test_an_empty_trace_says_what_was_not_recorded(
    export: Callable[..., Result], form: str
) -> None:
    save(make_diagnosed(), "diagnosed.json")
    result = export("diagnosed.json", "--to", form)
    assert result.exit_code == 0
    fact = "shardscope: collectives were not recorded, so the trace is empty. Export a recording of"
    assert fact in result.stderr
    assert "trace is empty" not in export("run.json.gz", "--to", form).stderr
