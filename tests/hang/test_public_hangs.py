"""The hangs of `benchmarks/hangs`: their records are complete, and some really hang on gloo."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.hangs.case import CLASSES, REMEDIES, Case, list_cases, load_case
from benchmarks.hangs.scoring import has_ranks, has_remedy, is_located
from benchmarks.hangs_correct.programs import SCRIPTS

from warm_python import run_python

ROOT = Path(__file__).resolve().parents[2]
CASES = [load_case(name) for name in list_cases()]
NAMED_IN_THE_TASK = [
    "pytorch #126616",
    "pytorch #148334",
    "pytorch #158719",
    "pytorch #75373",
    "torchtitan #4777",
    "Megatron-LM c7be214c67",
    "Megatron-LM aa4ec99205",
    "DeepSpeed #5794",
    "composer #3843",
]


def test_there_are_cases_of_all_classes() -> None:
    assert len(CASES) >= 30
    assert {case.kind for case in CASES} == set(CLASSES)
    assert {case.source for case in CASES} >= set(NAMED_IN_THE_TASK)
    assert len({case.source for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_names_its_source_and_marks_its_line(case: Case) -> None:
    assert re.fullmatch(r"[\w/.\- ]+ (#\d+|[0-9a-f]{8,10})", case.source), case.source
    assert case.url.startswith("https://github.com/")
    assert len(case.summary) > 80
    assert case.marked_lines(), "no line ends with # HANG"
    text = case.file.read_text()
    for side in (case.differing, case.others):
        assert side.lines, "a side names no line"
        for line in side.lines:
            assert line in text, line
    assert case.remedies


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_condition_is_one_that_the_proof_makes_true(case: Case) -> None:
    proof = case.proof
    has_means = bool(proof.condition or proof.ranks or proof.files or proof.signal)
    assert has_means == bool(case.condition)
    assert (case.variation == "as is") == (not case.condition)
    text = case.file.read_text()
    variables = {
        *proof.environment,
        *proof.condition,
        *(v for r in proof.ranks.values() for v in r),
    }
    for name in variables - {"PYTHONHASHSEED"}:
        assert f'"{name}"' in text, name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_program_is_a_script_of_a_user(case: Case) -> None:
    text = case.file.read_text()
    tree = ast.parse(text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert not [name for name in modules if name.startswith(("shardscope", "benchmarks"))]
    assert 'environ.get("HANG")' in text
    assert "torch.cuda.is_available()" in text or 'accelerator="auto"' in text
    assert len(text.splitlines()) <= 120


def test_wrong_variants_hang_on_gloo_and_corrected_ones_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    names = ["barriers_while_saving", "send_before_receive"]
    result = run_python("-m", "benchmarks.hangs.case_proof", *names)
    assert result.returncode == 0, result.stdout + result.stderr
    for name in names:
        assert re.search(rf"{name} \(wrong\): hang", result.stdout)
        assert re.search(rf"{name} \(corrected\): ended", result.stdout)


def test_scripts_of_correct_programs_know_their_options() -> None:
    assert len(SCRIPTS) >= 60  # those of benchmarks/silent come in addition
    for name, program in SCRIPTS.items():
        text = program.script.read_text()
        following = (*program.arguments[1:], "--")
        for option, value in zip(program.arguments, following, strict=True):
            if option.startswith("--"):
                assert f'"{option}"' in text, name
                is_free = value.startswith(("--", "SIG")) or value.isdigit()
                assert is_free or f'"{value}"' in text, name


CASE = load_case("nan_loss_skipped")


def make_finding(**values: Any) -> dict[str, Any]:
    line = CASE.file.read_text().splitlines().index("    loss.backward()") + 1
    finding = {
        "rule": "rank-mismatch",
        "severity": "error",
        "subject": "group world[0-1]",
        "fact": "ranks disagree: rank 0 issued all_reduce (backward, nan_loss_skipped.py:"
        f"{line}); rank 1 issued barrier (nan_loss_skipped.py:{line + 7})",
        "remedy": "Let all ranks agree on skipping the step: all_reduce the flag.",
        "rank": 1,
        "source": None,
    }
    return finding | values


def test_a_right_finding_scores_on_line_ranks_and_remedy() -> None:
    finding = make_finding()
    assert is_located(CASE, finding)
    assert has_ranks(CASE, finding)
    assert has_remedy(CASE, finding)


def test_a_vague_finding_does_not_score() -> None:
    finding = make_finding(
        fact="the program may hang (nan_loss_skipped.py:1)",
        remedy="Make every rank of the group take the same branch and pass the same shapes.",
        rank=None,
    )
    assert not is_located(CASE, finding)
    assert not has_ranks(CASE, finding)
    assert not has_remedy(CASE, finding)


def test_a_remedy_that_names_everything_does_not_score() -> None:
    assert not has_remedy(CASE, make_finding(remedy=" ".join(REMEDIES.values())))
