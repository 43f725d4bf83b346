"""Ray Train in this process, with Ray's local mode; `benchmarks/ray_hook.py` runs real workers."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import sample_recordings as samples
from shardscope import load, save
from shardscope.errors import PluginError
from shardscope.plugins.ray import collect, observe
from trained_models import is_watched, make_batches, make_net

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")


def train_loop() -> None:
    import ray.train.torch

    model = ray.train.torch.prepare_model(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observe(model, optimizer, step=2)
    for batch in make_batches(4):
        model(batch).sum().backward()
        optimizer.step()
    ray.train.report({"steps": 4})


def test_a_loop_in_local_mode_records_its_step_and_reports_what_it_did_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray.train.torch
        from pyarrow.fs import LocalFileSystem

        with pytest.raises(PluginError, match="not called in a worker of Ray Train"):
            observe(make_net(), torch.optim.SGD(make_net().parameters(), lr=0.1))
        scaling = ray.train.ScalingConfig(num_workers=0)
        result = ray.train.torch.TorchTrainer(train_loop, scaling_config=scaling).fit()
    assert result.metrics == {"steps": 4}
    assert load("shardscope.json.gz").run.num_forwards == 1
    assert not is_watched()

    result.path, result._storage_filesystem = os.fspath(tmp_path), LocalFileSystem()
    with pytest.raises(
        PluginError, match=r"no recording in '.*/shardscope': no worker has reached"
    ):
        collect(result)
    (tmp_path / "shardscope").mkdir()
    both = samples.make_ranks(2, [{}])
    for rank in (0, 1):
        calls = tuple(call for call in both.collectives if call.rank == rank)
        recording = samples.make_recording(calls, world_size=2)
        save(recording, tmp_path / "shardscope" / f"shardscope-{rank}.json.gz")
    assert {call.rank for call in collect(result).collectives} == {0, 1}
