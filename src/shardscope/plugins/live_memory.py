"""Observes the memory of a step of a training run, without changing the run."""

from __future__ import annotations

from contextlib import ExitStack
from typing import final

from msgspec.structs import replace
from torch.optim import Optimizer

from shardscope._torch.modules import every_module, is_compiled
from shardscope.attribution.module_names import Models, ModuleNames
from shardscope.attribution.program_records import read_identity
from shardscope.record import Gap, Recording
from shardscope.record.text import describe_error
from shardscope.shard.memory.memory import ObservedSteps
from shardscope.world import current_world

_COMPILED = (
    "it was not observed, because the model is compiled, and would run eagerly if its ops were "
    "observed: use shardscope memory, or record a run without torch.compile"
)
_COMPILED_PARTS = "compiled functions may have run eagerly while their ops were observed"
_ON_CPU = (
    "the step ran on the CPU, whose ops allocate other temporaries than those of a GPU: shardscope "
    "memory estimates a GPU's"
)


@final
class LiveMemory:
    """Logs what the ops of a step allocate, from its beginning to its end.

    Each op takes longer while it is observed. Allocations between the batches of a step count, too.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._steps: ObservedSteps | None = None
        self._gaps: list[Gap] = []
        self._device_type = ""

    def begin(self, models: Models) -> None:
        """Begin to observe, unless that would change the run."""
        roots = list(ModuleNames(models).roots())
        if any(is_compiled(module) for root in roots for module in every_module(root)):
            self._report(_COMPILED)
            return
        tensors = (tensor for root in roots for tensor in root.parameters())
        self._device_type = next((tensor.device.type for tensor in tensors), "")
        self._steps = ObservedSteps(models, is_live=current_world() is None)
        self._stack.enter_context(self._steps.watching())

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, and the step may end before that is noticed."""
        if self._steps is not None:
            self._steps.note_step(optimizer)

    def end(self) -> None:
        """Stop observing at the end of the step."""
        if self._steps is not None:
            self._steps.end_step()
        self._stack.close()

    def make_recording(self, recording: Recording) -> Recording:
        """Add the profile, its findings and gaps to the recording of the step's trace."""
        if self._steps is not None:
            if self._steps.watcher.failure is not None:
                error = describe_error(self._steps.watcher.failure)
                self._report(f"it was not observed to the end: {error}")
            else:
                recording = self._add_profile(recording, self._steps)
        return replace(recording, gaps=(*recording.gaps, *self._gaps))

    def _add_profile(self, recording: Recording, steps: ObservedSteps) -> Recording:
        result = steps.make_result(None).recording
        if steps.watcher.has_compiled:
            self._report(_COMPILED_PARTS)
        if self._device_type == "cpu":
            self._report(_ON_CPU)
        run = replace(recording.run, instruments=(*recording.run.instruments, "memory"))
        findings = (*recording.findings, *result.findings)
        return replace(recording, run=run, memory=result.memory, findings=findings)

    def _report(self, fact: str) -> None:
        self._gaps.append(Gap(place="memory", fact=fact, rank=read_identity()[0]))
