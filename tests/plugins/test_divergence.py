"""`assert_no_divergence`: passes for ranks that issue the same, and says where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from checked_programs import make_checked, write_program
from shardscope.checks import CheckResult
from shardscope.errors import LaunchError
from shardscope.record import Severity
from shardscope.testing import DivergenceError, assert_no_divergence


def test_a_check_without_findings_passes() -> None:
    assert_no_divergence(make_checked())
    assert_no_divergence(CheckResult(make_checked()))


@pytest.mark.parametrize("severity", [Severity.ERROR, Severity.WARNING])
def test_a_finding_fails_with_condition_line_and_remedy(severity: Severity) -> None:
    recording = make_checked(severity)
    with pytest.raises(DivergenceError) as raised:
        assert_no_divergence(recording)
    assert raised.value.findings == recording.findings
    assert raised.value.recording is recording
    text = str(raised.value)
    assert text.startswith("assert_no_divergence(): ranks diverge (1 finding)\n")
    assert recording.findings[0].rule in text
    assert "train.py:12" in text
    assert "all_reduce the flag" in text
    assert repr(raised.value) == (
        "DivergenceError('assert_no_divergence(): ranks diverge (1 finding)')"
    )


def test_findings_of_other_rules_are_no_divergence() -> None:
    (finding,) = make_checked(Severity.WARNING).findings
    assert_no_divergence(
        replace(make_checked(), findings=(replace(finding, rule="implicit-gather"),))
    )


def test_a_program_is_run_and_its_ranks_are_compared(tmp_path: Path) -> None:
    right = write_program(tmp_path / "right.py")
    assert_no_divergence(right, num_per_node=2, steps=2, data=True, variations=False)
    wrong = write_program(tmp_path / "wrong.py", condition="dist.get_rank() == 0")
    with pytest.raises(DivergenceError, match=r"wrong\.py: ranks diverge") as raised:
        assert_no_divergence(wrong, num_per_node=2, steps=2, data=True)
    (finding,) = raised.value.findings
    assert (finding.rule, finding.severity) == ("divergence", Severity.ERROR)


def test_a_target_is_checked_on_a_mesh(tmp_path: Path) -> None:
    target = tmp_path / "target.py"
    target.write_text(
        "import torch\n\n\ndef model():\n    return torch.nn.Linear(4, 4)\n\n\n"
        "def batch(model):\n    return torch.randn(2, 4)\n\n\n"
        "def parallelize(model, mesh):\n    return torch.distributed.fsdp.fully_shard(\n"
        "        model, mesh=mesh\n    )\n"
    )
    assert_no_divergence(target, mesh={"dp": 2}, steps=2, data=False, variations=False)


def test_a_target_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"nothing\.py"):
        assert_no_divergence(tmp_path / "nothing.py", mesh={"dp": 2})


def test_a_result_shows_its_recording() -> None:
    result = CheckResult(make_checked(Severity.WARNING))
    assert result.findings == result.recording.findings
    assert repr(result) == f"CheckResult({result.recording!r})"
    assert result._repr_html_() == result.recording._repr_html_()
