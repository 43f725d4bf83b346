"""Eager runs of a subgraph, each computed once: unchanged, in fp64, and with perturbed rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from shardscope.compile.diagnose.accuracy.check_result import make_eager_failure
from shardscope.compile.diagnose.subgraph import (
    PhaseCallback,
    RunValues,
    Subgraph,
    copy_inputs,
    ignore_phase,
    name_inputs,
    run,
)
from shardscope.numerics import RandomRounding, RngUseMode, fp64_mode, is_changed, to_fp64

Call = Callable[[Sequence[Any]], Any]


@final
class SubgraphRuns:
    """The eager runs of a subgraph; `run` calls its compiled form on the same inputs."""

    def __init__(
        self,
        subgraph: Subgraph,
        *,
        seed: int = 0,
        with_backward: bool = True,
        max_perturbed: int | None = None,
    ) -> None:
        self.subgraph = subgraph
        self._seed = seed
        self._with_backward = with_backward  # gradients too
        self._max_perturbed = max_perturbed  # runs with perturbed rounding; None: no limit
        self._perturbed: list[RunValues] = []
        self._again: list[RunValues] = []
        self._is_roundable = True
        self._changed: set[str] | None = None  # inputs that eager execution changes

    @cached_property
    def eager(self) -> RunValues:
        """The result of eager execution."""
        try:
            return self.run(self._run_graph)
        except Exception:  # noqa: BLE001 - not every result is differentiable
            self._with_backward = False
        try:
            return self.run(self._run_graph)
        except Exception as error:
            raise make_eager_failure(error) from error

    @cached_property
    def exact(self) -> RunValues | None:
        """The result in double precision; None where an op does not support it."""
        _ = self.eager  # determines which inputs are changed in place
        try:
            return self.run(self._run_graph, fp64_mode(self._dtype), change=to_fp64)
        except Exception:  # noqa: BLE001 - then it is compared with eager execution only
            return None

    @cached_property
    def uses_rng(self) -> bool:
        """Whether the subgraph draws random numbers."""
        watching = RngUseMode()
        self.run(self._run_graph, watching)
        return watching.has_drawn

    def run_perturbed(self, count: int) -> Sequence[RunValues]:
        """Up to `count` results with perturbed rounding; fewer if such a run fails."""
        count = count if self._max_perturbed is None else min(count, self._max_perturbed)
        while len(self._perturbed) < count and self._is_roundable:
            rounding = RandomRounding(self._seed + len(self._perturbed) + 1)
            try:
                self._perturbed.append(self.run(self._run_graph, rounding))
            except Exception:  # noqa: BLE001 - perturbed numbers may make the program fail
                self._is_roundable = False
        return self._perturbed[:count]

    def run_again(self, count: int) -> Sequence[RunValues]:
        """`count` further results of eager execution."""
        while len(self._again) < count:
            self._again.append(self.run(self._run_graph))
        return self._again[:count]

    def run(
        self,
        call: Call,
        context: AbstractContextManager[Any] | None = None,
        *,
        change: Callable[[Tensor], Tensor] | None = None,
        report_phase: PhaseCallback = ignore_phase,
    ) -> RunValues:
        """Run `call` on copies of the subgraph's inputs."""
        originals = self.subgraph.inputs
        inputs = copy_inputs(originals) if change is None else copy_inputs(originals, change)
        with context or nullcontext():
            result = run(
                call,
                inputs,
                seed=self._seed,
                with_gradients=self.subgraph.with_gradients,
                with_backward=self._with_backward,
                report_phase=report_phase,
            )
        return RunValues({**result.values, **self._find_changed(inputs)}, result.gradients)

    def _find_changed(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """Inputs that a run changed in place, and those that eager execution changes."""
        before, after = name_inputs(self.subgraph.inputs), name_inputs(inputs)
        is_first = self._changed is None
        changed = {name for name, tensor in after.items() if is_changed(tensor, before[name])}
        if is_first:
            self._changed = changed
        watched = changed | (self._changed or set())
        return {
            _name_changed_input(name): after[name].detach() for name in after if name in watched
        }

    def unchanged(self, result: RunValues) -> dict[str, Tensor]:
        """The original values of inputs that only `result`, and not eager execution, changed."""
        before = name_inputs(self.subgraph.inputs)
        return {
            _name_changed_input(name): tensor.detach()
            for name, tensor in before.items()
            if _name_changed_input(name) in result.values and name not in (self._changed or set())
        }

    @property
    def _dtype(self) -> torch.dtype:
        floats = [
            value.dtype
            for value in self.subgraph.inputs
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        return max(set(floats), key=floats.count, default=torch.get_default_dtype())

    def _run_graph(self, inputs: Sequence[Any]) -> Any:
        return self.subgraph.graph(*inputs)


def _name_changed_input(name: str) -> str:
    return f"{name}, changed in place"
