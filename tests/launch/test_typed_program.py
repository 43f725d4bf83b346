"""A launched program that uses spmd_types and symmetric memory is recorded with both."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from shardscope import run
from shardscope.record import describe_cause

# The program would find the GPU of this machine.
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has answers of its own"),
    pytest.mark.usefixtures("forked_launches"),
]


def test_types_annotations_and_symmetric_memory_of_a_launched_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(str(Path(__file__).parent / "programs" / "typed.py"), steps=2)
    assert result.failures == ()
    recording = result.recording
    causes = Counter(
        (describe_cause(call.cause), call.phase.value, call.axis) for call in recording.collectives
    )
    assert causes == {
        ("spmd_types all_reduce P → I on tp", "forward", "tp"): 2,
        ("spmd_types all_reduce P → I on tp, backward of convert", "backward", "tp"): 2,
        ("call of torch.ops.symm_mem.multimem_all_reduce_", "outside", "tp"): 2,
    }
    (root,) = recording.modules
    placed = {record.name: (record.shape, record.placements) for record in root.parameters}
    assert placed == {"up": ((64, 64), ("Shard(1)",)), "down": ((64, 64), ("Shard(0)",))}
    gaps = {gap.place: gap.fact for gap in recording.gaps}
    assert "typed.py:" in gaps["symm_mem.put_signal"]
    assert recording.memory
