"""Our own transform of a model as a version to compare: all its ranks, in lockstep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from shardscope._torch.programs import flatten, unflatten
from shardscope.parallel.capture import export_with_loss
from shardscope.parallel.parity.execute import named_buffers, named_parameters
from shardscope.parallel.parity.outcome import Outcome, named_tensors
from shardscope.parallel.parity.single import copy_model
from shardscope.parallel.parity.task import Task, default_loss
from shardscope.parallel.parity.variants import AS_IT_IS, Variant
from shardscope.parallel.parity.widen import widen_tensor
from shardscope.parallel.program import ParallelProgram
from shardscope.parallel.verify import Trial, run_ranks

__all__ = ["Transformed"]


@final
@dataclass(frozen=True, eq=False)
class Transformed:
    """A model that `parallelize` cuts by a plan, for a mesh of these axes."""

    model: nn.Module
    axes: Mapping[str, int]
    plan: Any
    task: Task

    @cached_property
    def program(self) -> ParallelProgram:
        """The model with its loss, cut; it returns the loss, then what the model returns."""
        from shardscope.parallel.transform import cut_by_plan

        args, kwargs = _arguments(self.task.inputs)
        program = export_with_loss(self.model, self._judge, args, kwargs, ())
        return cut_by_plan(program, self.axes, self.plan, is_training=True)

    def run(self, variant: Variant = AS_IT_IS) -> list[Outcome]:
        """What each rank gave."""
        own = copy_model(self.model)
        with variant.applied(own, self.task) as applied:
            values = self._values(own, applied.inputs, is_exact=variant.is_exact)
            with torch.no_grad():
                return run_ranks(self._trial, values, seed=self.task.seed)

    def _judge(self, output: Any) -> Any:
        losses = default_loss(output) if self.task.loss is None else [self.task.loss(output)]
        total = torch.stack([one.reshape(()) for one in losses]).sum() if losses else None
        return total, output

    @cached_property
    def _trial(self) -> Trial:
        return self.program.make_trial(self._output_names())

    def _output_names(self) -> list[str | None]:
        """As those are named that a model returns, with the loss before them."""
        spec = self.program.source.module_call_graph[0].signature.out_spec  # type: ignore[union-attr]
        stand_ins = [torch.empty(0) for _ in range(spec.num_leaves)]
        _, output = unflatten(stand_ins, spec)
        names = {id(one): name for name, one in named_tensors(output)}
        return [names.get(id(one)) for one in stand_ins]

    def _values(self, own: nn.Module, inputs: Any, *, is_exact: bool) -> list[Any]:
        state = dict(self.program.source.constants)
        if is_exact:
            state = {n: widen_tensor(o) if isinstance(o, Tensor) else o for n, o in state.items()}
        state |= dict(named_buffers(own)) | dict(named_parameters(own))
        given = iter(flatten(_arguments(inputs))[0])
        return [
            next(given) if role.kind == "input" else state[role.name]
            for _, role in self.program.flow.inputs
        ]


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As `call_model` calls."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})
