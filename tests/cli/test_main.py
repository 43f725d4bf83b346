"""The command line: help without torch, one line per error, exit codes, pipes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from click.testing import CliRunner

from sample_recordings import make_llama, make_varied
from shardscope.cli import main
from shardscope.record import load, save
from shardscope.version import __version__


def _run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_help_lists_all_verbs_without_importing_them():
    code = (
        "import sys; from shardscope.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'torch' or m in "
        "('shardscope.cli.demo', 'shardscope.cli.trace', 'shardscope.cli.show')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    verbs = [
        line.split()[0]
        for line in done.stdout.split("Commands:")[1].split("Examples:")[0].splitlines()
        if line[:2] == "  " and line[2:3].strip()
    ]
    assert [v for v in verbs if v in ("demo", "trace", "show", "merge", "export")] == [
        "demo",
        "trace",
        "show",
        "merge",
        "export",
    ]


@pytest.mark.parametrize("verb", ["show", "merge", "export"])
def test_reading_verbs_do_not_import_torch(verb):
    code = f"import sys, shardscope.cli.{verb}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version_is_printed():
    assert _run("--version").output == f"shardscope {__version__}\n"


def test_our_errors_are_one_line_without_traceback():
    result = _run("show", "gone.json")
    assert result.exit_code == 2
    assert result.stderr == "shardscope: there is no file 'gone.json'. Check the path.\n"
    assert result.stdout == ""


def test_debug_shows_the_traceback_too():
    result = _run("--debug", "show", "gone.json")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.endswith("shardscope: there is no file 'gone.json'. Check the path.\n")


def test_hostile_file_names_are_sanitized_in_errors():
    result = _run("show", "\x1b[31mgone\n.json")
    assert (
        result.stderr == "shardscope: there is no file '\\x1b[31mgone\\n.json'. Check the path.\n"
    )


def test_unexpected_errors_are_one_line_that_suggests_debug(monkeypatch):
    def fail(_path):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("shardscope.cli.loading.load", fail)
    result = _run("show", "x.json")
    assert result.exit_code == 2
    assert "unexpected error (ZeroDivisionError: by zero)" in result.stderr
    assert "--debug" in result.stderr
    assert "Traceback" not in result.stderr


def test_interrupt_is_one_short_line(monkeypatch):
    def interrupt(_path):
        raise KeyboardInterrupt

    monkeypatch.setattr("shardscope.cli.loading.load", interrupt)
    result = _run("show", "x.json")
    assert result.exit_code == 2
    assert result.stderr == "shardscope: interrupted\n"


@pytest.mark.parametrize(
    "args",
    [
        ("shout",),
        ("show",),
        ("show", "x.json", "--by", "colour"),
        ("export", "x.json"),
        ("export", "x.json", "--to", "pdf"),
    ],
)
def test_wrong_usage_exits_with_2(args):
    result = _run(*args)
    assert result.exit_code == 2
    assert "Error: " in result.stderr


def _shell(command, folder, **environment):
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        cwd=folder,
        env=os.environ | {"PYTHON": sys.executable} | environment,
        check=False,
    )


@pytest.mark.parametrize(
    "verb",
    ["show big.json --no-fold", "export big.json --to csv -o -", "export big.json --to json -o -"],
)
def test_a_closed_pipe_is_not_an_error(tmp_path, verb):
    save(make_llama(num_layers=400), tmp_path / "big.json")
    done = _shell(f'"$PYTHON" -m shardscope {verb} | head -n 1', tmp_path)
    assert done.stderr == b""
    assert done.returncode == 0
    assert done.stdout.count(b"\n") == 1


def test_a_pipe_that_is_never_read_is_not_an_error(tmp_path):
    save(make_llama(num_layers=1), tmp_path / "run.json")
    for verb in ("show run.json", "export run.json --to csv -o -", "completion bash"):
        done = _shell(f'"$PYTHON" -m shardscope {verb} | true', tmp_path)
        assert done.stderr == b""
        assert done.returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
@pytest.mark.parametrize(
    "verb",
    ["show run.json", "export run.json --to csv -o -", "merge run.json -o new.json", "--help"],
)
def test_full_disk_behind_standard_output_is_one_sentence(tmp_path, verb):
    save(make_llama(num_layers=1), tmp_path / "run.json")
    done = _shell(f'"$PYTHON" -m shardscope {verb} > /dev/full', tmp_path)
    assert done.stderr.startswith(b"shardscope: standard output cannot be written: No space left")
    assert done.stderr.count(b"\n") == 1
    assert done.returncode == 2


@pytest.mark.parametrize("verb", ["show run.json", "export run.json --to csv -o -"])
def test_closed_standard_output_is_one_sentence(tmp_path, verb):
    save(make_llama(num_layers=1), tmp_path / "run.json")
    done = _shell(f'"$PYTHON" -m shardscope {verb} >&-', tmp_path)
    assert done.stderr == (
        b"shardscope: standard output cannot be written: it is closed. "
        b"Redirect it to a disk with free space, or to /dev/null.\n"
    )
    assert done.returncode == 2


def test_a_recording_is_saved_even_if_it_cannot_be_printed(tmp_path):
    save(make_llama(num_layers=1), tmp_path / "run.json")
    done = _shell('"$PYTHON" -m shardscope merge run.json -o new.json >&-', tmp_path)
    assert done.returncode == 2
    assert load(tmp_path / "new.json").run.ranks


def _run_on_terminal(*args, folder, **environment):
    """What a command writes to a terminal of its own as standard error."""
    ours, user_code = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", *args],
        stderr=user_code,
        stdout=subprocess.DEVNULL,
        cwd=folder,
        env=os.environ | {"TERM": "xterm"} | environment,
    )
    os.close(user_code)
    written = b""
    with suppress(OSError):  # which a terminal gives at its end
        while chunk := os.read(ours, 4096):
            written += chunk
    os.close(ours)
    assert process.wait(60) == 0
    return written.decode()


_SLOW = """
import time
from importlib import import_module
verb = import_module("shardscope.cli.{verb}")
loading = import_module("shardscope.cli.loading")
merge = import_module("shardscope.record.merge")
def slowly(path, load=merge.load):
    time.sleep({seconds})
    return load(path)
if hasattr(verb, "load"): verb.load = slowly
loading.load = merge.load = slowly
from shardscope.cli import main
main({args!r})
"""


@pytest.mark.parametrize(
    ("verb", "args", "said"),
    [
        ("show", ["show", "run.json"], "reading run.json"),
        ("merge", ["merge", "run.json", "-o", "new.json"], "reading run.json (1 of 1)"),
        ("export", ["export", "run.json", "--to", "csv"], "reading run.json"),
    ],
)
def test_long_commands_show_progress_on_a_terminal(tmp_path, verb, args, said):
    save(make_llama(num_layers=1), tmp_path / "run.json")
    slow = _SLOW.format(verb=verb, seconds=1.5, args=args)
    assert said in _run_on_terminal(slow, folder=tmp_path)


def test_quick_commands_show_no_progress(tmp_path):
    save(make_llama(num_layers=1), tmp_path / "run.json")
    quick = _SLOW.format(verb="show", seconds=0, args=["show", "run.json"])
    assert _run_on_terminal(quick, folder=tmp_path) == ""


def test_output_is_plain_when_piped_and_with_no_color(tmp_path):
    save(make_varied(), tmp_path / "run.json")
    piped = _shell('"$PYTHON" -m shardscope show run.json', tmp_path)
    assert piped.returncode == 0
    assert b"\x1b" not in piped.stdout
    forced = _shell(
        '"$PYTHON" -m shardscope show run.json', tmp_path, FORCE_COLOR="1", TERM="xterm"
    )
    assert b"\x1b[" in forced.stdout


def test_a_terminal_without_unicode_gets_question_marks_instead_of_a_traceback(tmp_path):
    save(make_llama(num_layers=2), tmp_path / "run.json")
    done = _shell('"$PYTHON" -m shardscope show run.json', tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.startswith(b"shardscope ? dp=128")


def test_real_interrupt_ends_quietly(tmp_path):
    os.mkfifo(tmp_path / "never.json")
    process = subprocess.Popen(
        [sys.executable, "-m", "shardscope", "show", "never.json"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
    )
    # Opening the pipe for writing waits until the command has opened it for reading.
    with open(tmp_path / "never.json", "wb"):
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert errors == b"shardscope: interrupted\n"
    assert process.returncode == 2
