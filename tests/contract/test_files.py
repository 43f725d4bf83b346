"""`shardscope.toml`: what it may contain, and the errors for everything else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardscope.contract import Contract, Figure, Limit, read_contract, render_contract
from shardscope.contract.limits import CauseKind
from shardscope.contract.record import write_contract
from shardscope.contract.toml_reader import parse_contract
from shardscope.errors import ContractError, OutputError
from shardscope.record import CollectiveKind, Phase, Severity
from shardscope.record.units import describe_size, parse_size, round_size_up, write_size

BY_HAND = """\
# Ask Ada before you change this.
[contract]
gaps = 0                     # none, ever
peak_memory = "60GiB"        # of 80
unasked = 2

[contract.findings]
error = 0   # really
rules = { implicit-gather = 1 }

# attention talks once
[[contract.comm]]
module = "layers.*.attn"
phase = ["forward", "recompute"]
axis = "tp"
kind = "all_reduce"
count = 1
max_bytes = "64MiB"   # half of last year's

[[contract.comm]]
cause = "unasked"
min_count = 1
max_count = 3
output_bytes = 1_000
"""


def test_a_contract_written_by_hand_is_read() -> None:
    attention = {
        "module": "layers.*.attn",
        "phases": (Phase.FORWARD, Phase.RECOMPUTE),
        "axes": ("tp",),
        "kinds": (CollectiveKind.ALL_REDUCE,),
    }
    unasked = {"causes": (CauseKind.UNASKED,)}
    assert parse_contract(BY_HAND).contract == Contract((
        Limit(figure=Figure.GAPS, most=0),
        Limit(figure=Figure.PEAK_MEMORY, most=60 * 1024**3),
        Limit(figure=Figure.COUNT, most=2, **unasked),
        Limit(figure=Figure.FINDINGS, severity=Severity.ERROR, most=0),
        Limit(figure=Figure.FINDINGS, rule="implicit-gather", most=1),
        Limit(figure=Figure.COUNT, least=1, most=1, **attention),
        Limit(figure=Figure.BYTES, most=64 * 1024**2, **attention),
        Limit(figure=Figure.COUNT, least=1, most=3, **unasked),
        Limit(figure=Figure.OUTPUT_BYTES, least=1000, most=1000, **unasked),
    ))  # fmt: skip


def test_each_limit_knows_its_line() -> None:
    file = parse_contract(BY_HAND)
    assert [file.lines[limit] for limit in file.contract.limits] == [4, 3, 8, 9, 5, 12, 12, 20, 20]


@pytest.mark.parametrize(
    "text",
    [
        BY_HAND,
        "contract.gaps = 0\ncontract.findings = 3\n",
        "[contract]\ncomm = [{count = 1}, {module = '', max_bytes = 2}]\n",
        "contract = {gaps = 0}",
        "[[contract.comm]]\nmodule = 'a'\ncount = 1\n[[contract.comm]]\nmodule = 'a'\ncount = 2",
        "[[contract.comm]]\ncount = 1 # one\n[[contract.comm]]\nmax_bytes = 2 # the other\n",
        "[contract.findings.rules]\n'a b.c' = 1\n[contract]\ngaps=0\n",
    ],
)  # fmt: skip
def test_writing_a_contract_again_changes_nothing_where_nothing_changed(text: str) -> None:
    contract = parse_contract(text).contract
    assert render_contract(contract, before=text) == text
    assert parse_contract(render_contract(contract)).contract == contract


def test_comments_and_order_stay_when_numbers_change() -> None:
    limits = dict.fromkeys(parse_contract(BY_HAND).contract.limits)
    changed = [
        *(limit for limit in limits
          if limit.figure not in (Figure.BYTES, Figure.GAPS, Figure.COUNT)),
        Limit(figure=Figure.GAPS, most=3),
        Limit(figure=Figure.RECOMPILES, most=4),
        *(Limit(figure=Figure.BYTES, most=32 * 1024**2, **limit.selector._asdict())
          for limit in limits if limit.figure is Figure.BYTES),
        Limit(figure=Figure.COUNT, module="new", least=1, most=1),
    ]  # fmt: skip
    text = render_contract(Contract(tuple(changed)), before=BY_HAND)
    assert set(parse_contract(text).contract.limits) == set(changed)
    assert (
        text
        == """\
# Ask Ada before you change this.
[contract]
gaps = 3                     # none, ever
peak_memory = "60GiB"        # of 80
recompiles = 4

[contract.findings]
error = 0   # really
rules = { implicit-gather = 1 }

# attention talks once
[[contract.comm]]
module = "layers.*.attn"
phase = ["forward", "recompute"]
axis = "tp"
kind = "all_reduce"
max_bytes = "32MiB"   # half of last year's

[[contract.comm]]
cause = "unasked"
output_bytes = 1_000

[[contract.comm]]
module = "new"
count = 1
"""
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[contract]\ngraf_breaks = 0", "line 2: Unknown key 'graf_breaks' in [contract]. "
         "Did you mean 'graph_breaks'?"),
        ("\n\n[contrct]\ngaps = 0", "line 3: Unknown key 'contrct'. Did you mean 'contract'?"),
        ("[contract]\ngaps=0\n[[contract.comm]]\ncount=1\n[[contract.comm]]\n\nmax_byte=1",
         "line 7: Unknown key 'max_byte' in [contract.comm]. Did you mean 'max_bytes'?"),
        ("[[contract.comm]]\ncount=1\nkind='all-reduce'", "line 3: there is no kind 'all-reduce'. "
         "Did you mean 'all_reduce'?"),
        ("[[contract.comm]]\ncount=1\nphase=['forward', 'bakward']", "line 3: there is no phase "
         "'bakward'. Did you mean 'backward'?"),
        ("[[contract.comm]]\ncount=1\ncause='x'", "line 3: there is no cause 'x'. Use unasked,"),
        ("[[contract.comm]]\naxis='tp'", "line 1: it has no limit. Give it count"),
        ("[[contract.comm]]\ncount=1\nmax_count=2", "line 1: it has count beside max_count"),
        ("[[contract.comm]]\nmin_count=3\nmax_count=2", "A limit on count wants at least 3"),
        ("[[contract.comm]]\nmodule=3\ncount=1", "line 2: module is 3. Write it in quotes."),
        ("[[contract.comm]]\naxis=[]\ncount=1", "line 2: axis is empty."),
        ("[[contract.comm]]\ncount=-1", "line 2: count is -1. Give a whole number"),
        ("[[contract.comm]]\ncount='2'", "line 2: count is '2'. Give a whole number"),
        ("[[contract.comm]]\ncount=true", "line 2: count is True. Give a whole number"),
        ("[[contract.comm]]\nbytes='64 mebis'", "line 2: bytes is '64 mebis'. Give bytes as"),
        ("[contract]\npeak_memory=1.5", "line 2: peak_memory is 1.5. Give bytes as a number"),
        ("[contract.comm]\ncount=1", "line 1: comm is not an array of tables. Begin each with "
         "[[contract.comm]], in two brackets."),
        ("[contract.findings]\nfatal=0", "line 2: Unknown key 'fatal' in [contract.findings]. "
         "Use any, error, warning, info or rules."),
        ("[contract.findings]\nrules=0", "line 2: rules is 0. Make it a table"),
        ("[contract]\n", "line 1: the contract has no limits."),
        ("contract=3", "line 1: contract is 3. Make it a table"),
        ("", "has no [contract]"),
        ("[contract]\ngaps = ", "line 2: "),
        ("[contract]\ngaps=0\ngaps=1", "line 3: Cannot overwrite a value. Correct"),
        ("x=" + "[" * 5000, "Correct the TOML."),
    ],
)  # fmt: skip
def test_errors_name_the_line_and_suggest_the_right_key(text: str, fault: str) -> None:
    with pytest.raises(ContractError) as raised:
        parse_contract(text, name="my.toml")
    assert fault in str(raised.value)
    assert "my.toml" in str(raised.value)
    assert raised.value.exit_code == 2


def test_a_pipe_or_device_without_an_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardscope.record.files._MAX_WAIT_MS", 1)
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    with pytest.raises(ContractError, match="it is a named pipe that nothing writes to"):
        read_contract(pipe)
    with pytest.raises(ContractError, match="it has more than 16777216 bytes"):
        read_contract("/dev/zero")


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(ContractError, match=r"my\.toml: a number has too many digits"):
        parse_contract(f"[contract]\ngaps = {'9' * 9999}", name="my.toml")


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"no contract '.*none.toml'.*contract record"):
        read_contract(tmp_path / "none.toml")
    with pytest.raises(ContractError, match="cannot read"):
        read_contract(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ContractError, match="not text in UTF-8"):
        read_contract(tmp_path / "binary.toml")


def test_a_file_is_overwritten_only_when_asked_and_only_if_it_is_a_contract(tmp_path: Path) -> None:
    contract = Contract((Limit(figure=Figure.GAPS, most=1),))
    path = write_contract(contract, tmp_path / "shardscope.toml")
    with pytest.raises(OutputError, match="already exists"):
        write_contract(contract, path)
    path.write_text("[tool.other]\nx = 1\n")
    with pytest.raises(ContractError, match="Unknown key"):
        write_contract(contract, path, force=True)
    assert path.read_text() == "[tool.other]\nx = 1\n"


def test_line_ends_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "shardscope.toml"
    path.write_bytes(b"# mine\r\n[contract]\r\ngaps = 0  # none\r\n")
    write_contract(Contract((Limit(figure=Figure.GAPS, most=1),)), path, force=True)
    assert path.read_bytes() == b"# mine\r\n[contract]\r\ngaps = 1  # none\r\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 << 20), ("1.5 KiB", 1536), ("80GB", 80 * 10**9), ("80g", 80 << 30), ("512", 512),
     ("2t", 2 << 40), ("0", 0), ("", None), ("MiB", None), ("-1", None), ("1e3", None),
     ("9" * 30, None), ("0.1KB", 100)],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text: str, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "size", [0, 1, 1023, 1024, 1025, 64 << 20, (64 << 20) + 1, 2**62, 2**63 - 1]
)
def test_a_written_size_is_read_back_exactly(size: int) -> None:
    assert parse_size(str(write_size(size))) == size
    assert round_size_up(size, 0.05) >= size


def test_sizes_that_differ_look_different() -> None:
    sizes = (64 << 20, (64 << 20) + 1, (64 << 20) + 4)
    assert [describe_size(size) for size in sizes] == [
        "64 MiB",
        "67,108,865 bytes (64.0 MiB)",
        "67,108,868 bytes (64.0 MiB)",
    ]
