"""What a recording's names, lines and errors say is shown, and acts on nothing that shows it."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

import sample_recordings as samples
from large_recording import Attacker
from shardscope import show
from shardscope.cli import main
from shardscope.errors import RecordingError
from shardscope.record import Recording, guard_line, load, sanitize_text, save
from shardscope.record.text import GuardedFile
from shardscope.report.text.summary import render_plain

COMMANDS = (
    "::error file=a.py,line=1::taken over",
    "  ::warning::after blanks",
    "in a text ::add-mask::x",
    "##[error]anywhere ##[set-output name=x]y",
    "##vso[task.setvariable]x",
    ":",
    ":error::in two parts",
    "\x1b]0;title\x07\x1b[2J \u202eright to left\u2069 \u2028 \x9b31m \x7f",
    "line\n::error::after a break\r\n##[error]and another",
    "unbroken" * 9 + "::error::where a line is full",
    "x" * 71 + " ::error::at the edge",
)
FORMATS = ("perfetto", "chrome", "tensorboard", "csv", "json", "markdown")
# At the start of a line, or anywhere in it: what GitHub's runner looks for.
RUNNER_COMMAND = re.compile(r"^\s*::[\w-]+|##(?:vso)?\[", re.MULTILINE)


def is_active(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def check_inert(text: str, *, allowed: str = "") -> None:
    found = [char for char in text if is_active(char) and char not in allowed]
    assert found == []
    assert RUNNER_COMMAND.findall(text) == []


@pytest.fixture(scope="module")
def attack() -> Recording:
    """Every kind of record, each of its texts one of the commands."""
    parts = [
        samples.make_varied(),
        samples.make_phases(),
        samples.make_holdings(),
        samples.make_parallel(),
        samples.make_explained(),
        samples.make_diagnosed(),
    ]
    attacker = Attacker(COMMANDS)
    fields = {
        name: tuple(attacker.change(record) for part in parts for record in getattr(part, name))
        for name in parts[0].__struct_fields__
        if isinstance(getattr(parts[0], name), tuple)
    }
    instruments = ("trace", "audit", "coverage", "memory", "parity", "explain", "diagnose")
    run = replace(parts[0].run, command=COMMANDS[0], instruments=instruments)
    return Recording(run=run, **fields)


@pytest.fixture
def file(attack: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    save(attack, "run.json")
    save(replace(attack, findings=(), gaps=(), collectives=attack.collectives[:3]), "old.json")
    return "run.json"


def run(*arguments: str, width: int = 80) -> str:
    result = CliRunner().invoke(main, list(arguments), env={"COLUMNS": str(width)})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.stdout + result.stderr  # `output` lacks what is written as bytes


@pytest.mark.parametrize(
    "arguments",
    [
        ("show",),
        ("show", "--view", "all", "--no-fold"),
        ("show", "--by", "cause"),
        ("merge", "-o", "merged.json"),
        ("report", "-o", "page.html"),
        ("diff", "old.json"),
        ("diff", "old.json", "--format", "json"),
        ("diff", "old.json", "--format", "markdown"),
        ("show", "--module", "::error::x\n::error::y"),
        ("contract", "record", "-o", "limits.toml"),
    ],
    ids=" ".join,
)
def test_printed_text_has_no_active_control_characters(
    file: str, arguments: tuple[str, ...]
) -> None:
    verb, *options = arguments
    place = 1 if verb == "contract" else 0
    options.insert(place, file)
    for width in (72, 80) if arguments == ("show",) else (80,):
        check_inert(
            run(verb, *options, width=width), allowed="\u200b" if "markdown" in options else ""
        )


@pytest.mark.parametrize("form", FORMATS)
def test_exported_text_has_no_active_content(file: str, form: str) -> None:
    run("export", file, "--to", form, "-o", f"out.tfevents.{form}")
    data = Path(f"out.tfevents.{form}").read_bytes()
    if form == "tensorboard":
        assert b"\x1b]" not in data
        assert "\u202e".encode() not in data
        return
    check_inert(data.decode(), allowed="\u200b")
    check_inert(run("export", file, "--to", form, "-o", "-"), allowed="\u200b")
    if form in ("perfetto", "chrome"):
        _check_strings(json.loads(data))


def _check_strings(value: object) -> None:
    """Texts that a program shows as they are."""
    if isinstance(value, str):
        assert not any(map(is_active, value)), value
        assert "\n" not in value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_strings(item)


def test_no_table_has_active_content(file: str) -> None:
    for table in ("collectives", "modules", "parameters", "findings", "gaps", "phases", "memory"):
        check_inert(run("export", file, "--to", "csv", "--table", table, "-o", "-"))


def test_a_page_has_no_active_content(file: str) -> None:
    run("report", file, "-o", "page.html")
    text = Path("page.html").read_text()
    data = text.partition('id="page">')[2].partition("</script>")[0]
    assert len(data) > 10_000
    check_inert(data)
    _check_lines(json.loads(data))


def _check_lines(value: object) -> None:
    if isinstance(value, str):
        assert not any(map(is_active, value)), value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_lines(item)


def test_only_violations_become_annotations(file: str) -> None:
    Path("limits.toml").write_text(
        "[contract]\ngaps = 0\nunasked = 0\n\n[contract.findings]\nerror = 0\nwarning = 0\n"
    )
    arguments = ("contract", "check", file, "--contract", "limits.toml", "--format")
    for form in ("text", "json"):
        check_inert(run(*arguments, form))
    lines = run(*arguments, "github").splitlines()
    ours = [line for line in lines if line.startswith("::error file=")]
    assert ours
    check_inert("\n".join(line for line in lines if line not in ours))
    for line in ours:
        assert not any(map(is_active, line))
        assert line.count("::") >= 2


@pytest.mark.parametrize("name", ["a\n::error::x", "\x1b[31m\u202e", "##[error]x"])
def test_file_names_in_errors_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("{}")
    for arguments in (["show", name], ["show", f"{name}.gone"], ["merge", name, "-o", name]):
        check_inert(run(*arguments))
    check_inert(run("show", f"--{name}"))
    check_inert(run(name))
    check_inert(run("--debug", "show", name))


def test_text_of_a_hostile_file_in_an_error_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"format": COMMANDS[7]}))
    with pytest.raises(RecordingError, match="not a shardscope recording") as caught:
        load(path)
    check_inert(str(caught.value))


def test_python_users_see_the_same(attack: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    show(attack)
    show(attack, view="communication")
    check_inert(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("::error::x", r"\x3a:error::x"),
        ("  ::error::x", r"  \x3a:error::x"),
        ("a ::error::x", r"a \x3a:error::x"),
        ("a\t::x", r"a\t::x"),
        ("##[error]x", r"\x23#[error]x"),
        ("a##vso[x]", r"a\x23#vso[x]"),
        ("###[x]", r"#\x23#[x]"),
        ("\u00a0::x", "\u00a0\\x3a:x"),
        ("aten::mm c10d::allreduce_ a:b # ## x[::2]", "aten::mm c10d::allreduce_ a:b # ## x[::2]"),
        ("", ""),
    ],
)
def test_commands_are_escaped_and_names_with_colons_are_not(text: str, shown: str) -> None:
    assert sanitize_text(text) == shown


def test_lines_are_guarded_where_a_layout_breaks_them() -> None:
    assert guard_line("  ::error::x") == r"  \x3a:error::x"
    assert guard_line("a ::b") == "a ::b"
    assert guard_line("a ##[b]") == r"a \x23#[b]"


def test_output_is_guarded_however_it_is_written(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+") as plain:
        file = GuardedFile(plain)
        for piece in ("a", "::b", "\n", "::c\n ::d", "::e\nf##[", "g]\n\n", "::h"):
            file.write(piece)
        plain.seek(0)
        assert plain.read() == "a::b\n\\x3a:c\n \\x3a:d::e\nf\\x23#[g]\n\n\\x3a:h"


def test_plain_text_is_guarded_too() -> None:
    check_inert(render_plain(COMMANDS[9], width=72))
