"""A TARGET that fails, ends itself or is none: one sentence, and the remedy if there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from cli.small_target import TARGET, run, write
from shardscope.cli import main
from shardscope.record import load


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["missing.py", "--mesh", "dp=2"], "missing.py does not exist"),
        (["no.such.module", "--mesh", "dp=2"], "There is no file or module 'no.such.module'"),
        (["train.py"], "There is no mesh to run train.py on"),
        (["missing.py"], "missing.py does not exist"),
        (["."], ". is a folder"),
        (["train.py", "--mesh", "dp"], "--mesh 'dp' has 'dp' where NAME=SIZE is expected"),
        (
            ["train.py", "--mesh", "dp=0"],
            "axis dp has size 0 in --mesh; sizes must be whole numbers from 1 to 1,048,576",
        ),
        (["train.py", "--mesh", "dp=2,dp=4"], "has the axis 'dp' twice"),
        (["train.py", "--mesh", "dp=1048577"], "has more than 1,048,576 ranks, the most"),
        (["train.py", "--mesh", "dp=2048,tp=1024"], "has more than 1,048,576 ranks, the most"),
        (["train.py", "--mesh", "dp=" + "9" * 6000], "has more than 1,048,576 ranks, the most"),
        (["train.py", "--mesh", "x" * 9000], "where NAME=SIZE is expected"),
        (["train.py", "-o", "no/such/folder.json"], "There is no mesh to run train.py on"),
        (
            ["train.py", "--mesh", "dp=2", "--rank", "2"],
            "--rank is 2, but the mesh has ranks 0 to 1.",
        ),
        (["train.py", "--mesh", "dp=2", "-o", "no/such/folder.json"], "no/such"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(
    here: Path, args: list[str], sentence: str
) -> None:
    write(here, TARGET)
    result = run(*args)
    assert result.exit_code == 2
    assert sentence in result.output
    assert "Traceback" not in result.output
    assert result.output.count("shardscope: ") == 1
    assert len(result.output) < 500


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def batch(model): pass", "defines no function model()"),
        ("def model(): pass", "defines no function batch()"),
        ("def model(: pass", "could not be imported: SyntaxError"),
        ("import no_such_thing", "could not be imported: ModuleNotFoundError"),
        ("1 / 0", "could not be imported: ZeroDivisionError"),
        (TARGET + "\nstep = 3\n", "defines step as int"),
        (TARGET + "\nmodel = model()\n", "defines model as Sequential, not as a function"),
        (TARGET + "\ndef model():\n    return 3\n", "model() returned int"),
        (TARGET + "\ndef model():\n    return [][0]\n", "model() failed: IndexError"),
        (TARGET + "\ndef batch(model):\n    return [][0]\n", "batch() failed: IndexError"),
    ],
)
def test_bad_target_gets_one_sentence_and_exit_code_2(here: Path, text: str, sentence: str) -> None:
    result = run(write(here, text), "--mesh", "dp=2")
    assert result.exit_code == 2
    assert sentence in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("text", ["x = 1", TARGET + "\nstep = 3\n"])
def test_a_missing_function_is_reported_with_an_example_target(here: Path, text: str) -> None:
    result = run(write(here, text), "--mesh", "dp=2")
    assert "\\n" not in result.output
    lines = result.output.splitlines()
    assert "    def model():" in lines
    assert "    def batch(model):" in lines


def test_hostile_target_is_sanitized_beside_an_example(here: Path) -> None:
    result = run(write(here, "x = 1", name="a\nb\x1b[31m.py"), "--mesh", "dp=2")
    assert result.output.startswith("shardscope: a\\nb\\x1b[31m.py defines no function model()")
    assert "\x1b" not in result.output


@pytest.mark.parametrize("part", ["model()", "batch(model)", "parallelize(model, mesh)"])
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit(0)", "SystemExit: 0 ("),
        ("sys.exit(3)", "SystemExit: 3 ("),
        ("sys.exit('no data')", "SystemExit: no data ("),
        ("sys.exit()", "SystemExit ("),
        ("raise GeneratorExit", "GeneratorExit ("),
        ("raise type('Own', (BaseException,), {})('odd')", "Own: odd ("),
    ],
)
def test_a_program_that_exits_is_reported_in_one_sentence(
    here: Path, part: str, end: str, said: str
) -> None:
    text = TARGET + f"\nimport sys\n\ndef {part}:\n    {end}\n"
    result = run(write(here, text), "--mesh", "dp=2")
    assert result.exit_code == 2
    name = part.partition("(")[0]
    assert result.output.startswith(f"shardscope: train's {name}() failed: {said}")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit(5)", "raise GeneratorExit"])
def test_a_step_that_exits_keeps_what_was_recorded(here: Path, end: str) -> None:
    text = TARGET + f"\nimport sys\n\ndef step(model, batch):\n    model(batch)\n    {end}\n"
    result = run(write(here, text), "--mesh", "dp=2")
    assert result.exit_code == 2
    assert "train's step() failed: " in result.stderr
    assert len(load(here / "train.shardscope.json.gz").collectives) == 2


def test_interrupt_in_the_program_is_an_interrupt(here: Path) -> None:
    text = TARGET + "\ndef model():\n    raise KeyboardInterrupt\n"
    result = run(write(here, text), "--mesh", "dp=2")
    assert (result.exit_code, result.output) == (2, "shardscope: interrupted\n")


def test_an_import_that_exits_is_reported_in_one_sentence(here: Path) -> None:
    result = run(write(here, "class Own(BaseException): pass\nraise Own('odd')"), "--mesh", "dp=2")
    assert result.exit_code == 2
    assert "could not be imported: Own: odd (" in result.output


NO_DATA = "The simulation runs on tensors without data: remove .item()"
NO_SHAPE = "use an op whose shapes do not, such as torch.where(mask, x, 0) for x[mask]"


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("model(batch).sum().item()", NO_DATA),
        ("if model(batch).sum() > 0: pass", NO_DATA),
        ("model(batch).nonzero()", NO_SHAPE),
    ],
)
def test_the_error_of_a_step_that_reads_values_explains_that_tensors_have_no_data(
    here: Path, line: str, remedy: str
) -> None:
    name = write(here, TARGET + f"\ndef step(model, batch):\n    {line}\n")
    result = run(name, "--mesh", "dp=2")
    assert result.exit_code == 2
    assert remedy in result.stderr
    assert "run again with --data" in result.stderr
    again = run(name, "--mesh", "dp=2", "--data", "--force")
    assert again.exit_code == 0, again.output


def test_step_that_fails_before_its_first_collective_is_not_called_without_collectives(
    here: Path,
) -> None:
    name = write(here, TARGET + "\ndef step(model, batch):\n    raise KeyError('loss')\n")
    result = run(name, "--mesh", "dp=2")
    assert "No collectives were recorded before the step ended early" in result.stdout


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("model[0].weight.sum().item()", NO_DATA),
        ("model[0].weight.tolist()", NO_DATA),
        ("{}['tp']", ""),
        ("len(3)", ""),
        ("mesh['no such axis']", ""),
        (
            "torch.distributed.init_process_group('gloo')",
            "The process group already exists when TARGET is called: remove init_process_group",
        ),
    ],
)
def test_the_remedy_for_a_failed_parallelize_is_correct(here: Path, line: str, remedy: str) -> None:
    text = TARGET + f"\ndef parallelize(model, mesh):\n    {line}\n"
    result = run(write(here, text), "--mesh", "dp=2")
    assert result.exit_code == 2
    assert "parallelize() failed: " in result.stderr
    assert remedy in result.stderr
    assert ("--data" in result.stderr) == (remedy == NO_DATA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the program finds its GPU")
def test_the_error_of_a_program_that_uses_cuda_explains_how_to_simulate_it(here: Path) -> None:
    name = write(here, TARGET + "\ndef parallelize(model, mesh):\n    torch.ones(2).cuda()\n")
    result = run(name, "--mesh", "dp=2", "--data")
    assert result.exit_code == 2
    assert "write mesh.device_type for" in result.stderr
    assert "run without --data and --device" in result.stderr
    again = run(name, "--mesh", "dp=2", "--force")
    assert again.exit_code == 0, again.output


def test_attention_without_a_rule_for_the_cpu_names_the_device(here: Path) -> None:
    """As DTensor refuses scaled_dot_product_attention on the CPU."""
    op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    error = f"NotImplementedError('Operator {op} does not have a sharding strategy registered.')"
    name = write(here, TARGET + f"\ndef step(model, batch):\n    raise {error}\n")
    result = run(name, "--mesh", "dp=4", "--device", "cpu")
    assert result.exit_code == 2
    assert "run again with --device cuda" in result.stderr


def test_failure_is_shown_at_a_line_of_the_program_and_not_of_a_library(here: Path) -> None:
    text = TARGET + (
        "\nimport argparse, json\n\ndef model():\n"
        "    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--lr', required=True)\n"
        "    parser.parse_args()\n"
    )
    result = run(write(here, text), "--mesh", "dp=2")
    assert result.exit_code == 2
    number = text[: text.index("parser.parse_args")].count("\n") + 1
    assert f"model() failed: SystemExit: 2 ({here}/train.py, line {number})." in result.stderr


def test_long_and_hostile_failures_are_sanitized_and_shortened(here: Path) -> None:
    text = TARGET + "\ndef step(model, batch):\n    raise ValueError('\\x1b[31m' + 'x' * 99999)\n"
    result = run(write(here, text), "--mesh", "dp=2")
    assert result.exit_code == 2
    assert "\x1b" not in result.output
    assert "ValueError: xxx" in result.stderr
    assert len(result.stderr) < 1000


def test_an_exception_without_a_message_is_named_by_its_type(here: Path) -> None:
    text = TARGET + (
        "\nclass Mute(Exception):\n    def __str__(self): raise ValueError\n"
        "\ndef batch(model):\n    raise Mute\n"
    )
    assert "batch() failed: Mute (" in run(write(here, text), "--mesh", "dp=2").stderr


FAILING = TARGET + "\ndef step(model, batch):\n    model(batch)\n    raise ValueError('too hot')\n"


def test_debug_shows_the_traceback_of_a_failed_step(here: Path) -> None:
    name = write(here, FAILING)
    result = CliRunner().invoke(main, ["--debug", "trace", name, "--mesh", "dp=2"])
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert "raise ValueError('too hot')" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("shardscope: train's step() failed: ")
    assert "Traceback" not in run(name, "--mesh", "dp=2", "--force").stderr


def test_step_that_fails_loses_nothing(here: Path) -> None:
    text = TARGET + "\ndef step(model, batch):\n    model(batch)\n    raise ValueError('too hot')\n"
    result = run(write(here, text), "--mesh", "dp=2")
    assert result.exit_code == 2
    assert "step() failed: ValueError: too hot (" in result.output
    assert "train.py, line" in result.output
    recording = load(here / "train.shardscope.json.gz")
    assert len(recording.collectives) == 2
    assert "too hot" in recording.gaps[0].fact
