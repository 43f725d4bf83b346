"""Programs for `check`, and recordings that look like its results, built by hand."""

from __future__ import annotations

from pathlib import Path

from sample_recordings import make_run
from shardscope.record import (
    Check,
    CheckOutcome,
    Finding,
    RankSpan,
    Recording,
    Role,
    Severity,
    Source,
    Variation,
)

LINE = Source(file="train.py", line=12, function="step", text="if not torch.isfinite(loss):")
_RULES = {Severity.ERROR: "divergence", Severity.WARNING: "possible-divergence"}
_DETAILS = {CheckOutcome.RAISED: "ValueError: no loss", CheckOutcome.NOT_TRIED: "not reached"}
_PROGRAM = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(2, 4)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if {condition}:
        dist.all_reduce(loss.detach())
dist.destroy_process_group()
"""


def write_program(path: Path, *, condition: str = "True") -> Path:
    """A training program in which ranks reduce their losses on a condition."""
    path.write_text(_PROGRAM.format(condition=condition))
    return path


def make_checked(severity: Severity | None = None, *, num_left: int = 1) -> Recording:
    """A check of two ranks with a variation of each outcome, and a finding of this severity.

    Args:
        severity: Of the finding; without it no rank diverges.
        num_left: The number of variations that were not tried.
    """
    outcomes = [CheckOutcome.SAME, CheckOutcome.RAISED, *[CheckOutcome.NOT_TRIED] * num_left]
    if severity is Severity.WARNING:
        outcomes.append(CheckOutcome.DIVERGED)
    variations = tuple(
        Variation(
            condition=f"item() at train.py:{number} is False on rank 1",
            ranks=(RankSpan(1),),
            outcome=outcome,
            source=LINE,
            detail=_DETAILS.get(outcome, ""),
        )
        for number, outcome in enumerate(outcomes, start=12)
    )
    check = Check(
        world_size=2,
        roles=(Role(rank=0, ranks=(RankSpan(0),)), Role(rank=1, ranks=(RankSpan(1),))),
        num_steps=6,
        is_complete=True,
        has_data=True,
        is_varied=severity is not Severity.ERROR,
        variations=() if severity is Severity.ERROR else variations,
    )
    finding = Finding(
        rule=_RULES[severity or Severity.ERROR],
        severity=severity or Severity.ERROR,
        subject="rank 1",
        fact="rank 1 skips an all_reduce that the other ranks issue",
        remedy="Let all ranks decide the same: all_reduce the flag before the branch.",
        rank=1,
        source=LINE,
    )
    run = make_run(world_size=2, ranks=(0, 1), instruments=("check",), is_simulated=False)
    return Recording(run=run, findings=(finding,) if severity else (), checks=(check,))
