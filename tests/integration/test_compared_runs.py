"""Real gloo ranks in several layouts: what agrees does, and each mistake is found where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import value_programs
from rank_processes import run_ranks
from shardscope import Recording, compare_runs, load, merge, save
from shardscope.cli import main
from shardscope.record import ValueKind, format_ranks

PROGRAM = Path(value_programs.__file__)
NAMES = {
    1: ("one", "one seed", "one accumulate", "one unclipped", "one_bf16 unclipped"),
    2: (
        "ddp",
        "ddp accumulate",
        "fsdp",
        "fsdp_bf16",
        "tp",
        "tp_bf16",
        "tp reduction",
        "fsdp lr",
        "fsdp buffer",
        "fsdp seed",
        "ddp unsynchronized",
        "ddp scaled",
    ),
    4: ("fsdp", "hsdp", "tp"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    """What the ranks of each run recorded, merged; by number of ranks and name: `2 ddp lr`."""
    recordings = {}
    for num_ranks, names in NAMES.items():
        folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        for code, printed in run_ranks(num_ranks, PROGRAM, str(folder), *names):
            assert code == 0, printed
        for name in names:
            files = sorted(folder.glob(f"{name.replace(' ', '-')}-?.json.gz"))
            recordings[f"{num_ranks} {name}"] = merge(map(load, files))
    return recordings


@pytest.mark.parametrize(
    ("name_a", "name_b"),
    [
        ("1 one", "2 ddp"),
        ("1 one", "2 fsdp"),
        ("1 one", "4 hsdp"),
        ("1 one unclipped", "2 tp"),
        ("2 tp", "4 tp"),
        ("2 fsdp", "4 fsdp"),
        ("2 ddp", "4 fsdp"),
        ("1 one accumulate", "2 ddp"),
        ("1 one", "2 ddp accumulate"),
        ("1 one", "2 fsdp_bf16"),
        ("1 one_bf16 unclipped", "2 tp_bf16"),
        ("1 one unclipped", "1 one_bf16 unclipped"),
    ],
)
def test_runs_agree_in_every_layout(runs: dict[str, Recording], name_a: str, name_b: str) -> None:
    for first, second in ((name_a, name_b), (name_b, name_a)):
        result = compare_runs(runs[first], runs[second])
        comparison = result.comparisons[0]
        assert result.findings == ()
        assert result.gaps == ()
        assert comparison.steps == (1, 2, 3, 4)
        assert comparison.num_compared > 250
        assert comparison.deviations == ()


def test_a_run_equals_itself_bit_for_bit(runs: dict[str, Recording]) -> None:
    comparison = compare_runs(runs["2 fsdp"], runs["2 fsdp"]).comparisons[0]
    assert comparison.num_equal == comparison.num_compared > 250


@pytest.mark.parametrize("reference", ["1 one", "2 fsdp", "4 hsdp"])
@pytest.mark.parametrize(
    ("name", "rule", "step", "kind", "module", "fact"),
    [
        ("2 fsdp seed", "run-inputs", 1, ValueKind.INPUT, "", "first tensor"),
        ("2 fsdp lr", "run-setting", 3, ValueKind.SETTING, "AdamW.lr", "0.001 in A, 0.002 in B"),
        (
            "2 fsdp buffer",
            "run-ranks-disagree",
            2,
            ValueKind.OUTPUT,
            "blocks.1.scale",
            "Rank 1 of run B has another copy of buffer `blocks.1.scale.factor`",
        ),
        (
            "2 ddp unsynchronized",
            "run-ranks-disagree",
            3,
            ValueKind.GRADIENT,
            "embed.weight",
            "The mean over the ranks of run B agrees",
        ),
        (
            "2 ddp scaled",
            "run-differs",
            2,
            ValueKind.GRADIENT,
            "embed.weight",
            "off by the same factor, 2",
        ),
    ],
)
def test_a_mistake_is_found_where_it_is(
    runs: dict[str, Recording],
    reference: str,
    name: str,
    rule: str,
    step: int,
    kind: ValueKind,
    module: str,
    fact: str,
) -> None:
    result = compare_runs(runs[reference], runs[name])
    (finding,) = result.findings
    first = result.comparisons[0].deviations[0]
    assert (finding.rule, first.step, first.kind, first.name) == (rule, step, kind, module)
    assert fact in finding.fact


@pytest.mark.parametrize("reference", ["1 one unclipped", "2 tp", "4 tp"])
def test_a_missing_reduction_is_found_in_its_module(
    runs: dict[str, Recording], reference: str
) -> None:
    result = compare_runs(runs[reference], runs["2 tp reduction"])
    (finding,) = result.findings
    assert (finding.rule, finding.subject) == ("run-differs", "blocks.1.down")
    assert "agrees only as the sum of the ranks' tensors" in finding.fact
    assert result.comparisons[0].deviations[0].step == 1


def test_ranks_that_disagree_are_named(runs: dict[str, Recording]) -> None:
    result = compare_runs(runs["1 one"], runs["2 ddp unsynchronized"])
    first = result.comparisons[0].deviations[0]
    assert first.disagreeing_run == "B"
    assert format_ranks(first.ranks) in ("0", "1")


def test_command_reads_files_of_ranks_and_exits_with_what_it_found(
    runs: dict[str, Recording], tmp_path: Path
) -> None:
    one, wrong = tmp_path / "one.json.gz", tmp_path / "wrong.parquet"
    save(runs["1 one"], one)
    save(runs["2 fsdp lr"], wrong)
    runner = CliRunner()
    agreeing = runner.invoke(main, ["compare", str(one), str(one)])
    assert agreeing.exit_code == 0, agreeing.output
    assert "are equal bit for bit on each rank in 4 steps" in " ".join(agreeing.output.split())
    output = tmp_path / "compared.json"
    deviating = runner.invoke(main, ["compare", str(one), str(wrong), "-o", str(output)])
    assert deviating.exit_code == 1, deviating.output
    assert "first in step 3: AdamW.lr" in " ".join(deviating.output.split())
    assert load(output).findings[0].rule == "run-setting"
    shown = runner.invoke(main, ["show", str(output), "--view", "correctness"])
    assert "AdamW.lr" in shown.output
    structured = runner.invoke(main, ["compare", str(one), str(wrong), "--json"])
    assert '"name":"AdamW.lr"' in structured.output
