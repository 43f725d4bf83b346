"""Lightning with DDP on two real processes: each rank records the step in a file of its own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import lightning_rank
from rank_processes import run_ranks
from shardscope import load
from shardscope.record import BucketReduce, merge


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_each_rank_records_the_buckets_of_the_step(tmp_path: Path) -> None:
    for code, printed in run_ranks(2, Path(lightning_rank.__file__), str(tmp_path)):
        assert code == 0, printed
    recordings = [load(tmp_path / f"run-{rank}.json.gz") for rank in (0, 1)]
    for rank, recording in enumerate(recordings):
        (call,) = recording.collectives
        assert (call.rank, call.kind, call.phase) == (rank, "all_reduce", "backward")
        assert isinstance(call.cause, BucketReduce)
        assert set(call.cause.parameters) == {"net.weight", "net.bias"}
        assert call.input_bytes == 4 * (8 * 8 + 8)
        assert recording.gaps == ()
    assert merge(recordings).findings == ()
    assert load(tmp_path / "run.json.gz") == merge(recordings)  # by rank 0, when training ended
