"""A model that `parallelize` partitions by a plan, as a version to compare: all its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram

from shardscope._torch.programs import flatten, unflatten
from shardscope._torch.random_state import preserved_random_state
from shardscope.numerics.widen import widen_tensor
from shardscope.parallel.capture import export_with_loss
from shardscope.parallel.parity.causes import explain
from shardscope.parallel.parity.examine import Examined
from shardscope.parallel.parity.execute import named_buffers, named_parameters
from shardscope.parallel.parity.findings import Problem
from shardscope.parallel.parity.looks import Look
from shardscope.parallel.parity.outcome import Outcome, named_tensors
from shardscope.parallel.parity.single import copy_model
from shardscope.parallel.parity.task import Task, call_model, default_loss
from shardscope.parallel.parity.variants import AS_IT_IS, Variant
from shardscope.parallel.program import ParallelProgram
from shardscope.parallel.transform import cut_by_plan
from shardscope.parallel.verify import Trial, deal_values, join_results, run_ranks
from shardscope.record import TOLERABLE, Phase, TensorKind

__all__ = ["Transformed"]


@final
@dataclass(frozen=True, eq=False)
class Transformed:
    """A model that `parallelize` partitions by a plan, for a mesh of these axes."""

    model: nn.Module
    axes: Mapping[str, int]
    plan: Any
    task: Task
    given: nn.Module | ExportedProgram  # what the user has: the model, or its program

    @cached_property
    def program(self) -> ParallelProgram:
        """The model with its loss, cut; it returns the loss, then what the model returns."""
        return self._cut(self.axes)

    def _cut(self, mesh: Any) -> ParallelProgram:
        """A program that is exported already has no loss, and only runs forward."""
        if isinstance(self.given, ExportedProgram):
            return cut_by_plan(self.given, mesh, self.plan)
        args, kwargs = _arguments(self.task.inputs)
        is_training = self._has_loss()
        judge: Any = self._judge if is_training else _no_loss
        program = export_with_loss(self.given, judge, args, kwargs, ())
        return cut_by_plan(program, mesh, self.plan, is_training=is_training)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """None: the plan says how inputs are sharded, and results are full tensors."""
        return ()

    @property
    def batch_dim(self) -> int:
        """Of no use without batch axes."""
        return 0

    def run(self, variant: Variant = AS_IT_IS, look: Look | None = None) -> list[Outcome]:
        """What each rank gave. There are no modules to look at: `locate` knows every op."""
        own = copy_model(self.model)
        with variant.applied(own, self.task) as applied:
            values = self._values(own, applied.inputs, is_exact=variant.is_exact)
            with torch.no_grad():
                return run_ranks(self._trial, values, seed=self.task.seed)

    def live(
        self, mesh: DeviceMesh, variant: Variant = AS_IT_IS, look: Look | None = None
    ) -> Outcome:
        """Be one rank of a real group."""
        program, own, rank = self._cut(mesh), copy_model(self.model), dist.get_rank()
        graph = program.joint().graph_module if program.is_training else program.forward()
        with variant.applied(own, self.task) as applied, torch.no_grad():
            values = self._values(own, applied.inputs, is_exact=variant.is_exact)
            pieces = deal_values(program.flow, program.mesh, values)[rank]
            torch.manual_seed(self.task.seed)
            results = graph(*pieces)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, list(results))
        trial = program.make_trial(self._output_names(), is_run=False)
        return trial.outcome(join_results(trial, dict(enumerate(everyone)))[rank])

    def find_problem(self, examined: Examined) -> list[Problem]:
        """The first op of the program that the ranks compute wrongly, if any is wrong."""
        wrong = [one for one in examined.judged if one.verdict.agreement not in TOLERABLE]
        if not wrong:
            return []
        culprit = self.program.find_culprit(self._values(self.model, self.task.inputs))
        cause = explain(wrong[0], self.axes)
        name = wrong[0].case.name or "the output"
        kind = "The gradient of " if wrong[0].case.kind is TensorKind.GRADIENT else ""
        fact = f"{kind}{name} of the partitioned program differs. {cause.state()}".strip()
        remedy = "Leave this module out of the plan, and please report the bug."
        if culprit is None:
            remedy = "Please report the bug; until it is fixed, shard fewer modules."
            return [Problem(cause, name, fact, remedy, phase=Phase.BACKWARD)]
        place = f"The first op to differ is {culprit.op}."
        return [
            Problem(
                cause,
                culprit.module or "the model itself",
                f"{fact} {place}",
                remedy,
                module=culprit.module,
                op=culprit.op,
            )
        ]

    def _has_loss(self) -> bool:
        """Whether there is something to differentiate, and something that a loss can be of."""
        if not any(one.requires_grad for one in self.model.parameters()):
            return False
        if self.task.loss is not None:
            return True
        with preserved_random_state():
            output = call_model(copy_model(self.model), self.task.copy_inputs())
        return any(one.requires_grad for _, one in named_tensors(output))

    def _judge(self, output: Any) -> Any:
        losses = default_loss(output) if self.task.loss is None else [self.task.loss(output)]
        return sum(losses), output

    @cached_property
    def _trial(self) -> Trial:
        return self.program.make_trial(self._output_names())

    def _output_names(self) -> list[str | None]:
        """As those are named that a model returns, with the loss before them."""
        spec = self.program.source.module_call_graph[0].signature.out_spec
        stand_ins = [torch.empty(0) for _ in range(spec.num_leaves)]
        output = unflatten(stand_ins, spec)
        if not isinstance(self.given, ExportedProgram):
            output = output[1]
        names = {id(one): name for name, one in named_tensors(output)}
        return [names.get(id(one)) for one in stand_ins]

    def _values(self, own: nn.Module, inputs: Any, *, is_exact: bool = False) -> list[Any]:
        state = dict(self.program.source.constants)
        if is_exact:
            state = {n: widen_tensor(o) if isinstance(o, Tensor) else o for n, o in state.items()}
        state |= dict(named_buffers(own)) | dict(named_parameters(own))
        given = iter(flatten(_arguments(inputs))[0])
        return [
            next(given) if role.kind == "input" else state[role.name]
            for _, role in self.program.flow.inputs
        ]


def _no_loss(output: Any) -> tuple[None, Any]:
    return None, output


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As `call_model` calls."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})
