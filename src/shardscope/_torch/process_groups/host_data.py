"""Data on the host beside tensors without data on a simulated device.

A training program reads files, makes batches and computes sizes on the CPU; only what it moves to
the GPU needs no data. So tensors on the CPU keep their data, except parameters, which are too large
and whose identity must survive `model.to("cuda")`, and large floating-point tensors. Where a
program reads a value that no data stands behind, it gets a stand-in, and the read is reported.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, final
from unittest.mock import patch

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.lazy import LazyModuleMixin

from shardscope._torch.dispatch import (
    COPY,
    READ_VALUE,
    disable_dispatch_modes,
    is_overload,
    push_dispatch_mode,
)
from shardscope._torch.fake import MAX_CONSTANT, FakeTensor
from shardscope._torch.process_groups.branches import find_branch_without_error
from shardscope._torch.storage import plain_tensors

_MAX_BYTES = 1 << 20  # of a new floating-point tensor on the CPU that gets data
_aten = torch.ops.aten
_MARK = "shardscope_ordinary_value"
_EQUAL = _aten.equal.default
_BINCOUNT = _aten.bincount.default
_REPEAT = _aten.repeat_interleave.Tensor
_SELECTIONS = {
    _aten.nonzero: "nonzero()",
    _aten.masked_select: "masked_select()",
    _aten.index: "indexing with a mask",
}
_MASKS = (torch.bool, torch.uint8)
# What the ops return for ordinary numbers.
_ORDINARY = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
_SAME = {
    "all", "any", "alias", "clone", "detach", "to_copy", "view", "unsafe_view", "reshape",
    "squeeze", "unsqueeze", "flatten", "max", "amax", "min", "amin", "select", "slice",
}  # fmt: skip
_OPPOSITE = {"logical_not", "bitwise_not"}
_BOTH = {
    "mul": all, "logical_and": all, "bitwise_and": all,
    "add": any, "logical_or": any, "bitwise_or": any, "maximum": any,
}  # fmt: skip

OnRead = Callable[[str, str], None]
"""Called with what reads a value, such as `item()`, and what the program gets instead."""
_GOT = "the program got a stand-in (1, or False)"
_HALF = "half of the elements are assumed to be selected"
_EVEN = "all counts are assumed equal, as if each expert got as many tokens as any other"
# Ops that count how many tokens chose each expert, and those that make one-hot rows of choices.
_COUNTS = ("histc",)
_ZEROS = ("zeros", "zeros_like", "new_zeros", "zero")
_SCATTERS = ("scatter",)
_CHOICES = "shardscope_choices"  # on one-hot rows: how many entries are set, in all rows
# Ops whose results have marks; what others overwrite is not known any more.
_MARKED = {*_SAME, *_OPPOSITE, *_BOTH, *_ORDINARY, *_COUNTS, *_ZEROS, *_SCATTERS}


def stand_in_for(dtype: torch.dtype) -> float | int | bool | complex:
    """The value that is read of a tensor without data: 1, or False for a bool.

    1 rather than 0: programs divide by counts and take logarithms of losses.
    """
    if dtype is torch.bool:
        return False
    if dtype.is_complex:
        return complex(1)
    return 1.0 if dtype.is_floating_point else 1


_watched: dict[StorageWeakRef, Callable[[], None]] = {}  # by storage, what is called after writes


@contextmanager
def watched_writes(tensors: Iterable[torch.Tensor], on_write: Callable[[], None]) -> Iterator[None]:
    """Call `on_write` after each op that writes to one of these tensors, which have no data."""
    storages = {
        StorageWeakRef(plain.untyped_storage())
        for tensor in tensors
        for plain in plain_tensors(tensor)
    }
    _watched.update(dict.fromkeys(storages, on_write))
    try:
        yield
    finally:
        for storage in storages:
            _watched.pop(storage, None)


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Make `torch.inference_mode` switch off gradients only.

    In inference mode, torch cannot make views of tensors without data that were created outside.
    """
    inference_mode: Any = torch.inference_mode
    enter, leave = inference_mode.__enter__, inference_mode.__exit__
    before = threading.local()

    def switch_off(context: Any) -> None:
        states = before.__dict__.setdefault("states", [])
        states.append(torch.is_grad_enabled())
        torch.set_grad_enabled(not context.mode)

    def restore(context: Any, *_: Any) -> None:
        torch.set_grad_enabled(before.states.pop())

    inference_mode.__enter__, inference_mode.__exit__ = switch_off, restore
    try:
        yield
    finally:
        inference_mode.__enter__, inference_mode.__exit__ = enter, leave


class ValueObserver(Protocol):
    """Follows values that tensors without data would have, and decides what the program reads."""

    def note_op(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An op was run."""

    def choose(self, what: str, tensor: torch.Tensor, value: Any) -> Any:
        """The value that the program gets.

        Of an op that selects elements, `value` is the share of them: 0 for none, 1 for all.
        """


@final
class HostData:
    """Decides which ops run on data, and answers reads of values that have none."""

    def __init__(self, on_read: OnRead) -> None:
        self._on_read = on_read
        self.observer: ValueObserver | None = None

    def answer(self, op: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an op that runs on data or reads a value; else NotImplemented."""
        if any(issubclass(kind, FakeTensor) for kind in types):
            if op is COPY and args[0].constant is not None and _is_host(kwargs.get("device")):
                return op(args[0].constant, **kwargs)  # what is known has data on the CPU
            if op is READ_VALUE and args[0].constant is None:
                return self._read(args[0], "item()")
            if op is _BINCOUNT and len(args) > 2 and args[1] is None:
                # Its size depends on the largest value, which is assumed to be below the minimum.
                counts = args[0].new_empty((args[2],))
                self._assume_even("bincount", args[0].numel(), counts)
                return counts
            if op is _REPEAT and not kwargs and args[0].constant is not None:
                return op(*args, output_size=int(args[0].constant.sum()))
            if op.overloadpacket in _SELECTIONS:
                return self._select(op, args, kwargs)
            if op is _EQUAL and any(getattr(a, "constant", None) is None for a in args):
                self._on_read("torch.equal()", "the tensors are assumed to be equal")
                return args[0].shape == args[1].shape
            return NotImplemented
        if any(kind is not nn.Parameter for kind in types) or not is_overload(op):
            return NotImplemented  # a wrapper subclass or an op of functions: its ops come here
        device = kwargs.get("device")
        if device is not None and not _is_host(device):
            return NotImplemented
        if _is_large_factory(args, kwargs):
            return NotImplemented
        return op(*args, **kwargs)

    def mark(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remember what can be known of a result for ordinary numbers.

        `isfinite` is True. Tokens are assumed to be spread evenly over the experts, so that a count
        of choices, made by `histc`, `bincount` or by adding up one-hot rows, is the same for each.
        """
        if not is_overload(op):
            return
        if self.observer is not None:
            self.observer.note_op(op, args, kwargs, result)
        if _watched and op._schema.is_mutable:
            _report_write(args[0])
        if not isinstance(result, FakeTensor):
            return
        if result.constant is not None:
            return
        name = op._schema.name.partition("::")[2].strip("_")
        if op._schema.is_mutable and name not in _MARKED:
            copy_mark(args[1] if name == "copy" else None, result)
        elif name in _COUNTS:
            self._assume_even(name, args[0].numel(), result)
        elif name in _ZEROS:
            setattr(result, _CHOICES, 0)
            setattr(result, _MARK, False)
        elif name == "one_hot":
            setattr(result, _CHOICES, args[0].numel())
        elif name in _SCATTERS and getattr(args[0], _CHOICES, None) == 0:
            is_last = args[1] in (-1, args[0].dim() - 1)
            setattr(result, _CHOICES, args[2].numel() if is_last else None)
        elif name == "sum" and getattr(args[0], _CHOICES, None):
            if tuple(result.shape) == tuple(args[0].shape[-1:]):
                self._assume_even("sum", getattr(args[0], _CHOICES), result)
        else:
            _pass_marks(name, args, result)

    def _select(self, op: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op that has as many rows as values decide: a part of the elements."""
        what = _SELECTIONS[op.overloadpacket]
        masks = [args[0]] if op.overloadpacket is _aten.nonzero else [args[1]]
        if op.overloadpacket is _aten.index:
            masks = [i for i in args[1] if i is not None and i.dtype in _MASKS]
        if not masks or getattr(masks[0], "constant", None) is not None:
            return NotImplemented
        mask = masks[0]
        num_rows = self._count_selected(what, mask)
        if op.overloadpacket is _aten.nonzero:
            return mask.new_empty((num_rows, mask.dim()), dtype=torch.long)
        if op.overloadpacket is _aten.masked_select:
            return args[0].new_empty((num_rows,))
        positions = [
            [mask.new_empty((num_rows,), dtype=torch.long) for _ in range(index.dim())]
            if index is not None and index.dtype in _MASKS
            else [index]
            for index in args[1]
        ]
        return op(args[0], [index for each in positions for index in each], *args[2:], **kwargs)

    def _count_selected(self, what: str, mask: Any) -> int:
        """How many elements a mask without data is assumed to select."""
        marked = getattr(mask, _MARK, None)
        share: float = self._choose(what, mask, 0.5 if marked is None else float(marked))
        if share in (0, 1):
            setattr(mask, _MARK, bool(share))
        else:
            self._on_read(what, _HALF)
        return math.ceil(int(mask.numel()) * share)

    def _assume_even(self, name: str, total: int, counts: Any) -> None:
        if counts.numel() <= MAX_CONSTANT:
            self._on_read(f"{name}()", _EVEN)
            set_constant(counts, _spread_evenly(total, counts))

    def _read(self, tensor: Any, what: str) -> Any:
        marked = getattr(tensor, _MARK, None)
        branch = find_branch_without_error() if marked is None else None
        if branch is not None:
            self._on_read(what, "the branch that raises was not taken")
            value = type(stand_in_for(tensor.dtype))(branch)
            return self._choose(what, tensor, value)
        value = stand_in_for(tensor.dtype)
        value = value if marked is None else type(value)(marked)
        self._on_read(what, _GOT)
        return self._choose(what, tensor, value)

    def _choose(self, what: str, tensor: Any, value: Any) -> Any:
        return value if self.observer is None else self.observer.choose(what, tensor, value)

    @contextmanager
    def parameters_without_data(self, mode: Any) -> Iterator[None]:
        """Make new parameters without data, and let `tolist()` and `numpy()` return stand-ins."""
        make = nn.Parameter.__new__

        @functools.wraps(make)
        def make_without_data(
            cls: Any, data: Any = None, requires_grad: bool = True, *rest: Any, **more: Any
        ) -> Any:
            if type(data) is torch.Tensor and not data.is_meta and data.device.type == "cpu":
                data = mode.from_tensor(data.detach())
            return make(cls, data, requires_grad, *rest, **more)

        read_list = FakeTensor.tolist

        def tolist(tensor: Any) -> Any:
            if tensor.constant is not None:
                return read_list(tensor)
            return _fill(tensor.shape, self._read(tensor, "tolist()"))

        def numpy(tensor: Any, *, force: bool = False) -> Any:
            if tensor.device.type != "cpu" and not force:
                raise TypeError(
                    f"can't convert a tensor on {tensor.device} to numpy: call .cpu() first"
                )
            with disable_dispatch_modes():
                if tensor.constant is not None:
                    return tensor.constant.numpy(force=force)
                value = self._read(tensor, "numpy()")
                return torch.full(tuple(tensor.shape), value, dtype=tensor.dtype).numpy()

        nn.Parameter.__new__ = staticmethod(make_without_data)
        FakeTensor.tolist, FakeTensor.numpy = tolist, numpy
        try:
            with _lazy_layers_without_data():
                yield
        finally:
            nn.Parameter.__new__ = staticmethod(make)
            FakeTensor.tolist = read_list
            del FakeTensor.numpy


@contextmanager
def _lazy_layers_without_data() -> Iterator[None]:
    """Replace the parameters of lazy layers by some without data when they get their shapes."""
    infer = LazyModuleMixin._infer_parameters

    @functools.wraps(infer)
    def infer_without_data(module: Any, *args: Any, **kwargs: Any) -> Any:
        result = infer(module, *args, **kwargs)
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach(), parameter.requires_grad))
        return result

    with patch.object(LazyModuleMixin, "_infer_parameters", infer_without_data):
        yield


@contextmanager
def modes_in_threads(mode: Any) -> Iterator[None]:
    """Activate a dispatch mode on threads that the program starts, until the context ends."""
    start = threading.Thread.start

    @functools.wraps(start)
    def start_in_mode(thread: threading.Thread) -> None:
        run = thread.run

        def run_in_mode() -> None:
            push_dispatch_mode(mode)
            run()

        thread.run = run_in_mode
        start(thread)

    with patch.object(threading.Thread, "start", start_in_mode):
        yield


def set_constant(tensor: Any, constant: torch.Tensor) -> None:
    """Make a tensor without data readable, with these values."""
    tensor.constant = constant.to(tensor.dtype)
    tensor.fake_mode.fake_tensor_converter.add_constant_storage_mapping(tensor)


def _spread_evenly(total: int, counts: Any) -> torch.Tensor:
    with disable_dispatch_modes():
        base, rest = divmod(total, max(1, counts.numel()))
        even = torch.full((counts.numel(),), base)
        even[:rest] += 1
        return even.view(tuple(counts.shape))


def _pass_marks(name: str, args: Any, result: Any) -> None:
    """Pass what is known of the inputs on to the result of ops that keep or negate it."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if name in _ORDINARY:
        setattr(result, _MARK, _ORDINARY[name])
    elif name in ("eq", "ne") and (args[0] is args[1] or _is_infinite(args[1])):
        # What `isfinite` consists of: a number equals itself, and is not infinite.
        setattr(result, _MARK, (name == "eq") == (args[0] is args[1]))
    elif name in _SAME | _OPPOSITE | set(_BOTH) and tensors:
        known = [getattr(tensor, _MARK, None) for tensor in tensors]
        if None not in known:
            value = _BOTH[name](known) if name in _BOTH else known[0] != (name in _OPPOSITE)
            setattr(result, _MARK, value)
        elif result is tensors[0]:  # it was overwritten
            setattr(result, _MARK, None)
        choices = getattr(tensors[0], _CHOICES, None)
        if choices is not None and result.shape == tensors[0].shape:
            setattr(result, _CHOICES, choices)


def copy_mark(source: object, target: Any) -> None:
    """Make what is known of `target` what is known of `source`; nothing if that is None."""
    setattr(target, _MARK, getattr(source, _MARK, None))
    setattr(target, _CHOICES, getattr(source, _CHOICES, None))


def _report_write(written: Any) -> None:
    """Report a write to a tensor, or to the first of a list of tensors, if it is watched."""
    tensor = written[0] if isinstance(written, list | tuple) and written else written
    if isinstance(tensor, torch.Tensor):
        on_write = _watched.get(StorageWeakRef(tensor.untyped_storage()))
        if on_write is not None:
            on_write()


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and math.isinf(value)


def _is_host(device: Any) -> bool:
    return device is not None and device.type == "cpu" and not device.index


def _fill(shape: Any, value: Any) -> Any:
    if not shape:
        return value
    return [_fill(shape[1:], value) for _ in range(shape[0])]


def _is_large_factory(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an op makes a new floating-point tensor that is large, from no other tensor."""
    if any(isinstance(arg, torch.Tensor) for arg in args):
        return False
    size = next((arg for arg in args if isinstance(arg, list | tuple)), None)
    if size is None or not all(isinstance(item, int) for item in size):
        return False
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return dtype.is_floating_point and math.prod(size) * dtype.itemsize > _MAX_BYTES
