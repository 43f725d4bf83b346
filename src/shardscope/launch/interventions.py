"""Changes what a rank sees where it decides: its batches, its clock, signals, files and seeds.

Each context reports the sites of one kind to a `DecisionLog`, and does what that says.
"""

from __future__ import annotations

import builtins
import errno
import functools
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, final
from unittest import mock

import numpy
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import flop_registry

from shardscope._torch.data_loading import (
    RecordedFetch,
    describe_batches,
    is_list_of_samples,
    recorded_fetch,
    watched_batches,
)
from shardscope._torch.dispatch import disable_dispatch_modes
from shardscope._torch.process_groups.value_sharing import DATA, SharingTracker
from shardscope._torch.tree import leaves, pytree_leaves, pytree_map
from shardscope.launch.decision_log import (
    DecisionLog,
    catches_exceptions,
    find_caller,
    find_line,
    is_of_program,
)
from shardscope.launch.decisions import Change, ChangeKind, SiteKind

_LATER_SECONDS = 10 * 24 * 3600
_SEED_OFFSET = 1_000_003
_OF_SAMPLES = (ChangeKind.SHORTER_SAMPLES, ChangeKind.LONGER_SAMPLES)
_CLOCKS = ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns")


@contextmanager
def varied_surroundings(log: DecisionLog, tracker: SharingTracker) -> Iterator[None]:
    """Report clocks, signals, files, seeds and data loaders until the context ends."""
    with ExitStack() as stack:
        _seed_differently(log.rank)
        stack.enter_context(_varied_clocks(log))
        stack.enter_context(_varied_files(log))
        stack.enter_context(_varied_existence(log))
        stack.enter_context(_varied_seeds(log))
        stack.enter_context(_varied_scalers(log))
        stack.enter_context(watched_batches(_VariedBatches(log, tracker).take))
        yield


def _seed_differently(rank: int) -> None:
    """Seed the generators whose state differs from process to process unless a program seeds them.

    torch's own has the same state in each process.
    """
    random.seed(f"rank {rank}")
    numpy.random.seed(rank + 1)


@contextmanager
def _varied_clocks(log: DecisionLog) -> Iterator[None]:
    offset_seconds = 0

    def vary(name: str, clock: Callable[[], Any]) -> Callable[[], Any]:
        unit = 1_000_000_000 if name.endswith("_ns") else 1

        @functools.wraps(clock)
        def read() -> Any:
            nonlocal offset_seconds
            if not is_of_program(sys._getframe(1)):
                return clock()
            if log.visit(SiteKind.CLOCK, f"time.{name}()"):
                offset_seconds = _LATER_SECONDS
            return clock() + offset_seconds * unit

        return read

    with ExitStack() as stack:
        for name in _CLOCKS:
            stack.enter_context(mock.patch.object(time, name, vary(name, getattr(time, name))))
        yield


@contextmanager
def _varied_files(log: DecisionLog) -> Iterator[None]:
    open_file = builtins.open

    @functools.wraps(open_file)
    def open_or_fail(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if "r" in mode and isinstance(file, str | os.PathLike) and is_of_program(frame):
            change = log.visit(
                SiteKind.FILE,
                f"open({Path(os.fspath(file)).name!r})",
                is_handled=catches_exceptions(frame),
            )
            if change is not None:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))
        return open_file(file, mode, *args, **kwargs)

    with mock.patch.object(builtins, "open", open_or_fail):
        yield


@contextmanager
def _varied_existence(log: DecisionLog) -> Iterator[None]:
    """Let a file exist for a rank that does not, or the reverse."""

    def vary(ask: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(ask)
        def exists(path: Any, *args: Any, **kwargs: Any) -> Any:
            answer = ask(path, *args, **kwargs)
            if not is_of_program(sys._getframe(1)) or not isinstance(path, str | os.PathLike):
                return answer
            what = f"{ask.__name__}({Path(os.fspath(path)).name!r})"
            change = log.visit(SiteKind.EXISTS, what, value=float(answer), dtype="bool")
            return answer if change is None else not answer

        return exists

    with ExitStack() as stack:
        for owner, names in (
            (os.path, ("exists", "isfile", "isdir")),
            (Path, ("exists", "is_file", "is_dir")),
        ):
            for name in names:
                function = vary(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, function))
        yield


@contextmanager
def _varied_seeds(log: DecisionLog) -> Iterator[None]:
    def vary(name: str, seed: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(seed)
        def seed_or_other(value: Any = None, *args: Any, **kwargs: Any) -> Any:
            is_own = isinstance(value, int) and is_of_program(find_caller(sys._getframe(1)))
            if is_own and log.visit(SiteKind.SEED, f"{name}()", value=float(value)):
                value += _SEED_OFFSET
            return seed(*(() if value is None else (value,)), *args, **kwargs)

        return seed_or_other

    owners = (
        (random, "random.seed"),
        (numpy.random, "numpy.random.seed"),
        (torch, "torch.manual_seed"),
    )
    with ExitStack() as stack:
        for owner, name in owners:
            attribute = name.rpartition(".")[2]
            function = vary(name, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, function))
        yield


@contextmanager
def _varied_scalers(log: DecisionLog) -> Iterator[None]:
    """Let a gradient scaler skip the step of its optimizer, as after an overflow."""
    step = torch.amp.GradScaler.step

    @functools.wraps(step)
    def step_or_skip(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled() and log.visit(SiteKind.OVERFLOW, "GradScaler.step()"):
            return None
        return step(scaler, optimizer, *args, **kwargs)

    with mock.patch.object(torch.amp.GradScaler, "step", step_or_skip):
        yield


@final
class _VariedBatches:
    """Changes batches of data loaders."""

    def __init__(self, log: DecisionLog, tracker: SharingTracker) -> None:
        self._log = log
        self._tracker = tracker

    def take(self, draw: Callable[[], Any]) -> Any:
        """The batch that the program gets; `draw` takes that of the loader."""
        frame = find_caller(sys._getframe(1))
        if frame is None:
            return draw()
        self._log.is_in_model = True
        try:
            with recorded_fetch(draw) as fetch:
                batch = draw()
        finally:
            self._log.is_in_model = False
        label = self._note_data(fetch, batch)
        samples = None if fetch is None else fetch.samples
        has_samples = is_list_of_samples(draw, batch)
        change = self._log.visit(
            SiteKind.BATCH,
            describe_batches(draw),
            sources=(label,),
            is_handled=catches_exceptions(frame),
            detail=() if has_samples else tuple(list_entries(batch)),
            value=float(len(list_lengths(batch, has_samples=has_samples))),
            has_samples=fetch is not None and _has_sequences(fetch),
            has_strings=any(map(_is_strings, pytree_leaves(batch, is_leaf=_is_strings))),
        )
        if change is None:
            return batch
        if change.kind in _OF_SAMPLES and fetch is not None and samples is not None:
            is_sequence = _choose_test(fetch)
            changed = [_change_sample(sample, change.kind, is_sequence) for sample in samples]
            return fetch.collate(changed)
        return change_batch(batch, change, has_samples=has_samples)

    def _note_data(self, fetch: RecordedFetch | None, batch: Any) -> str:
        """Note what tells the data of ranks apart: indices of samples, and values.

        Returns the label of the batch.
        """
        if fetch is not None:
            self._log.note_source(DATA, repr(fetch.indices).encode())
        tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
        with disable_dispatch_modes():
            label = self._log.label_batch(repr(None if fetch is None else fetch.indices), tensors)
            for tensor in tensors:
                self._tracker.note_data(tensor, label)
        return label


def list_entries(batch: Any) -> Iterator[str]:
    """The entries of a batch that it might lack: keys, or positions of tensors after the first."""
    if isinstance(batch, Mapping):
        yield from (f"entry {key!r}" for key in batch)
    elif isinstance(batch, tuple | list):
        tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]
        yield from (f"tensor {index}" for index in range(1, len(tensors)))


def change_batch(batch: Any, change: Change, *, has_samples: bool = False) -> Any:
    """The batch with the change; raises what the change says.

    `has_samples` says that it is a list with an entry for each sample.
    """
    match change.kind:
        case ChangeKind.END:
            raise StopIteration
        case ChangeKind.RAISED:
            raise OSError(errno.EIO, "a sample could not be read")
        case ChangeKind.WITHOUT:
            return _leave_out(batch, change.detail)
        case ChangeKind.SHORTER | ChangeKind.LONGER:
            return _change_lengths(batch, change, has_samples=has_samples)
        case ChangeKind.FEWER_ROWS if has_samples:
            return batch[: max(1, len(batch) // 2)]
        case ChangeKind.NO_ROWS if has_samples:
            return []
        case ChangeKind.SAME_ROWS if has_samples:
            return [batch[0] for _ in batch]
        case ChangeKind.OTHER:
            return _change_strings(batch, lambda strings: ["other"] * len(strings))
        case ChangeKind.SAME_ROWS:
            batch = _change_strings(batch, lambda strings: [strings[0]] * len(strings))
            return pytree_map(functools.partial(_change_tensor, kind=change.kind), batch)
        case _:
            return pytree_map(functools.partial(_change_tensor, kind=change.kind), batch)


def _is_strings(value: Any) -> bool:
    """Whether a part of a batch is a string for each sample."""
    is_list = isinstance(value, list | tuple) and len(value) > 0
    return is_list and all(isinstance(entry, str) for entry in value)


def _change_strings(batch: Any, change: Callable[[Sequence[str]], list[str]]) -> Any:
    def replace(value: Any) -> Any:
        return type(value)(change(value)) if _is_strings(value) else value

    return pytree_map(replace, batch, is_leaf=_is_strings)


def _leave_out(batch: Any, entry: str) -> Any:
    """The batch without an entry of `list_entries`: a key is missing, a tensor is None."""
    if isinstance(batch, Mapping):
        entries = {key: value for key, value in batch.items() if f"entry {key!r}" != entry}
        return entries if type(batch) is dict else type(batch)(entries)  # type: ignore[call-arg]
    numbers = itertools.count()

    def keep(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return None if f"tensor {next(numbers)}" == entry else value

    return pytree_map(keep, batch)


def _has_sequences(fetch: RecordedFetch) -> bool:
    """Whether the program collates samples with sequences, which may have other lengths."""
    is_sequence = _choose_test(fetch)
    return any(
        is_sequence(value)
        for sample in fetch.samples or ()
        for value in pytree_leaves(sample, is_leaf=is_sequence)
    )


def _choose_test(fetch: RecordedFetch) -> Callable[[Any], bool]:
    # A sample that is not collated is often a batch, whose tensors have the samples along dim 0.
    return _is_list if fetch.is_single else _is_sequence


def _is_sequence(value: Any) -> bool:
    """Whether a part of a sample is a sequence: a list, or a tensor of numbers or of vectors."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 1 + value.is_floating_point() and len(value) > 1
    return _is_list(value)


def _is_list(value: Any) -> bool:
    """Whether a part of a sample is a list of numbers, or of tuples of numbers."""
    is_list = isinstance(value, list) and len(value) > 1
    return is_list and all(isinstance(entry, int | float | tuple | list) for entry in value)


def _change_sample(sample: Any, kind: ChangeKind, is_sequence: Callable[[Any], bool]) -> Any:
    """A sample with shorter or longer sequences."""

    def change_length(value: Any) -> Any:
        if not is_sequence(value):
            return value
        if kind is ChangeKind.SHORTER_SAMPLES:
            return value[: max(1, len(value) // 4)]
        return torch.cat([value, value]) if isinstance(value, torch.Tensor) else value + value

    return pytree_map(change_length, sample, is_leaf=is_sequence)


def list_lengths(batch: Any, *, has_samples: bool = False) -> list[int]:
    """The lengths of the sequences in a batch: that of tensors in a list, or those along dim 1.

    Floating-point tensors have sequences if they have three dims.
    """
    lengths = {
        value.shape[dim]
        for value in leaves(batch)
        if isinstance(value, torch.Tensor)
        and (dim := _find_length_dim(value, has_samples)) is not None
    }
    return sorted(lengths)


def _find_length_dim(value: torch.Tensor, has_samples: bool) -> int | None:
    """The dim of a tensor along which its sequences extend; None if it has none."""
    dim = 0 if has_samples else 1
    return dim if value.dim() > dim + value.is_floating_point() else None


def _change_lengths(batch: Any, change: Change, *, has_samples: bool) -> Any:
    """The batch with shorter or longer sequences, of those that have the n-th of its lengths."""
    lengths = list_lengths(batch, has_samples=has_samples)
    wanted = set(lengths) if not change.detail else set(lengths[int(change.detail) :][:1])

    def change_length(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        dim = _find_length_dim(value, has_samples) if is_tensor else None
        if dim is None or value.shape[dim] not in wanted:
            return value
        if change.kind is ChangeKind.SHORTER:
            return value.narrow(dim, 0, max(1, value.shape[dim] // 4)).clone()
        return torch.cat([value, value], dim)

    return pytree_map(change_length, batch)


def _change_tensor(value: Any, kind: ChangeKind) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dim() or not value.shape[0]:
        return value
    if kind is ChangeKind.NAN:
        return torch.full_like(value, float("nan")) if value.is_floating_point() else value
    if kind is ChangeKind.LARGE:
        return value * 1e4 if value.is_floating_point() else value
    if kind is ChangeKind.ZERO:
        return torch.zeros_like(value)
    if kind is ChangeKind.NO_ROWS:
        return value[:0]
    if kind is ChangeKind.FEWER_ROWS:
        return value[: max(1, value.shape[0] // 2)]
    if kind is ChangeKind.SAME_ROWS:
        return value[:1].expand_as(value).clone()
    return value


@final
class VariedValues:
    """Changes the values that a program reads of tensors, and how many elements it selects."""

    def __init__(self, log: DecisionLog, tracker: SharingTracker) -> None:
        self._log = log
        self._tracker = tracker
        self.num_ops = 0

    def note_op(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Follow on which ranks the results of an op are the same."""
        self.num_ops += 1
        self._tracker.note_op(op, args, kwargs, result)
        if isinstance(result, torch.Tensor):
            self._log.num_bytes += result.numel() * result.element_size()
            count = flop_registry.get(op.overloadpacket)
            if count is not None:
                self._log.num_flops += count(*args, **kwargs, out_val=result)

    def choose(self, what: str, tensor: torch.Tensor, value: Any) -> Any:
        """The value that the program gets; False if it should select nothing."""
        if find_caller(sys._getframe(1)) is None:
            return value
        sharing = self._tracker.find(tensor)
        is_read = what.endswith("item()")
        change = self._log.visit(
            SiteKind.VALUE if is_read else SiteKind.ROWS,
            what,
            value=float(value) if is_read and not isinstance(value, complex) else None,
            dtype=type(value).__name__ if is_read else "",
            ranks=sharing.ranks,
            sources=sharing.sources,
        )
        return value if change is None else _CHANGED_VALUES[change.kind](value)


_CHANGED_VALUES: dict[ChangeKind, Callable[[Any], Any]] = {
    ChangeKind.NAN: lambda value: float("nan"),
    ChangeKind.ZERO: lambda value: type(value)(0),
    ChangeKind.LARGE: lambda value: type(value)(10**9),
    ChangeKind.OPPOSITE: lambda value: not value,
    ChangeKind.NO_ROWS: lambda value: 0,
    ChangeKind.ALL_ROWS: lambda value: 1,
}


def _list_trained(model: nn.Module) -> Iterator[str]:
    """The parts of a model, or their parts if there is only one, that have trained parameters.

    None of one that DDP wraps: it has registered them already.
    """
    if isinstance(model, DistributedDataParallel):
        return
    parts = [name for name, part in model.named_children() if _is_trained(part)]
    if len(parts) == 1:
        children = _list_trained(model.get_submodule(parts[0]))
        yield from (f"{parts[0]}.{name}" for name in children)
    else:
        yield from parts


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _freeze(model: nn.Module, part: str) -> None:
    for parameter in model.get_submodule(part).parameters():
        parameter.requires_grad_(False)
        parameter.grad = None


@final
class VariedCalls:
    """Changes the inputs of outermost calls of models, lets them fail, and delivers signals."""

    def __init__(self, log: DecisionLog) -> None:
        self._log = log
        self._own_handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def call(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """The result of an outermost call of a module, which is run by `call(*args, **kwargs)`."""
        is_training = module.training and torch.is_grad_enabled()
        if not is_training or not _is_trained(module):
            return call(*args, **kwargs)
        frame = sys._getframe(1)
        source = find_line(frame)
        for number in self._list_handled():
            if self._log.visit(SiteKind.SIGNAL, signal.Signals(number).name, source=source):
                signal.raise_signal(number)
        change = self._log.visit(
            SiteKind.INPUT,
            type(module).__name__,
            source=source,
            is_handled=catches_exceptions(frame),
            detail=tuple(_list_trained(module)),
        )
        if change is not None and change.kind is ChangeKind.RAISED:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB (simulated by shardscope check)"
            )
        if change is not None and change.kind is ChangeKind.FROZEN:
            _freeze(module, change.detail)
        elif change is not None:
            args, kwargs = change_batch((args, kwargs), change)
        self._log.is_in_model = True
        try:
            return call(*args, **kwargs)
        finally:
            self._log.is_in_model = False

    def _list_handled(self) -> Iterator[int]:
        """The signals that the program handles by functions of its own."""
        for number, before in self._own_handlers.items():
            handler = signal.getsignal(number)
            if handler is not before and callable(handler):
                yield number
