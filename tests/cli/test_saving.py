"""One rule for all commands about what is saved, under which name, and what is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.small_target import TARGET, write
from sample_recordings import make_llama, make_recording
from shardscope.cli import main
from shardscope.cli.explain import _Run
from shardscope.cli.trace import TracedStep
from shardscope.record import Recording, load, save

RECORDING = make_llama(num_layers=1, ranks=(0,))
# The function of each command that runs the program, and what it gives: other tests run them.
RUNS: dict[str, tuple[str, Any]] = {
    "demo": ("shardscope.cli.demo.trace_step", TracedStep(RECORDING)),
    "trace": ("shardscope.cli.trace._trace_target", TracedStep(RECORDING)),
    "audit": ("shardscope.cli.audit._audit", (RECORDING, None)),
    "visualize": ("shardscope.cli.visualize._visualize", RECORDING),
    "memory": ("shardscope.cli.memory._profile", RECORDING),
    "coverage": ("shardscope.cli.coverage._cover", RECORDING),
    "parallelize": ("shardscope.cli.parallelize._make", None),
    "parity": ("shardscope.cli.parity._check", RECORDING),
    "explain": ("shardscope.cli.explain._explain", _Run(RECORDING)),
    "diagnose": ("shardscope.cli.diagnose._diagnose", RECORDING),
    "merge": ("shardscope.cli.merge.merge_files", RECORDING),
}


class _Partitioned:
    """What parallelize gives, as far as the command reads it."""

    fallbacks = ()

    def recording(self) -> Recording:
        return RECORDING


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".py")


@pytest.mark.parametrize("verb", RUNS)
def test_every_recording_is_saved_under_the_same_rule(
    verb: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, result = RUNS[verb]
    monkeypatch.setattr(function, lambda *_args, **_kwargs: result or _Partitioned())
    (here / "train.py").write_text("def model(): ...\ndef batch(model): ...\nplan = {}\n")
    save(RECORDING, here / "rank0.json")
    args = {
        "demo": [verb],
        "merge": [verb, "rank0.json"],
        "trace": [verb, "train.py", "--mesh", "dp=2"],
        "audit": [verb, "train.py", "--mesh", "dp=2"],
        "visualize": [verb, "train.py", "weight", "--mesh", "dp=2"],
        "parallelize": [verb, "train.py", "--no-verify"],
    }.get(verb, [verb, "train.py"])
    stem = {"demo": "demo", "merge": "merged"}.get(verb, "train")

    def check(name: str, *options: str) -> None:
        done = run(*args, *options)
        assert done.exit_code == 0, done.output
        assert f"\n\nsaved {name}\n" in done.output
        assert done.output.count("saved ") == 1
        assert load(here / name).collectives

    check(f"{stem}.shardscope.json.gz")
    check(f"{stem}-2.shardscope.json.gz")
    check("mine.json", "-o", "mine.json")
    expected = [
        f"{stem}-2.shardscope.json.gz",
        f"{stem}.shardscope.json.gz",
        "mine.json",
        "rank0.json",
    ]
    assert files(here) == sorted(expected)

    (here / "mine.json").write_text("precious")
    refused = run(*args, "-o", "mine.json")
    assert refused.exit_code == 2
    assert refused.stderr == (
        "shardscope: 'mine.json' already exists. Choose another name, or overwrite it with "
        "--force (force=True in Python).\n"
    )
    assert (here / "mine.json").read_text() == "precious"
    check("mine.json", "-o", "mine.json", "--force")
    (here / f"{stem}.shardscope.json.gz").write_text("old")
    check(f"{stem}.shardscope.json.gz", "--force")
    assert files(here) == sorted(expected)


@pytest.mark.parametrize(
    ("args", "saved"),
    [
        (("report", "runs/step.json.gz"), "runs/step.html"),
        (("report", "runs/step.json.gz", "-o", "page.html"), "page.html"),
        (("export", "runs/step.json.gz", "--to", "csv"), "runs/step.csv"),
        (("export", "runs/step.json.gz", "--to", "markdown", "-o", "step.md"), "step.md"),
        (("contract", "record", "runs/step.json.gz"), "shardscope.toml"),
        (("contract", "record", "runs/step.json.gz", "-o", "limits.toml"), "limits.toml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_files_made_from_a_recording_are_named_after_it(
    args: tuple[str, ...], saved: str, here: Path
) -> None:
    (here / "runs").mkdir()
    save(RECORDING, here / "runs" / "step.json.gz")
    done = run(*args)
    assert done.exit_code == 0
    assert done.output.splitlines()[-1].startswith(f"saved {saved}")
    assert (here / saved).exists()
    again = run(*args)
    assert again.exit_code == 2
    assert f"'{saved}' already exists" in again.stderr
    assert run(*args, "--force").exit_code == 0


def test_a_merged_recording_does_not_overwrite_one_that_it_is_made_of(here: Path) -> None:
    save(RECORDING, here / "step.json")
    before = (here / "step.json").read_bytes()
    result = run("merge", "step.json", "-o", "step.json", "--force")
    assert result.exit_code == 2
    assert "'step.json' is one of the recordings to read" in result.stderr
    assert (here / "step.json").read_bytes() == before


@pytest.mark.parametrize(
    "args",
    [
        ("demo", "--layers", "1"),
        ("merge", "run.json"),
        ("contract", "record", "run.json"),
        ("init", "train.py"),
    ],
)
def test_what_cannot_be_printed_is_not_saved_as_a_file_called_dash(
    args: tuple[str, ...], here: Path
) -> None:
    save(RECORDING, here / "run.json")
    result = run(*args, "-o", "-")
    assert result.exit_code == 2
    assert "standard output, which has the summary. Name a file with -o." in result.stderr
    assert files(here) == ["run.json"]


def test_a_stream_is_named_like_every_other_saved_file(here: Path) -> None:
    write(here, TARGET)
    result = run("trace", "train.py", "--mesh", "dp=2", "--rank", "1", "--stream", "s-{rank}.jsonl")
    assert result.output.splitlines()[-2:] == ["saved train.shardscope.json.gz", "saved s-1.jsonl"]
    assert (here / "s-1.jsonl").exists()


@pytest.mark.parametrize(
    "args",
    [
        ("show", "step.json"),
        ("diff", "step.json", "step.json"),
        ("contract", "check", "step.json"),
        ("report", "step.json", "-o", "-"),
        ("export", "step.json", "--to", "csv", "-o", "-"),
    ],
    ids=" ".join,
)
def test_commands_that_display_save_nothing(args: tuple[str, ...], here: Path) -> None:
    save(make_recording(), here / "step.json")
    (here / "shardscope.toml").write_text("[contract]\ngaps = 0\n")
    assert run(*args).exit_code == 0
    assert files(here) == ["shardscope.toml", "step.json"]
