"""Observes entire training steps of a program: of one of its ranks, or of a single process."""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.fsdp import fsdp_meshes
from shardscope._torch.training_hooks import unwatched
from shardscope.parallel.equivalence import (
    OriginalNames,
    StepResult,
    Table,
    TrainingRecorder,
    TrainingValues,
    describe_local,
    gather_result,
    keep_local,
)
from shardscope.parallel.parity.captured_steps import CapturedTraining
from shardscope.parallel.parity.versions import Gatherer
from shardscope.record import TensorKind

_GRADIENT: Table = (TensorKind.GRADIENT, "")


@final
class StepsObserver:
    """Records the steps of a model that a program trains; `end_step` says where each ends.

    What the optimizer gets and changes is gathered when it has stepped, as all ranks do that in the
    same order. `on_gradients` is called with the parameters when gradients exist, before they are
    clipped.
    """

    def __init__(
        self,
        model: nn.Module,
        on_gradients: Callable[[Mapping[str, torch.Tensor], int], None] = lambda *_: None,
        on_optimizer: Callable[[Optimizer, Mapping[int, str], int], None] = lambda *_: None,
    ) -> None:
        self._model = model
        self._names = OriginalNames(model)
        self._on_gradients, self._on_optimizer = on_gradients, on_optimizer
        self._recorder = TrainingRecorder(model, self._names, on_gradients=self._note_gradients)
        self._gather = Gatherer() if dist.is_initialized() else keep_local
        self._num_in_optimizer = 0
        self._gathered: StepResult | None = None
        self.training = CapturedTraining(
            data_parallel=list(_find_data_parallel(model)),
            has_batch_norm=any(map(_is_local_batch_norm, model.modules())),
        )
        self._inputs: list[list[torch.Tensor]] = []
        self._output_gradients: list[list[torch.Tensor | None]] = []

    @property
    def is_in_optimizer(self) -> bool:
        """Whether an optimizer is stepping."""
        return self._num_in_optimizer > 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe steps until the context ends."""
        with ExitStack() as stack:
            stack.enter_context(self._recorder.watching())
            for hook in (
                register_optimizer_step_pre_hook(self._begin_optimizer),
                register_optimizer_step_post_hook(self._end_optimizer),
            ):
                stack.callback(hook.remove)
            yield

    def note_call(self, inputs: list[torch.Tensor]) -> None:
        """Note the tensors that the model is called with."""
        self._inputs.append(inputs)

    def note_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        """Note the gradients that backward sends into what the model has returned."""
        gradients: list[torch.Tensor | None] = [None] * len(outputs)
        self._output_gradients.append(gradients)
        for index, tensor in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(_add_gradient, gradients, index))  # type: ignore[no-untyped-call]

    def end_step(self) -> None:
        """A step has ended: keep what was observed of it."""
        values = self._recorder.take(None)
        gathered, self._gathered = self._gathered, None
        inputs, self._inputs = self._inputs, []
        output_gradients, self._output_gradients = self._output_gradients, []
        if gathered is None:  # no optimizer of torch has stepped
            return
        # What the program reads after the optimizer has stepped is known on each rank.
        scalars = gathered.training.scalars
        added = {
            key: [*scalars.get(key, ()), *numbers[len(scalars.get(key, ())) :]]
            for key, numbers in values.scalars.items()
        }
        training = dataclasses.replace(
            values, tables=gathered.training.tables, scalars=added | _only_in(scalars, added)
        )
        self.training.results.append(
            dataclasses.replace(gathered, training=training, changed=training.changed)
        )
        self.training.inputs.append(inputs)
        self.training.output_gradients.append(output_gradients)
        self.training.has_accelerate_scheduler = _has_accelerate_scheduler()

    def _note_gradients(self) -> None:
        with unwatched():
            self._on_gradients(
                dict(self._names.parameters(self._model)), len(self.training.results)
            )

    def _begin_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self._num_in_optimizer += 1
        names = {id(p): name for name, p in self._names.parameters(self._model)}
        self._on_optimizer(optimizer, names, len(self.training.results))

    def _end_optimizer(self, optimizer: Any, *_: Any) -> None:
        self._num_in_optimizer = max(0, self._num_in_optimizer - 1)
        if self._num_in_optimizer or is_in_backward():
            return
        with unwatched(), torch.no_grad():
            values = self._recorder.read_updated()
            copied: TrainingValues = dataclasses.replace(
                values,
                tables={key: dict(table) for key, table in values.tables.items()},
                scalars={key: list(numbers) for key, numbers in values.scalars.items()},
            )
            gradients = copied.tables.pop(_GRADIENT, {})
            local = describe_local(gradients, copied)
            gathered = gather_result(self._gather, {}, gradients, {}, copied)
        self._gathered = dataclasses.replace(gathered, **local)


def _find_data_parallel(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """The groups of ranks that average the gradients of a model."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            yield tuple(dist.get_process_group_ranks(module.process_group))
    for mesh in fsdp_meshes(model):
        yield tuple(mesh.mesh.flatten().tolist())


def _has_accelerate_scheduler() -> bool:
    """Whether Accelerate steps a scheduler of the program once for each rank, as it does."""
    module = sys.modules.get("accelerate.scheduler")
    kind = getattr(module, "AcceleratedScheduler", None)
    return kind is not None and any(
        issubclass(type(value), kind) and not getattr(value, "split_batches", True)
        for value in gc.get_objects()
    )


def _is_local_batch_norm(module: nn.Module) -> bool:
    """Whether a module normalizes with the statistics of a rank's own samples."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return isinstance(module, norms) and module.training


def _add_gradient(gradients: list[torch.Tensor | None], index: int, gradient: torch.Tensor) -> None:
    known, copied = gradients[index], gradient.detach().clone()
    gradients[index] = copied if known is None else known + copied


def _only_in(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in first.items() if key not in second}
