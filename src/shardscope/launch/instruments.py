"""Counts and records the steps of a program that does not know that it is observed."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardscope._torch.cuda.gpus import GPUS
from shardscope._torch.dynamo_caches import quiet_compiler
from shardscope._torch.fsdp import meshes_of, user_class
from shardscope._torch.modules import unwrap
from shardscope.attribution.program_records import describe_run, read_identity
from shardscope.comm.trace import Trace, trace
from shardscope.compile.explain.explain import Explaining, explaining, run_as_it_is
from shardscope.errors import LaunchError
from shardscope.launch.calls import CALLS, CallsInstrument
from shardscope.launch.decision_log import DecisionLog
from shardscope.launch.instrument import Instrument
from shardscope.launch.lockstep import Lockstep
from shardscope.launch.step_capture import CAPTURE, PROBED, CaptureInstrument
from shardscope.launch.step_replay import REPLAYS, ReplayInstrument
from shardscope.launch.steps import ModelCall, StepsDone
from shardscope.record import Gap, Recording, merge
from shardscope.shard.audit.audit import audit_models
from shardscope.shard.coverage.coverage import coverage
from shardscope.shard.memory.memory import ObservedSteps
from shardscope.world import current_world

Models = nn.Module | dict[str, nn.Module]
_REFUSED_BY_STEPS = "mixed-meshes"  # the rule about parameters that clipping or a step refuses


@final
class TraceInstrument(Instrument):
    """Records collectives."""

    def __init__(self, stream: Path) -> None:
        self._stream = stream  # what is kept if the process dies
        self._trace: Trace | None = None

    def start(self, models: list[nn.Module]) -> None:
        """Begin to record."""
        self._trace = trace(find_models(models), stream=self._stream, force=True)
        self._trace.__enter__()

    def stop(self, error: BaseException | None) -> Recording | None:
        """End, and return the collectives."""
        if self._trace is None:
            return None
        self._trace.__exit__(None if error is None else type(error), error, None)
        return self._trace.recording


@final
class AuditInstrument(Instrument):
    """Reads how the model is sharded when it is called first."""

    def __init__(self) -> None:
        self._recording: Recording | None = None

    def start(self, models: list[nn.Module]) -> None:
        """Audit the model."""
        try:
            if not models:
                raise ValueError("what the program trains is not called as a module")
            self._recording = audit_models(find_models(models))
        except Exception as error:  # noqa: BLE001 - an audit must not end the program
            rank, size = read_identity()
            gap = Gap(place="audit", rank=rank, fact=f"it could not be made ({error!r})")
            run = describe_run(rank, size, (), instrument="audit")
            self._recording = Recording(run=run, gaps=(gap,))
        self._is_done = True

    def end_step(self) -> None:
        """Drop what the audit expects to fail, and what has not: the step was run."""
        if self._recording is not None:
            findings = (f for f in self._recording.findings if f.rule != _REFUSED_BY_STEPS)
            self._recording = replace(self._recording, findings=tuple(findings))

    def stop(self, error: BaseException | None) -> Recording | None:
        """The audit."""
        return self._recording


@final
class ExplainInstrument(Instrument):
    """Records what torch.compile does in the program.

    With `must_compile`, the model is compiled on the inputs of its first call if the program itself
    has compiled nothing in its first step; that ends the program.
    """

    def __init__(self, *, must_compile: bool = False) -> None:
        self._must_compile = must_compile
        self._explaining: Explaining | None = None
        self._compiled_model: Recording | None = None
        self._call: ModelCall | None = None
        self._stack = ExitStack()

    def start(self, models: list[nn.Module]) -> None:
        """Begin to observe."""
        if self._must_compile and models:
            self._call = ModelCall(models[0])
        self._explaining = self._stack.enter_context(explaining())

    def end_step(self) -> None:
        """Compile the model after the first step, if the program has not compiled anything."""
        call, self._call = self._call, None
        if call is None or self._explaining is None or self._explaining.has_compiled:
            return
        name = f"{type(call.model).__name__}, compiled on the inputs of its first call"
        with ExitStack() as stack:
            stack.enter_context(suppress(Exception))  # it is a part of the explanation
            own = stack.enter_context(explaining(target=name))
            stack.enter_context(quiet_compiler())
            torch.compile(call.model, backend=run_as_it_is)(*call.args, **call.kwargs)
        self._compiled_model = own.recording
        self._is_done = True

    def stop(self, error: BaseException | None) -> Recording | None:
        """End, and return the graphs; None if there were none."""
        if self._explaining is None:
            return None
        self._stack.close()
        recording = self._compiled_model or self._explaining.recording
        has_graphs = any(record.graphs for record in recording.explanations)
        return recording if has_graphs or self._must_compile else None


@final
class CoverageInstrument(Instrument):
    """Tests which ops of the model can run sharded, on the inputs of its first call."""

    def __init__(self) -> None:
        self._recording: Recording | None = None

    def start(self, models: list[nn.Module]) -> None:
        """Wait for the call of the model."""
        if not models:
            raise LaunchError(
                "Coverage tests the ops of a module's call, but what the program trains is not "
                "called as a module. Put it into the forward() of an nn.Module."
            )
        ModelCall(models[0], self._cover)

    def stop(self, error: BaseException | None) -> Recording | None:
        """The coverage."""
        return self._recording

    def _cover(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mesh = next(meshes_of(model), None)
        if mesh is None:
            world = current_world()
            size = dist.get_world_size() if dist.is_initialized() or world is None else world.size
            mesh = init_device_mesh("cuda", (size,), mesh_dim_names=("ranks",))
        self._recording = coverage(model, *args, mesh=mesh, **kwargs)
        self._is_done = True
        raise StepsDone


@final
class CombinedInstrument(Instrument):
    """Several instruments in one process, and one recording of what they recorded."""

    def __init__(self, instruments: Sequence[Instrument]) -> None:
        self._instruments = instruments
        self.is_from_start = any(instrument.is_from_start for instrument in instruments)

    @property
    def is_done(self) -> bool:
        """Whether none of them has anything left to observe."""
        return all(instrument.is_done for instrument in self._instruments)

    def begin(self) -> None:
        """Tell all that the program is about to be run."""
        for instrument in self._instruments:
            instrument.begin()

    def end_run(self) -> None:
        """Tell all that the program is asked to end."""
        for instrument in self._instruments:
            instrument.end_run()

    def start(self, models: list[nn.Module]) -> None:
        """Start all."""
        for instrument in self._instruments:
            instrument.start(models)

    def end_step(self) -> None:
        """Tell all that a step has ended."""
        for instrument in self._instruments:
            instrument.end_step()

    def stop(self, error: BaseException | None) -> Recording | None:
        """End all, the last one first."""
        recordings = [instrument.stop(error) for instrument in reversed(self._instruments)]
        present = [recording for recording in recordings if recording is not None]
        return merge(present) if len(present) > 1 else next(iter(present), None)


@final
class MemoryInstrument(Instrument):
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
class NoInstrument(Instrument):
    """Records nothing."""


def make_instrument(
    names: str,
    gpu: str,
    *,
    stream: Path,
    folder: str,
    num_steps: int,
    lockstep: Lockstep | None = None,
    log: DecisionLog | None = None,
    max_ops: int = 0,
) -> Instrument:
    """The instruments of these names, joined by "+"; one that records nothing for others.

    `stream` is the file to which collectives are written as they happen. `folder` is where
    the instruments that capture or replay a step read and write it, `lockstep` what collectives
    are reported to, and `log` what decisions are reported to. Instruments that also record
    modules capture the last of `num_steps`.
    """
    makers: dict[str, Callable[[], Instrument]] = {
        "audit": AuditInstrument,
        "explain": ExplainInstrument,
        "compile": lambda: ExplainInstrument(must_compile=True),
        "coverage": CoverageInstrument,
        CAPTURE: lambda: CaptureInstrument(folder),
        CAPTURE + PROBED: lambda: CaptureInstrument(folder, probed_step=num_steps - 1),
        **{
            name + end: functools.partial(ReplayInstrument, name + end, folder)
            for name in REPLAYS
            for end in ("", PROBED)
        },
        CALLS: lambda: CallsInstrument(stream, lockstep, log, max_ops),
        "trace": lambda: TraceInstrument(stream),
        "memory": lambda: MemoryInstrument(GPUS[gpu].total_memory),
    }
    instruments = [makers[name]() for name in names.split("+") if name in makers]
    return CombinedInstrument(instruments) if instruments else NoInstrument()


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
        if id(module) not in children | known and any(p.requires_grad for p in module.parameters())
    ]
    return roots[0] if len(roots) == 1 else dict(_name_models(roots))


def _name_models(models: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Each model with the name of the user's class, numbered where several have the same."""
    names = [user_class(unwrap(model)).__name__ for model in models]
    for index, (name, model) in enumerate(zip(names, models, strict=True)):
        is_unique = names.count(name) == 1
        yield name if is_unique else f"{name}{names[:index].count(name)}", model
