"""The single device: the original as it is, in double precision, and with other last places."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from shardscope.errors import ParityError
from shardscope.parallel.parity.cases import Runs
from shardscope.parallel.parity.execute import execute
from shardscope.parallel.parity.outcome import Outcome
from shardscope.parallel.parity.task import Task
from shardscope.parallel.parity.widen import (
    jitter_,
    main_dtype,
    widen_inputs,
    widen_model,
    widened,
)
from shardscope.shard.reference import kept_random_state

__all__ = ["as_model", "copy_model", "run_all", "run_single"]

Report = Callable[[str, str], None]


def run_single(
    model: nn.Module | ExportedProgram,
    inputs: Any,
    loss: Callable[[Any], Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
    has_jitter: bool = False,
    seed: int = 0,
) -> Outcome:
    """Run a copy of the original forwards and backwards; nothing of it is changed.

    A mapping of inputs is taken for keywords, a tuple or list for arguments. `dtype` may be
    torch.float64, for the exact result; `has_jitter` changes weights in their last place first.
    """
    task = Task(inputs, loss, seed=seed)
    return run_task(model, task, is_exact=dtype is torch.float64, has_jitter=has_jitter)


def run_task(
    model: nn.Module | ExportedProgram,
    task: Task,
    *,
    is_exact: bool = False,
    has_jitter: bool = False,
) -> Outcome:
    """The same for any task."""
    own = copy_model(as_model(model))
    narrow = main_dtype(own)
    with kept_random_state():
        if has_jitter:
            task = task.with_inputs(jitter_(own, task.inputs))
        if is_exact:
            widen_model(own)
            task = task.with_inputs(widen_inputs(task.inputs))
        with widened(narrow) if is_exact else nullcontext():
            return execute(own, task)


def run_all(
    model: nn.Module | ExportedProgram,
    task: Task,
    *,
    precision: torch.dtype | None = None,
    report: Report = lambda *_: None,
) -> Runs:
    """All runs of the single device; what cannot be had in double precision is reported."""
    reference = run_task(model, task)
    rounded = run_task(model, task, has_jitter=True)
    try:
        exact = run_task(model, task, is_exact=True)
        other = run_task(model, task, is_exact=True, has_jitter=True)
    except Exception as error:  # noqa: BLE001 - a kernel may know no double precision
        report(
            "double precision",
            f"the original does not run in it ({type(error).__name__}: {error!s:.160}), so the "
            "noise is what its result moves by when its weights change in their last place",
        )
        return Runs(reference, None, ((rounded, None),), precision)
    return Runs(reference, exact, ((rounded, other),), precision)


def as_model(model: nn.Module | ExportedProgram) -> nn.Module:
    """A module to call; it shares its tensors with the program."""
    return model.module() if isinstance(model, ExportedProgram) else model


def copy_model(model: nn.Module) -> nn.Module:
    """A copy without gradients, tied as the original is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # graphs of torch's own making deprecate themselves
            own = copy.deepcopy(model)
    except Exception as error:
        raise ParityError(
            f"the model cannot be copied ({type(error).__name__}: {error!s:.160}), and each rank "
            "needs a copy with the same weights. Remove what cannot be (open files, "
            "results of earlier calls kept in attributes)."
        ) from error
    own.zero_grad(set_to_none=True)
    return own
