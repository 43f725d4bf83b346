"""`memory(model, step)`: what a rank's memory holds during a step, and when it holds most."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, final

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardscope._torch.cuda_choices import cuda_choices
from shardscope._torch.fake_models import FakeTwins, StandIns
from shardscope._torch.fakes import is_fake
from shardscope._torch.fsdp import is_offloaded
from shardscope._torch.modules import every_module, is_compiled
from shardscope._torch.private import explain_moved_names
from shardscope._torch.restoring import find_changeable, find_leftovers
from shardscope._torch.simulated_group import explained_lack_of_data, fake_tensors
from shardscope._torch.storages import plain_tensors
from shardscope.comm.names import Models, ModuleNames
from shardscope.comm.rank_stream import name_for_rank
from shardscope.comm.watch import Watch
from shardscope.errors import MemoryProfileError
from shardscope.record import MemoryProfile, Recording, save
from shardscope.shard.advice import find_memory_problems, find_missing, needed_bytes
from shardscope.shard.call_checks import (
    check_call,
    check_made,
    check_needs_no_closure,
    checked_size,
)
from shardscope.shard.circumstances import StepFacts
from shardscope.shard.failed_steps import explained_failures
from shardscope.shard.place import Places
from shardscope.shard.profile import make_profile
from shardscope.shard.watcher import Watcher
from shardscope.world import current_world

__all__ = ["Memory", "memory"]

_taken = threading.Lock()
_NUM_STEPS = 2  # the first makes the optimizer's state, the second finds it there


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
        _the_only_call(),
        _without_data(model, step) as twins,
        _choices_of_cuda(),
        torch.compiler.set_stance("force_eager"),
    ):
        run = _Run(model, twins)
        if twins is not None and isinstance(optimizer, Optimizer):
            twins.replace_in(optimizer)
        if not isinstance(optimizer, Optimizer | None):
            optimizer = check_made(optimizer(model))
        with run.watching(), explained_failures(run.watcher):
            for _ in range(_NUM_STEPS):
                run.take(step, optimizer)
        run.report_gaps(step)
        return run.tell(device_bytes)


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
class _Run:
    """Steps that are watched, and what comes of it."""

    def __init__(self, model: Models, twins: FakeTwins | None) -> None:
        self._twins = twins
        self._names = ModuleNames(model)
        self._places = Places(self._names)
        device_type = _device_type(self._names)
        self._stand_ins = StandIns(twins, device_type=device_type)
        self.watcher = Watcher(self._names, self._places, self._stand_ins, device_type=device_type)
        self._stepped: set[int] = set()
        self._has_optimizer = False
        self._facts = StepFacts(self._names)
        self._ends: list[int] = []
        self.watch = Watch(self._names, mesh=None, stream=None, force=False)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what happens until the context ends."""
        hooks = (
            register_optimizer_step_pre_hook(self._meet_optimizer),
            register_optimizer_step_post_hook(self._note_step),
        )
        try:
            with self._places.watching(), self._facts.watching(), self.watcher.watching():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self, step: Callable[[], object], optimizer: Optimizer | None) -> None:
        """One step of training."""
        self._stepped.clear()
        step()
        if optimizer is not None and id(optimizer) not in self._stepped:
            check_needs_no_closure(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        self._ends.append(len(self.watcher.ledger.events))

    def report_gaps(self, step: Callable[[], object]) -> None:
        """Say where what was told may not be what a GPU would hold."""
        roots = list(self._names.roots())
        report = self.watch.recorder.report_gap
        if self.watcher.num_values_read:
            report("values", "the step read values of tensors without data: each read as zero")
        if self._stand_ins.num_captured:
            report(
                "captured parameters",
                "the step used parameters that it took from the model before memory() was "
                "called, so the model's own did not change",
            )
        for name in sorted(set(find_leftovers(step))) if self._twins else ():
            report("leftovers", f"{name} still has tensors without data: clear it")
        for name in sorted(self._twins.lost_classes if self._twins else ()):
            report("parameters", f"tensors of the class {name} were treated as plain tensors")
        modules = [module for root in roots for module in every_module(root)]
        if self.watcher.has_compiled or any(map(is_compiled, modules)):
            report("torch.compile", "compiled parts ran eagerly")
        if any(isinstance(module, nn.RNNBase) for module in modules):
            report("recurrent layers", "what cuDNN saves for backward is not counted")
        if self.watcher.has_offloaded:
            report("save_on_cpu", "tensors that it keeps on the host are counted as GPU memory")
        if any(map(is_offloaded, roots)):
            report("FSDP", "tensors that it keeps on the host are counted as GPU memory")

    def tell(self, device_bytes: int | None) -> Memory:
        """What the last step took, and what to do about it."""
        ledger = self.watcher.ledger
        profile = make_profile(ledger, self._names, rank=self.watch.rank, ends=self._ends)
        profile = replace(profile, needed_bytes=needed_bytes(profile), device_bytes=device_bytes)
        recording = self.watch.recording()
        circumstances = self._facts.read(ledger, profile.peak_order)
        findings = (
            *recording.findings,
            *find_memory_problems(profile, recording, circumstances),
            *find_missing(
                self.watch.rank,
                has_backward=ledger.has_backward(),
                has_optimizer=self._has_optimizer,
            ),
        )
        run = replace(recording.run, instruments=("memory",))
        told = replace(recording, run=run, memory=(profile,), findings=findings)
        return Memory(profile, told)

    def _meet_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._twins is not None:
            self._twins.replace_in(optimizer)
        self.watcher.meet_optimizer(optimizer)

    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped.add(id(optimizer))
        self._has_optimizer = True
        self._facts.meet_optimizer(optimizer)
        self.watcher.meet_optimizer(optimizer)


@contextmanager
def _the_only_call() -> Iterator[None]:
    """Refuse to run beside another call, whose ops would be counted too: hooks are torch's own."""
    if not _taken.acquire(blocking=False):
        raise MemoryProfileError(
            "memory() was called while another call was running, on another thread or in its "
            "step. Call it after that, or in another process."
        )
    try:
        yield
    finally:
        _taken.release()


@contextmanager
def _without_data(model: Models, step: Callable[[], object]) -> Iterator[FakeTwins | None]:
    """In a world, the tensors that it has; else twins without data."""
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
    elif tensors and all(is_fake(plain) for one in tensors for plain in plain_tensors(one)):
        yield None
    else:
        with explained_lack_of_data(), fake_tensors() as mode:
            twins = FakeTwins(mode)
            with twins.replacing(roots, find_changeable(step)):
                yield twins


def _choices_of_cuda() -> AbstractContextManager[None]:
    """Make torch choose ops as for CUDA, unless the world's device does so already."""
    world = current_world()
    is_cuda = world is not None and world.mesh.device_type == "cuda"
    return nullcontext() if is_cuda else cuda_choices(device_type="cpu")


def _device_type(names: ModuleNames) -> str:
    world = current_world()
    if world is not None:
        return world.mesh.device_type
    for root in names.roots():
        for tensor in (*root.parameters(), *root.buffers()):
            if not tensor.is_meta:
                return str(tensor.device.type)
    return "cpu"
