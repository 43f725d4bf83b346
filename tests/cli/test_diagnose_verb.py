"""`shardscope diagnose` as a user would type it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.small_target import TARGET, write
from home_workers import HomeWorkers, stay_at_home
from shardscope.cli import main
from shardscope.record import Condition, load

FAULT = ("--backend", "shardscope_fault_accuracy_error", "--option", "op=relu")


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> HomeWorkers:
    """No process is started: that `diagnose` starts them is tried elsewhere."""
    return stay_at_home(monkeypatch)


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["diagnose", *args])


def words(result: Result) -> str:
    return " ".join(result.output.split())


def test_a_correct_compiler_exits_0_and_leaves_only_the_recording(here: Path) -> None:
    result = run(write(here, TARGET), "--backend", "aot_eager")
    assert result.exit_code == 0, result.output
    assert "Diagnosis of train compiled by aot_eager verdict fine" in words(result)
    names = sorted(path.name for path in here.iterdir())
    assert names == ["train.py", "train.shardscope.json.gz"]


def test_a_wrong_model_exits_with_1_and_names_module_line_and_script(here: Path) -> None:
    result = run(write(here, TARGET), *FAULT, "-o", "out.json.gz")
    assert result.exit_code == 1, result.output
    text = words(result)
    assert "error compiled-wrong-result" in text
    assert "verdict wrong result: output 0 is off by" in text
    assert "op torch.nn.functional.relu in 1" in text
    assert "repro shardscope-diagnosis/repro.py (a fresh process fails in the same way)" in text
    assert "saved out.json.gz" in text
    assert (here / "shardscope-diagnosis" / "repro.py").exists()
    (diagnosis,) = load("out.json.gz").diagnoses
    assert (diagnosis.condition, diagnosis.target, diagnosis.is_minimal) == (
        Condition.WRONG_RESULT,
        "train",
        True,
    )
    shown = CliRunner().invoke(main, ["show", "out.json.gz"])
    assert shown.exit_code == 0
    printed = result.output.partition("\nsaved")[0].split()
    assert shown.output.split()[: len(printed)] == printed


def test_options_are_parsed_as_numbers_booleans_and_strings(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, object] = {}
    original = "shardscope.cli.diagnose.diagnose"

    def keep(*_: object, **settings: object) -> None:
        seen.update(settings)
        raise SystemExit(5)

    monkeypatch.setattr(original, keep)
    pairs = ("nth=2", "by=0.5", "print=True", "op=aten.relu", "also=a=b", "many=[1, 2]", "empty=")
    options = [part for pair in pairs for part in ("--option", pair)]
    result = run(
        write(here, TARGET), *options, "--dynamic", "--timeout", "2.5", "--max-queries", "7"
    )
    assert result.exit_code == 5
    assert seen["options"] == {
        "nth": 2,
        "by": 0.5,
        "print": True,
        "op": "aten.relu",
        "also": "a=b",
        "many": [1, 2],
        "empty": "",
    }
    assert (seen["dynamic"], seen["timeout_s"], seen["max_queries"]) == (True, 2.5, 7)
    assert (seen["backend"], seen["name"], seen["mode"]) == ("inductor", "train", None)


def test_the_loss_belongs_to_what_is_diagnosed(here: Path) -> None:
    source = TARGET + "\ndef loss(output):\n    return output.tanh().mean()\n"
    options = ("--backend", "shardscope_fault_nan", "--option", "op=tanh")
    result = run(write(here, source), *options, "--folder", "found")
    assert result.exit_code == 1, result.output
    assert "op Tensor.tanh train.py:18 loss return output.tanh().mean()" in words(result)
    assert (here / "found" / "repro.py").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--backend", "inducer"], "the backend inducer cannot be used"),
        (["--option", "nth"], "--option 'nth' is not of the form NAME=VALUE"),
        (["--option", "=3"], "--option '=3' is not of the form NAME=VALUE"),
        ([*FAULT, "--option", "nope=1"], "has no option 'nope'"),
        ([*FAULT, "--option", "nth=0"], "nth=0"),
        (["--mode", "fastest"], "Unrecognized mode=fastest"),
        (["--max-queries", "0"], "0 is not in the range"),
        (["--timeout", "0"], "0.0 is not in the range"),
        (["--folder", "train.py"], "Name another one"),
        (["-o", "missing/out.json"], "missing"),
    ],
)
def test_bad_input_is_one_sentence(here: Path, arguments: list[str], sentence: str) -> None:
    result = run(write(here, TARGET), *arguments)
    assert result.exit_code == 2, result.output
    assert sentence in words(result)
    assert "Traceback" not in result.output
    assert [path.name for path in here.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (None, "nothing.py"),
        ("def batch(model):\n    return 3\n", "model"),
        ("def model():\n    return 3\ndef batch(model):\n    return 3\n", "returned int"),
        (TARGET.replace("torch.randn(4, 16)", "torch.randn(4, 3)"), "fails in eager mode"),
    ],
)
def test_a_bad_target_is_one_sentence(here: Path, source: str | None, sentence: str) -> None:
    target = "nothing.py" if source is None else write(here, source)
    result = run(target, "--backend", "eager")
    assert result.exit_code == 2, result.output
    assert sentence in words(result)
    assert "Traceback" not in result.output
