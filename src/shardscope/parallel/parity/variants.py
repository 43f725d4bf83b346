"""The ways in which a step is run, the same on a single device and on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import final

import torch
from torch import nn

from shardscope.numerics.widen import (
    jitter_,
    main_dtype,
    widen_inputs,
    widen_model,
    widened,
)
from shardscope.parallel.parity.steady import Steady
from shardscope.parallel.parity.task import Task
from shardscope.parallel.parity.weights import mark_weights

__all__ = ["AS_IT_IS", "EXACT", "MARKED", "Jitter", "Variant"]


class Jitter(Enum):
    """Which last place of the weights is changed: none, their own, or that of double precision."""

    NONE = "none"
    OWN = "own"
    DOUBLE = "double"


@final
@dataclass(frozen=True)
class Variant:
    """In double precision, with weights changed in their last place, with nothing drawn.

    `is_marked` is no run at all: weights are marks, and the model is only sharded.
    """

    is_exact: bool = False
    jitter: Jitter = Jitter.NONE
    is_steady: bool = False
    is_marked: bool = False

    @contextmanager
    def applied(self, model: nn.Module, task: Task) -> Iterator[Task]:
        """Change the model, before it is sharded, and what is computed until the context ends."""
        narrow, inputs = main_dtype(model), task.inputs
        if self.jitter is Jitter.OWN:
            inputs = jitter_(model, inputs)
        with ExitStack() as stack:
            if self.is_exact:
                widen_model(model)
                inputs = widen_inputs(inputs)
                stack.enter_context(widened(narrow))
            if self.is_marked:
                mark_weights(model)
            if self.jitter is Jitter.DOUBLE:
                inputs = jitter_(model, inputs)
            if self.is_steady:
                stack.enter_context(Steady())  # type: ignore[no-untyped-call]
            yield task.with_inputs(inputs)

    def adapt(self, model: nn.Module) -> None:
        """Change what sharding made of the model, where it did not begin with the changed one."""
        if self.is_exact and main_dtype(model) is not torch.float64:
            widen_model(model)


AS_IT_IS = Variant()
EXACT = Variant(is_exact=True)
MARKED = Variant(is_exact=True, is_marked=True)
