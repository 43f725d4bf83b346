"""What a fault does to the result of an op, in ops that every stage can run and trace."""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any, NoReturn

import torch

from shardscope.compile.backends.faults.plan import FaultPlan, InjectedFault

__all__ = ["FAILING", "fail_now", "first_to_spoil", "spoil", "steps"]

FAILING = ("runtime_error", "hang", "crash")
Step = tuple[Any, tuple[Any, ...]]


def steps(plan: FaultPlan, dtype: torch.dtype) -> list[Step]:
    """Ops to apply one after another, each to the result of the one before; of the same dtype."""
    aten = torch.ops.aten
    if plan.kind in FAILING:
        return [(_fail_op(), (plan.kind, str(plan.error())))]
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if plan.kind == "nan":
        # Whole numbers have no NaN: they stay right.
        return [(aten.mul.Scalar, (float("nan"),))] if is_inexact else []
    if dtype == torch.bool:
        return [(aten.logical_not.default, ())]
    by, times = plan.by, plan.times
    if not is_inexact:
        # A fraction would be cut off, and the result be right.
        by, times = round(by) or (1 if plan.by > 0 else -1 if plan.by < 0 else 0), round(times)
    scaled: list[Step] = [] if times == 1 else [(aten.mul.Scalar, (times,))]
    return [*scaled, *([] if by == 0 else [(aten.add.Scalar, (by,))])]


def spoil(tensor: torch.Tensor, plan: FaultPlan) -> torch.Tensor:
    """`tensor` with the fault in it."""
    for op, args in steps(plan, tensor.dtype):
        tensor = op(tensor, *args)
    return tensor


def first_to_spoil(values: list[Any]) -> int | None:
    """Which of several results a fault is in: the first in floating point, else the first tensor.

    Indices among them stay right: wrong ones would make other ops fail.
    """
    tensors = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
    inexact = [
        place
        for place in tensors
        if values[place].dtype.is_floating_point or values[place].dtype.is_complex
    ]
    return next(iter(inexact or tensors), None)


def fail_now(kind: str, message: str) -> NoReturn:
    """Raise, or never return, or end the process by an address that is not there."""
    if kind == "runtime_error":
        raise InjectedFault(message)
    if kind == "crash":
        ctypes.string_at(0)
    while True:
        time.sleep(0.1)  # short, so that Ctrl-C is heard on every platform


@cache
def _fail_op() -> Any:
    """`fail_now` as an op: tracing and shapes see a tensor like the one given, running fails."""
    fail = torch.library.custom_op("shardscope::fail", _fail, mutates_args=())
    fail.register_fake(lambda tensor, kind, message: torch.empty_like(tensor))
    fail.register_autograd(lambda ctx, gradient: (gradient, None, None))
    return torch.ops.shardscope.fail.default


def _fail(tensor: torch.Tensor, kind: str, message: str) -> torch.Tensor:
    fail_now(kind, message)
