"""Instruments that observe the steps of a program which knows nothing of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, final

import torch
from msgspec.structs import replace
from torch import nn

from shardscope._torch.cuda.gpus import GPUS
from shardscope.comm.trace import Trace, trace
from shardscope.compile.explain.explain import Explaining, explaining
from shardscope.record import Gap, Recording, merge
from shardscope.shard.audit.audit import audit
from shardscope.shard.memory.memory import ObservedSteps

Models = nn.Module | dict[str, nn.Module]


class Instrument(Protocol):
    """Started at the first call of the model that is trained; stopped when the program ends."""

    def start(self, models: list[nn.Module]) -> None:
        """Begin to observe: `models`, mostly one, are about to be called for the first time."""

    def end_step(self) -> None:
        """A step has ended."""

    def stop(self, error: BaseException | None) -> Recording | None:
        """End, and return what was recorded; None if it never started."""


@final
class TraceInstrument:
    """Records collectives, how the model is sharded, and what torch.compile does."""

    def __init__(self, stream: Path) -> None:
        self._stream = stream  # what is kept if the process dies
        self._trace: Trace | None = None
        self._explaining: Explaining | None = None
        self._audit: Recording | None = None
        self._gaps: list[Gap] = []
        self._stack = ExitStack()

    def start(self, models: list[nn.Module]) -> None:
        """Audit the model, and begin to record."""
        try:
            self._audit = audit(models[0])
        except Exception as error:  # noqa: BLE001 - an audit must not end the program
            self._gaps.append(Gap(place="audit", fact=f"it could not be made ({error!r})"))
        self._explaining = self._stack.enter_context(explaining())
        self._trace = trace(find_models(models), stream=self._stream, force=True)
        self._trace.__enter__()

    def end_step(self) -> None:
        """Collectives of all steps are recorded alike."""

    def stop(self, error: BaseException | None) -> Recording | None:
        """End, and join what was recorded."""
        if self._trace is None or self._explaining is None:
            return None
        self._trace.__exit__(None if error is None else type(error), error, None)
        self._stack.close()
        recordings = [self._trace.recording]
        explanation = self._explaining.recording
        if any(record.graphs for record in explanation.explanations):
            recordings.append(explanation)
        if self._audit is not None:
            recordings.append(self._audit)
        recording = merge(recordings) if len(recordings) > 1 else recordings[0]
        return replace(recording, gaps=(*recording.gaps, *self._gaps))


@final
class MemoryInstrument:
    """Estimates the memory of the steps; compiled functions run eagerly."""

    def __init__(self, device_bytes: int | None) -> None:
        self._device_bytes = device_bytes
        self._steps: ObservedSteps | None = None
        self._stack = ExitStack()

    def start(self, models: list[nn.Module]) -> None:
        """Begin to observe allocations."""
        torch.compiler.set_stance("force_eager")
        self._steps = ObservedSteps(find_models(models))
        self._stack.enter_context(self._steps.watching())

    def end_step(self) -> None:
        """Mark the end of a step."""
        if self._steps is not None:
            self._steps.end_step()

    def stop(self, error: BaseException | None) -> Recording | None:
        """End, and return the profile of the last full step."""
        self._stack.close()
        if self._steps is None or not self._steps.num_steps:
            return None
        self._steps.report_gaps()
        return self._steps.make_result(self._device_bytes).recording


@final
class NoInstrument:
    """Records nothing."""

    def start(self, models: list[nn.Module]) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing."""

    def stop(self, error: BaseException | None) -> Recording | None:
        """There is no recording."""
        return None


def make_instrument(name: str, gpu: str, *, stream: Path) -> Instrument:
    """The instrument of that name for a GPU: "trace", "memory", or one that records nothing."""
    if name == "trace":
        return TraceInstrument(stream)
    return MemoryInstrument(GPUS[gpu].total_memory) if name == "memory" else NoInstrument()


def find_models(called: list[nn.Module]) -> Models:
    """The models that were called, with the other models that the program trains, if there are any.

    Several stages of a pipeline, or a generator and its discriminator, are models of their own.
    """
    # By the type: a weak proxy claims to be an instance of what it refers to.
    modules = [value for value in gc.get_objects() if issubclass(type(value), nn.Module)]
    children = {id(child) for module in modules for child in module.children()}
    known = {id(module) for model in called for module in model.modules()}
    roots = called + [
        module
        for module in modules
        if id(module) not in children | known and any(map(_is_trained, module.parameters()))
    ]
    return roots[0] if len(roots) == 1 else dict(_name_models(roots))


def _is_trained(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad


def _name_models(models: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Each model with the name of its class, numbered where several have the same."""
    names = [type(model).__name__ for model in models]
    for index, (name, model) in enumerate(zip(names, models, strict=True)):
        is_unique = names.count(name) == 1
        yield name if is_unique else f"{name}{names[:index].count(name)}", model
