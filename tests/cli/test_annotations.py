"""GitHub's workflow commands: escaped as GitHub wants it, at the line that is to blame."""

from __future__ import annotations

import pytest

import sample_recordings as samples
from shardscope.cli.ci_formats import annotate_violations
from shardscope.contract import check
from shardscope.contract.toml_reader import parse_contract
from shardscope.contract.violation_text import render_violations
from shardscope.record import Call, Recording, Source
from shardscope.report.export.annotations import render_github


def annotate(text: str, recording: Recording, folder: str = "/repo") -> list[str]:
    file = parse_contract(text)
    annotations = annotate_violations(check(file.contract, recording), file)
    return [line.decode().rstrip("\n") for line in render_github(annotations, folder=folder)]


def called_at(path: str) -> Recording:
    source = Source(file=path, line=7, text="y = 100 % x")
    call = samples.make_collective(source=source, cause=Call(api="a,b:c"))
    return samples.make_recording((call,))


def test_a_violation_is_annotated_at_its_source_line() -> None:
    (line,) = annotate("[[contract.comm]]\ncount = 0", called_at("/repo/pkg/train.py"))
    assert line == (
        "::error file=pkg/train.py,line=7,title=shardscope contract%3A collectives::"
        "expected: exactly 0%0Aactual: 1 on rank 0%0A"
        "cause: all_reduce[world], forward, 7 KiB sent in the root module: call of a,b:c%0A"
        "line: /repo/pkg/train.py:7  y = 100 %25 x%0A"
        "remedy: If the change is intended, update the limit."
    )


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("train.py", "train.py"),
        ("./sub/../train.py", "train.py"),
        ("/repo/a,b:c%.py", "a%2Cb%3Ac%25.py"),
        ("/elsewhere/train.py", "/elsewhere/train.py"),
        ("/repository/train.py", "/repository/train.py"),
        ("../train.py", "../train.py"),
    ],
)
def test_paths_are_relative_to_the_folder_where_they_are_inside_it(path: str, shown: str) -> None:
    (line,) = annotate("[[contract.comm]]\ncount = 0", called_at(path))
    assert line.startswith(f"::error file={shown},line=7,title=")


def test_what_has_no_line_is_shown_at_the_contracts() -> None:
    text = "[contract]\ngaps = 0\npeak_memory = 1\n\n[[contract.comm]]\nmodule='gone'\ncount = 1"
    lines = annotate(text, samples.make_recording())
    places = [line.split(",title")[0] for line in lines]
    assert places == [
        "::error file=shardscope.toml,line=3",
        "::error file=shardscope.toml,line=5",
    ]


def test_hostile_names_stay_on_the_line_and_cannot_start_a_command(varied: Recording) -> None:
    text = "[contract]\ngaps=0\nfindings=0\n[[contract.comm]]\ncount=0\nmax_bytes=0"
    for line in annotate(text, varied):
        assert "\n" not in line
        assert "\r" not in line
        assert "\x1b" not in line
        assert line.count("::error ") == 1
    violations = check(parse_contract(text).contract, varied)
    assert "\x1b" not in render_violations(violations)
