"""Records a step of a training loop that Hugging Face Accelerate has prepared, with one line."""

from __future__ import annotations

from typing import Any, Unpack

from torch import nn
from torch.optim import Optimizer

from shardscope.errors import PluginError
from shardscope.plugins.step_recorder import RecorderOptions
from shardscope.plugins.training_loop import LoopObserver
from shardscope.plugins.training_loop import observe as observe_loop

__all__ = ["observe"]


def observe(
    accelerator: Any, *prepared: Any, step: int = 10, **options: Unpack[RecorderOptions]
) -> LoopObserver:
    """Record a step of the loop that follows, with all of its accumulated batches.

    Steps that Accelerate skips while it accumulates gradients, or because they overflowed, do not
    count. The recording is logged to the accelerator's trackers.

    Args:
        accelerator: The `Accelerator`.
        *prepared: What `accelerator.prepare` returned, of which models and optimizers are used;
            by default all that it has prepared so far.
        step: The first step to record, counted from 1.
        **options: `num_steps=1` to record; `memory=True` to observe memory, and
            `values=True` to sample values;
            `output="shardscope.json.gz"`, and `force=True` to overwrite; `log=False` to keep it
            out of the accelerator's trackers.

    Examples:
        >>> from shardscope.plugins.accelerate import observe
        >>> model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        >>> observe(accelerator, step=10, output="step.json.gz")
    """
    objects = prepared or (
        *getattr(accelerator, "_models", ()),
        *getattr(accelerator, "_optimizers", ()),
    )
    models = [value for value in objects if isinstance(value, nn.Module)]
    # An `AcceleratedOptimizer` is an optimizer that contains the one that steps.
    optimizers = [
        getattr(value, "optimizer", value) for value in objects if isinstance(value, Optimizer)
    ]
    if not models or not optimizers:
        missing = "model" if not models else "optimizer"
        raise PluginError(
            f"observe() got no {missing} that this Accelerator has prepared. Call it after "
            "accelerator.prepare(model, optimizer), or with what that returned."
        )
    observer = observe_loop(models, optimizers, step=step, **options)
    observer.recorder.loggers = getattr(accelerator, "trackers", ())
    return observer
