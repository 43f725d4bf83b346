"""A parallel version made by `parallelize`: all ranks of the program partitioned by a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.export import ExportedProgram

from shardscope._torch.export import flatten, unflatten
from shardscope._torch.snapshot import preserved_random_state
from shardscope.parallel.equivalence import (
    AS_IT_IS,
    StepResult,
    Task,
    Variant,
    call_model,
    copy_model,
    default_loss,
    named_buffers,
    named_parameters,
    named_tensors,
)
from shardscope.parallel.parity.causes import explain
from shardscope.parallel.parity.pipeline import ParityResult
from shardscope.parallel.parity.probe import ProbeSpec
from shardscope.parallel.parity.problems import Problem
from shardscope.parallel.partition import partition_by_plan
from shardscope.parallel.passes.capture import export_with_loss
from shardscope.parallel.program import ParallelProgram
from shardscope.parallel.verify.verify import Trial, join_results, run_ranks, shard_values
from shardscope.record import TOLERABLE, Phase, TensorKind

T = TypeVar("T")


@final
@dataclass(frozen=True, eq=False)
class PartitionedVersion:
    """A model that `parallelize` partitions by a plan, for a mesh of these axes."""

    model: nn.Module
    axes: Mapping[str, int]
    plan: object  # in any form that `parallelize` takes
    task: Task
    user_model: nn.Module | ExportedProgram  # as the user passed it

    @cached_property
    def program(self) -> ParallelProgram:
        """The partitioned model with its loss; it returns the loss, then the model's outputs."""
        return self._partition(self.axes)

    def _partition(self, mesh: DeviceMesh | Mapping[str, int]) -> ParallelProgram:
        """Partition the model with its loss, or an exported program, which has only a forward."""
        if isinstance(self.user_model, ExportedProgram):
            return partition_by_plan(self.user_model, mesh, self.plan)
        args, kwargs = _arguments(self.task.inputs)
        is_training = self._has_loss()
        loss_fn: Callable[..., Any] = self._loss_and_output if is_training else _no_loss
        program = export_with_loss(self.user_model, loss_fn, args, kwargs, ())
        return partition_by_plan(program, mesh, self.plan, is_training=is_training)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Empty: the plan determines how inputs are sharded, and results are full tensors."""
        return ()

    @property
    def batch_dim(self) -> int:
        """Unused without batch axes."""
        return 0

    def run(
        self, variant: Variant = AS_IT_IS, probe_spec: ProbeSpec | None = None
    ) -> list[StepResult]:
        """The result of each rank; `probe_spec` is unused, as `find_problem` compares every op."""
        model_copy = copy_model(self.model)
        with variant.applied(model_copy, self.task) as applied:
            values = self._values(model_copy, applied.inputs, variant)
            with torch.no_grad():
                return run_ranks(self._trial, values, seed=self.task.seed)

    def run_as_rank(
        self, mesh: DeviceMesh, variant: Variant = AS_IT_IS, probe_spec: ProbeSpec | None = None
    ) -> StepResult:
        """Run a step as one rank of a real process group."""
        program, model_copy, rank = self._partition(mesh), copy_model(self.model), dist.get_rank()
        graph = program.joint().graph_module if program.is_training else program.forward()
        with variant.applied(model_copy, self.task) as applied, torch.no_grad():
            values = self._values(model_copy, applied.inputs, variant)
            local_values = shard_values(program.graph, program.mesh, values)[rank]
            torch.manual_seed(self.task.seed)
            results = graph(*local_values)
        results_by_rank: list[list[object]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(results_by_rank, list(results))
        trial = program.make_trial(self._output_names(), is_run=False)
        return trial.outcome(join_results(trial, dict(enumerate(results_by_rank)))[rank])

    def find_problem(self, parity_result: ParityResult) -> list[Problem]:
        """The problem with the first op that the ranks compute wrongly; empty if all agree."""
        wrong = [
            result
            for result in parity_result.comparisons
            if result.verdict.agreement not in TOLERABLE
        ]
        if not wrong:
            return []
        divergence = self.program.find_first_divergence(self._values(self.model, self.task.inputs))
        cause = explain(wrong[0], self.axes)
        name = wrong[0].case.name or "the output"
        kind = "The gradient of " if wrong[0].case.kind is TensorKind.GRADIENT else ""
        fact = f"{kind}{name} of the partitioned program differs. {cause.to_sentence()}".strip()
        remedy = "Leave this module out of the plan, and please report the bug."
        if divergence is None:
            remedy = "Please report the bug; until it is fixed, shard fewer modules."
            return [Problem(cause, name, fact, remedy, phase=Phase.BACKWARD)]
        location = f"The first op to differ is {divergence.op}."
        return [
            Problem(
                cause,
                divergence.module or "the model itself",
                f"{fact} {location}",
                remedy,
                module=divergence.module,
                op=divergence.op,
            )
        ]

    def _has_loss(self) -> bool:
        """Whether there are parameters to differentiate, and an output that a loss can be of."""
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            return False
        if self.task.loss is not None:
            return True
        with preserved_random_state():
            output = call_model(copy_model(self.model), self.task.copy_inputs())
        return any(tensor.requires_grad for _, tensor in named_tensors(output))

    def _loss_and_output(self, output: T) -> tuple[object, T]:
        if self.task.loss is None:
            return sum(default_loss(output)), output
        return self.task.loss(output), output

    @cached_property
    def _trial(self) -> Trial:
        return self.program.make_trial(self._output_names())

    def _output_names(self) -> list[str | None]:
        """The paths of the program's outputs in the model's output; None for the loss."""
        spec = self.program.source.module_call_graph[0].signature.out_spec
        placeholders = [torch.empty(0) for _ in range(spec.num_leaves)]
        output = unflatten(placeholders, spec)
        if not isinstance(self.user_model, ExportedProgram):
            output = output[1]
        names = {id(tensor): name for name, tensor in named_tensors(output)}
        return [names.get(id(tensor)) for tensor in placeholders]

    def _values(
        self, model: nn.Module, inputs: object, variant: Variant = AS_IT_IS
    ) -> list[object]:
        """The arguments of the program: constants, parameters and buffers, and inputs."""
        constants = self.program.source.constants.items()
        state = {name: variant.convert(value) for name, value in constants}
        state |= dict(named_buffers(model)) | dict(named_parameters(model))
        inputs_in_order = iter(flatten(_arguments(inputs))[0])
        return [
            next(inputs_in_order) if role.kind == "input" else state[role.name]
            for _, role in self.program.graph.inputs
        ]


def _no_loss(output: T) -> tuple[None, T]:
    return None, output


def _arguments(inputs: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """The inputs as arguments and keyword arguments, as `call_model` passes them."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})
