"""`memory(model, step)`: a rank's memory during a step, and its peak."""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardscope._torch.cuda.kernel_choices import cuda_choices
from shardscope._torch.fake import is_fake
from shardscope._torch.fake_models import FakeSubstitution, FakeTensorMap
from shardscope._torch.fsdp import is_offloaded
from shardscope._torch.modules import every_module, is_compiled
from shardscope._torch.private import explain_moved_names
from shardscope._torch.process_groups.simulated_tensors import explained_lack_of_data, fake_tensors
from shardscope._torch.snapshot import find_changeable, find_leftovers
from shardscope._torch.storage import plain_tensors
from shardscope.attribution.module_names import Models, ModuleNames
from shardscope.attribution.program_records import ProgramRecords
from shardscope.errors import MemoryProfileError
from shardscope.record import MemoryProfile, Recording, save
from shardscope.record.files import name_for_rank
from shardscope.shard.memory.advice import find_memory_problems, find_missing, needed_bytes
from shardscope.shard.memory.memory_mode import MemoryMode, explain_failures
from shardscope.shard.memory.module_phase import PhaseTracker
from shardscope.shard.memory.profile import describe_left_out, make_profile
from shardscope.shard.memory.step_facts import StepFactsCollector
from shardscope.world import current_world

_MAX_BYTES = 1 << 62


def check_call(model: object, step: object, optimizer: object) -> None:
    """Raise for arguments of the wrong type, and in a real process group."""
    for entry in _models(model):
        if not isinstance(entry, nn.Module):
            raise MemoryProfileError(
                f"memory() got {_describe(entry)} instead of a module. Give a model, a list of "
                "models or a dict from name to model, or None to follow every module called."
            )
    if not callable(step) or isinstance(step, nn.Module):
        raise MemoryProfileError(
            f"memory() got {_describe(step)} for its step. Give a function without arguments "
            "that runs one: forward and backward, and the optimizer unless that is given."
        )
    _check_optimizer(optimizer)
    if dist.is_initialized() and current_world() is None:
        raise MemoryProfileError(
            f"memory() was called in a real process group ({dist.get_backend()}), to which it "
            "would send tensors without data. Call it in a simulated world, "
            "`with simulate(mesh=…)`, in a process without a process group."
        )


def checked_size(device_bytes: object) -> int | None:
    """A device's memory as an integer number of bytes."""
    if device_bytes is None:
        return None
    size = 0
    if isinstance(device_bytes, float) and device_bytes.is_integer():
        size = int(device_bytes)
    elif hasattr(device_bytes, "__index__") and not isinstance(device_bytes, bool | torch.Tensor):
        size = operator.index(device_bytes)
    if not 0 < size < _MAX_BYTES:
        raise MemoryProfileError(
            f"memory() got device_bytes={device_bytes!r:.60}. Give the memory of the GPU in "
            "bytes, such as 80 << 30."
        )
    return size


def check_optimizer_result(optimizer: object) -> Optimizer:
    """Raise unless the user's function returned an optimizer."""
    if not isinstance(optimizer, Optimizer):
        raise MemoryProfileError(
            f"the function that memory() got for its optimizer returned {_describe(optimizer)}. "
            "Return the optimizer itself, one for all parameters."
        )
    return optimizer


def check_needs_no_closure(optimizer: Optimizer) -> None:
    """Raise for an optimizer whose step() needs a closure that runs the model."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise MemoryProfileError(
            f"{type(optimizer).__name__} was given to memory(), but its step() needs a closure. "
            "Call optimizer.step(closure) in the step itself."
        )


def _check_optimizer(optimizer: object) -> None:
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        raise MemoryProfileError(
            f"memory() got the class {optimizer.__name__} for its optimizer. Give an optimizer, "
            f"{optimizer.__name__}(model.parameters()), or a function that makes one."
        )
    is_usable = optimizer is None or isinstance(optimizer, Optimizer) or callable(optimizer)
    if is_usable and not isinstance(optimizer, nn.Module):
        return
    several = isinstance(optimizer, Sequence | Mapping)
    raise MemoryProfileError(
        f"memory() got {_describe(optimizer)} for its optimizer. Give an optimizer, or a "
        "function that creates one for the "
        f"model{('; step several in the step' if several else '')}."
    )


def _models(model: object) -> Iterator[object]:
    if isinstance(model, Mapping):
        yield from model.values()
    elif isinstance(model, Sequence) and not isinstance(model, str | bytes):
        yield from model
    elif model is not None:
        yield model


def _describe(value: object) -> str:
    return type(value).__name__


_call_lock = threading.Lock()
_NUM_STEPS = 2  # the first creates the optimizer's state, the second starts with it


@explain_moved_names
def memory(
    model: Models,
    step: Callable[[], object],
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    *,
    device_bytes: int | None = None,
) -> Memory:
    """Estimate the GPU memory of a training step: by kind, by module and over time.

    `step` is called twice: as the first step of training and as a later one. The optimizer is
    stepped, and its gradients are cleared, after each call unless `step` does so. Outside of a
    simulated world the step runs on copies without data, and the model is restored.

    Args:
        model: A model, or a list or dict of models.
        step: Runs forward and backward of one step.
        optimizer: The optimizer, or a function that makes one from the model.
        device_bytes: Memory of the GPU; findings then say whether the step fits and what would
            help.

    Examples:
        >>> with simulate(mesh={"dp": 8}, device="cuda") as world:
        ...     world.materialize(fully_shard(model, mesh=world.mesh))
        ...     optimizer = torch.optim.AdamW(model.parameters())
        ...     result = memory(model, lambda: model(make_batch()).sum().backward(), optimizer)
        >>> result.profile.peak_bytes
    """
    check_call(model, step, optimizer)
    device_bytes = checked_size(device_bytes)
    with (
        _exclusive_call(),
        _without_data(model, step) as fake_map,
        _choices_of_cuda(),
        torch.compiler.set_stance("force_eager"),
    ):
        run = ObservedSteps(model, fake_map)
        if fake_map is not None and isinstance(optimizer, Optimizer):
            fake_map.replace_in(optimizer)
        if not isinstance(optimizer, Optimizer | None):
            optimizer = check_optimizer_result(optimizer(model))
        with run.watching(), explain_failures(run.watcher):
            for _ in range(_NUM_STEPS):
                run.run_step(step, optimizer)
        run.report_gaps(step)
        return run.make_result(device_bytes)


@final
class Memory:
    """The result of `memory`: the `profile`, and a `recording` with it and its findings."""

    def __init__(self, profile: MemoryProfile, recording: Recording) -> None:
        self.profile = profile
        self.recording = recording

    def __repr__(self) -> str:
        profile = self.profile
        where = "" if profile.peak_module is None else f" in {profile.peak_module or 'the model'}"
        return f"Memory(peak {profile.peak_bytes:,} bytes, {profile.peak_phase}{where})"

    def _repr_html_(self) -> str:
        """The page of the recording, for notebooks."""
        return self.recording._repr_html_()

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the recording to a file.

        Args:
            path: The file; `{rank}` becomes this rank.
            force: Overwrite a file that exists.

        Examples:
            >>> result.save("memory.json.gz")
        """
        return save(self.recording, name_for_rank(path, self.profile.rank), force=force)


@final
class ObservedSteps:
    """Observes steps of training, and makes the result of them.

    Live steps are those of a training run with data, which must not notice that it is observed.
    """

    def __init__(
        self, model: Models, fake_map: FakeTensorMap | None = None, *, is_live: bool = False
    ) -> None:
        self._fake_map = fake_map
        self._is_live = is_live
        self._names = ModuleNames(model)
        self._phase_tracker = PhaseTracker(self._names)
        device_type = _device_type(self._names)
        world = current_world()
        self._has_host_data = world is not None and world.host is not None
        self._substitution = FakeSubstitution(
            fake_map, device_type=device_type, has_host_data=self._has_host_data
        )
        self.watcher = MemoryMode(
            self._names,
            self._phase_tracker,
            self._substitution,
            device_type=device_type,
            is_live=is_live,
        )
        self._stepped: set[int] = set()
        self._has_optimizer = False
        self._facts = StepFactsCollector(self._names)
        self._ends: list[int] = []
        self._records = ProgramRecords(self._names, instrument="memory")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe ops, modules and optimizers until the context ends."""
        hooks = (
            register_optimizer_step_pre_hook(self._observe_optimizer),
            register_optimizer_step_post_hook(self.note_step),
        )
        try:
            with self._phase_tracker.watching(), self._facts.watching(), self.watcher.watching():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def run_step(self, step: Callable[[], object], optimizer: Optimizer | None) -> None:
        """Run one step of training, and the optimizer unless the step did."""
        self._stepped.clear()
        step()
        if optimizer is not None and id(optimizer) not in self._stepped:
            check_needs_no_closure(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        self.end_step()

    @property
    def num_steps(self) -> int:
        """How many steps have ended."""
        return len(self._ends)

    def end_step(self) -> None:
        """Mark the end of a step: what is allocated from here on belongs to the next."""
        self._ends.append(len(self.watcher.allocation_log.events))

    def report_gaps(self, step: Callable[[], object] | None = None) -> None:
        """Report where the estimate may differ from a GPU's memory."""
        roots = list(self._names.roots())
        report = self._records.report_gap
        if self.watcher.num_values_read:
            report("values", "the step read values of tensors without data: each read as zero")
        if self._substitution.num_captured:
            report(
                "captured parameters",
                "the step used parameters that it took from the model before memory() was "
                "called, so the model's own did not change",
            )
        for name in sorted(set(find_leftovers(step))) if self._fake_map and step else ():
            report("leftovers", f"{name} still has tensors without data: clear it")
        for name in sorted(self._fake_map.lost_classes if self._fake_map else ()):
            report("parameters", f"tensors of the class {name} were treated as plain tensors")
        modules = [module for root in roots for module in every_module(root)]
        if self.watcher.has_compiled or any(map(is_compiled, modules)):
            report("torch.compile", "compiled parts ran eagerly")
        if any(isinstance(module, nn.RNNBase) for module in modules):
            report("recurrent layers", "what cuDNN saves for backward is not counted")
        if not self._has_host_data and self.watcher.has_offloaded:
            report("save_on_cpu", "tensors that it keeps on the host are counted as GPU memory")
        if not self._has_host_data and any(map(is_offloaded, roots)):
            report("FSDP", "tensors that it keeps on the host are counted as GPU memory")

    def make_result(self, device_bytes: int | None) -> Memory:
        """The profile of the last step, with findings."""
        allocation_log = self.watcher.allocation_log
        profile = make_profile(
            allocation_log, self._names, rank=self._records.rank, ends=self._ends
        )
        if self._is_live:  # a later step, whose optimizer has its state
            profile = replace(profile, first_peak_bytes=None, is_live=True)
        profile = replace(profile, needed_bytes=needed_bytes(profile), device_bytes=device_bytes)
        if profile.allocations is not None and profile.allocations.num_left_out:
            self._records.report_gap("allocations", describe_left_out(profile.allocations))
        recording = self._records.recording()
        step_facts = self._facts.read(allocation_log, profile.peak_order)
        findings = (
            *recording.findings,
            *find_memory_problems(profile, recording, step_facts),
            *find_missing(
                self._records.rank,
                has_backward=allocation_log.has_backward(),
                has_optimizer=self._has_optimizer or self._has_host_data,
            ),
        )
        full_recording = replace(recording, memory=(profile,), findings=findings)
        return Memory(profile, full_recording)

    def _observe_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._fake_map is not None:
            self._fake_map.replace_in(optimizer)
        self.watcher.observe_optimizer(optimizer)

    def note_step(self, optimizer: Optimizer, *_: object) -> None:
        """An optimizer has stepped: what it holds now is its state."""
        self._stepped.add(id(optimizer))
        self._has_optimizer = True
        self._facts.observe_optimizer(optimizer)
        self.watcher.observe_optimizer(optimizer)


@contextmanager
def _exclusive_call() -> Iterator[None]:
    """Raise during another call, whose ops would be counted too: the hooks are global."""
    if not _call_lock.acquire(blocking=False):
        raise MemoryProfileError(
            "memory() was called while another call was running, on another thread or in its "
            "step. Call it after that, or in another process."
        )
    try:
        yield
    finally:
        _call_lock.release()


@contextmanager
def _without_data(model: Models, step: Callable[[], object]) -> Iterator[FakeTensorMap | None]:
    """Replace the model's tensors by fake ones, unless a simulated world provides its own."""
    roots = list(ModuleNames(model).roots())
    tensors = [tensor for root in roots for tensor in (*root.parameters(), *root.buffers())]
    if any(map(is_lazy, tensors)):
        raise MemoryProfileError(
            "memory() got a model with lazy parameters, whose shapes are not known yet. Call the "
            "model once before."
        )
    if current_world() is not None:
        if any(tensor.is_meta for tensor in tensors):
            raise MemoryProfileError(
                "memory() got a model whose tensors are on meta, where nothing takes memory. "
                "Call world.materialize(model) first, and create the optimizer after it."
            )
        yield None
    elif tensors and all(is_fake(plain) for tensor in tensors for plain in plain_tensors(tensor)):
        yield None
    else:
        with explained_lack_of_data(), fake_tensors() as mode:
            fake_map = FakeTensorMap(mode)
            with fake_map.replacing(roots, find_changeable(step)):
                yield fake_map


def _choices_of_cuda() -> AbstractContextManager[None]:
    """Make torch choose ops as for CUDA, unless the world's device does so already."""
    world = current_world()
    is_cuda = world is not None and world.device_type == "cuda"
    return nullcontext() if is_cuda else cuda_choices(device_type="cpu")


def _device_type(names: ModuleNames) -> str:
    world = current_world()
    if world is not None:
        return world.device_type
    for root in names.roots():
        for tensor in (*root.parameters(), *root.buffers()):
            if not tensor.is_meta:
                return str(tensor.device.type)
    return "cpu"
