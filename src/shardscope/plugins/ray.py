"""Records a step of a Ray Train run: one line in the training function, one on the driver.

The recordings go to the run's storage, where checkpoints are too, so that workers on several
machines need no shared folder. `ray` is imported when a function is called.
"""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from torch import nn
from torch.optim import Optimizer

from shardscope.errors import PluginError
from shardscope.plugins.step_recorder import RecorderOptions
from shardscope.plugins.training_loop import LoopObserver
from shardscope.plugins.training_loop import observe as observe_loop
from shardscope.record import Recording
from shardscope.record.arrow import import_package
from shardscope.record.merge import merge_files

__all__ = ["collect", "observe"]

_log = logging.getLogger("shardscope")
_FOLDER = "shardscope"


def observe(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    step: int = 10,
    **options: Unpack[RecorderOptions],
) -> LoopObserver:
    """Record a step of the loop that follows in a Ray Train worker.

    Each worker's recording is written to the folder `shardscope` of the run's storage, or in local
    mode to the current folder. Nothing is reported to Ray, so that its reports and checkpoints are
    those of the training function.

    Args:
        model: What `ray.train.torch.prepare_model` returned.
        optimizer: The optimizer.
        step: The first step to record, counted from 1.
        **options: `num_steps=1` to record; `memory=True` to observe memory, and
            `values=True` to sample values;
            `output="shardscope.json.gz"`, the name of the files; `force=True` to overwrite;
            `log=False` to keep it out of W&B and MLflow runs.

    Examples:
        >>> def train_loop_per_worker():
        ...     model = ray.train.torch.prepare_model(build())
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     shardscope.plugins.ray.observe(model, optimizer, step=10)
        ...     ...
    """
    storage = _find_storage()
    if storage is None:
        return observe_loop(model, optimizer, step=step, **options)
    folder = TemporaryDirectory(prefix="shardscope-")
    options["output"] = Path(folder.name) / Path(options.get("output", "shardscope.json.gz")).name
    observer = observe_loop(model, optimizer, step=step, **options)

    def upload(path: Path) -> None:
        with folder:
            _upload(storage, path)

    observer.recorder.on_saved = upload
    return observer


def _find_storage() -> Any:
    """The storage of the run, or None in Ray's local mode, which has none."""
    train = import_package("ray.train", "shardscope.plugins.ray.observe()", package="ray")
    try:
        return train.get_context().get_storage()
    except NotImplementedError:
        return None
    except RuntimeError as error:
        raise PluginError(
            "shardscope.plugins.ray.observe() was not called in a worker of Ray Train. Call it in "
            "the function that the trainer gets as train_loop_per_worker."
        ) from error


def _upload(storage: Any, path: Path) -> None:
    """Copy a file into the folder of the run's storage, which may be a bucket."""
    filesystem = storage.storage_filesystem
    target = f"{str(storage.experiment_fs_path).rstrip('/')}/{_FOLDER}"
    filesystem.create_dir(target, recursive=True)
    with filesystem.open_output_stream(f"{target}/{path.name}", compression=None) as stream:
        stream.write(path.read_bytes())
    _log.info("the recording is in '%s/%s'", target, path.name)


def collect(result: Any) -> Recording:
    """Read and join the recordings of all workers of a run, on the driver.

    Args:
        result: What `trainer.fit()` returned, or a `ray.train.Result` that was read from a path.

    Examples:
        >>> recording = shardscope.plugins.ray.collect(trainer.fit())
        >>> show(recording)
    """
    fs = import_package("pyarrow.fs", "shardscope.plugins.ray.collect()")
    source = f"{str(result.path).rstrip('/')}/{_FOLDER}"
    filesystem = result.filesystem
    selector = fs.FileSelector(source, allow_not_found=True)
    infos = [info for info in filesystem.get_file_info(selector) if info.is_file]
    if not infos:
        raise PluginError(
            f"the storage of this run has no recording in '{source}': no worker has reached the "
            "step. Record an earlier step, or train longer."
        )
    with TemporaryDirectory(prefix="shardscope-") as folder:
        paths = [Path(folder) / info.base_name for info in infos]
        for info, path in zip(infos, paths, strict=True):
            with filesystem.open_input_stream(info.path, compression=None) as stream:
                path.write_bytes(stream.read())
        return merge_files(paths)
