"""Recordings in the experiment trackers themselves, offline: what was logged is read back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import sample_recordings as samples
from shardscope import load, simulate
from shardscope.errors import PluginError
from shardscope.plugins import mlflow as our_mlflow
from shardscope.plugins import tensorboard as our_tensorboard
from shardscope.plugins import wandb as our_wandb
from shardscope.plugins.lightning import ShardscopeCallback as LightningCallback
from shardscope.plugins.step_recorder import StepRecorder
from shardscope.plugins.trackers import find_trackers, log_everywhere
from shardscope.plugins.transformers import ShardscopeCallback as TransformersCallback
from shardscope.report.export.metrics import list_scalars, list_tables
from trained_models import leaving_torch_alone, make_net, shard_net
from wandb_files import find_offline_run, read_history, read_records


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR", "ARTIFACT_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    streams = (sys.stdout, sys.stderr)
    import wandb

    yield wandb
    wandb.teardown()
    for stream in streams:  # whose `write` the package replaces when it is imported
        vars(stream).pop("write", None)


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if find_spec("mlflow") is None:
        pytest.skip("mlflow is not installed")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small package has no database
    import mlflow

    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield mlflow
    mlflow.end_run()


def test_modules_of_ours_do_not_shadow_the_packages(wandb: Any, mlflow: Any) -> None:
    assert wandb is not our_wandb
    assert mlflow is not our_mlflow
    assert {"init", "Artifact"} <= set(dir(wandb))
    assert {"start_run", "MlflowClient"} <= set(dir(mlflow))


def test_a_wandb_run_gets_metrics_tables_the_page_and_an_artifact(
    wandb: Any, tmp_path: Path
) -> None:
    recording = samples.make_llama()
    with wandb.init(project="tests") as run:
        run.log({"loss": 2.0})
        assert [tracker.package for tracker in find_trackers([])] == ["wandb"]
        our_wandb.log(recording, step=7)
        assert run.step == 1  # the run's own next row, not one of ours
        run.log({"loss": 1.0})
    wandb.teardown()  # until then its service may not have written everything
    path = find_offline_run(tmp_path)
    records = list(read_records(path))
    first, row = read_history(records)
    assert (first["loss"], row["loss"], row["_step"], row["shardscope/step"]) == (2, 1, 1, 7)
    scalars = list_scalars(recording)
    assert {name: row[f"shardscope/{name}"] for name in scalars} == scalars
    page = path.parent / "files" / row["shardscope/page/path"]
    assert page.read_text(encoding="utf-8") == recording.html()
    table = json.loads((path.parent / "files" / row["shardscope/causes/path"]).read_text())
    assert table["columns"][0] == "cause"
    assert len(table["data"]) == row["shardscope/causes/nrows"] > 3
    artifacts = [record.artifact for record in records if record.HasField("artifact")]
    (ours,) = (artifact for artifact in artifacts if artifact.type == "shardscope")
    names = [content.path for content in ours.manifest.contents]
    assert names == ["recording.json.gz", "report.html"]


def test_an_mlflow_run_gets_metrics_tags_and_artifacts(mlflow: Any, tmp_path: Path) -> None:
    recording = samples.make_llama()
    with mlflow.start_run() as run:
        assert [tracker.package for tracker in find_trackers([])] == ["mlflow"]
        our_mlflow.log(recording, step=7)
    client = mlflow.MlflowClient()
    data = client.get_run(run.info.run_id).data
    assert data.metrics == {
        f"shardscope/{name}": value for name, value in list_scalars(recording).items()
    }
    (point,) = client.get_metric_history(run.info.run_id, "shardscope/comm/wire_bytes")
    assert point.step == 7
    assert data.tags["shardscope.mesh"] == "dp=128 × tp=8"
    assert data.tags["shardscope.ranks"] == "1 of 1024"
    files = {file.path for file in client.list_artifacts(run.info.run_id, "shardscope")}
    assert files == {
        f"shardscope/{name}" for name in ("causes.csv", "recording.json.gz", "report.html")
    }
    folder = Path(client.download_artifacts(run.info.run_id, "shardscope", str(tmp_path)))
    assert load(folder / "recording.json.gz") == recording
    assert (folder / "causes.csv").read_text().startswith("cause,kind,axis,phase,line,count")
    with pytest.raises(PluginError, match=r"none is active.*Call mlflow\.start_run\(\)"):
        our_mlflow.log(recording)


def test_mlflow_takes_the_names_of_any_recording(mlflow: Any) -> None:
    recording = samples.make_recording(
        collectives=(samples.make_collective(axis="dp→tp 'x'", group="dp"),)
    )
    with mlflow.start_run() as run:
        our_mlflow.log(recording)
    metrics = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    assert "shardscope/comm_by_axis/dp_tp _x_/count" in metrics


def test_a_summary_writer_gets_scalars_and_a_text(tmp_path: Path) -> None:
    recording = samples.make_llama()
    with SummaryWriter(str(tmp_path)) as writer:
        our_tensorboard.log(recording, writer, step=7)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {
        f"shardscope/{name}" for name in list_scalars(recording)
    }
    (event,) = events.Scalars("shardscope/comm/count")
    assert (event.step, event.value) == (7, 356)
    assert events.Tags()["tensors"] == ["shardscope/summary/text_summary"]


class BrokenWriter:
    """A `SummaryWriter` of a full disk."""

    def add_scalar(self, *args: Any) -> None:
        raise OSError("disk full")


def test_a_tracker_that_fails_is_one_warning_and_others_still_log(tmp_path: Path) -> None:
    with leaving_torch_alone():
        from transformers.integrations import TensorBoardCallback
    with SummaryWriter(str(tmp_path)) as writer:
        loggers = [TensorBoardCallback(BrokenWriter()), TensorBoardCallback(writer), object()]
        with pytest.warns(UserWarning, match="not in the experiment tracker.*disk full") as caught:
            log_everywhere(loggers, samples.make_llama(), 3)
    assert len(caught) == 1
    assert "shardscope/comm/count" in EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]


@pytest.mark.parametrize(("module", "package"), [(our_wandb, "wandb"), (our_mlflow, "mlflow")])
def test_a_missing_package_is_a_sentence_with_the_remedy(
    module: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PluginError, match=f"needs the package {package}.*pip install {package}"):
        module.log(samples.make_recording())


def test_tables_have_the_costliest_rows_and_safe_texts() -> None:
    tables = list_tables(samples.make_varied())
    rows = tables["causes"].rows
    assert [row[-1] for row in rows] == sorted((row[-1] for row in rows), reverse=True)
    assert all(len(table.rows) <= 50 for table in tables.values())
    texts = [cell for table in tables.values() for row in table.rows for cell in row]
    assert all(text.isprintable() for text in texts if isinstance(text, str))
    assert list_tables(samples.make_recording()) == {}


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataload")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")
def test_lightnings_loggers_get_the_step(wandb: Any, mlflow: Any, tmp_path: Path) -> None:
    lab = import_module("lightning_models")
    loggers = lab.pl.loggers
    tracking_uri = (tmp_path / "mlruns").as_uri()
    run_logger = loggers.MLFlowLogger(tracking_uri=tracking_uri)
    with simulate(mesh={"dp": 2, "tp": 2}) as world:
        lab.fit(
            lab.Learner(shard_net(make_net(), world)),
            LightningCallback(3, output=tmp_path / "run.json"),
            log_every_n_steps=1,
            logger=[
                loggers.TensorBoardLogger(str(tmp_path / "events"), version=0),
                run_logger,
                loggers.WandbLogger(save_dir=str(tmp_path), offline=True),
            ],
        )
    wandb.finish()
    wandb.teardown()
    count = len(load(tmp_path / "run-0.json").collectives)
    events = EventAccumulator(str(tmp_path / "events" / "lightning_logs" / "version_0")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("shardscope/comm/count")] == [(3, count)]
    data = mlflow.MlflowClient(tracking_uri).get_run(run_logger.run_id).data
    assert data.metrics["shardscope/comm/count"] == count
    rows = read_history(list(read_records(find_offline_run(tmp_path))))
    assert [row["shardscope/comm/count"] for row in rows if "shardscope/step" in row] == [count]


def test_loggers_of_hugging_faces_trainer_get_the_step(mlflow: Any, tmp_path: Path) -> None:
    lab = import_module("transformers_models")
    arguments = lab.TrainingArguments(
        str(tmp_path / "trainer"),
        max_steps=2,
        report_to=["tensorboard", "mlflow"],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = TransformersCallback(2, output=tmp_path / "run.json")
    lab.Trainer(
        lab.make_regression(), arguments, train_dataset=lab.make_vectors(), callbacks=[callback]
    ).train()
    (path,) = (tmp_path / "trainer").rglob("*tfevents*")
    events = EventAccumulator(str(path.parent)).Reload()
    assert events.Scalars("shardscope/run/world_size")[0].step == 2
    (run,) = mlflow.search_runs(output_format="list")
    assert run.data.metrics["shardscope/run/world_size"] == 1


def test_a_recording_can_be_kept_out_of_the_trackers(mlflow: Any, tmp_path: Path) -> None:
    recorder = StepRecorder(1, tmp_path / "run.json", log=False)
    with mlflow.start_run() as run:
        recorder.resume(make_net())
        recorder.finish()
    assert load(tmp_path / "run.json").run.instruments == ("trace",)
    assert mlflow.MlflowClient().get_run(run.info.run_id).data.metrics == {}
