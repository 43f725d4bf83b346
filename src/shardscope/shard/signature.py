"""One call of an op without its tensors' data: what calls of repeated layers have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardscope._torch.dispatch import op_schema

__all__ = ["Arguments", "Frozen", "Pattern", "Signature", "TensorSpec", "freeze_call"]

Frozen = Any  # TensorSpec, _Items or _Constant, nested


class TensorSpec(NamedTuple):
    """A tensor argument. `placements` is None for a plain tensor, and then so is `mesh`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...] | None = None
    mesh: DeviceMesh | None = None
    layout: torch.layout = torch.strided  # others have no strides


class _Items(NamedTuple):
    kind: type
    values: tuple[Frozen, ...]


class _Constant(NamedTuple):
    kind: type  # 1, 1.0 and True are equal and mean different things
    value: Any


@final
class _Object:
    """Something of which we know nothing but that it is itself: a generator, a script object."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


_VALUES = (
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class Signature(NamedTuple):
    """An op and its arguments; calls that differ in nothing else are one."""

    op: Any
    args: tuple[Frozen, ...]
    kwargs: tuple[tuple[str, Frozen], ...] = ()

    def arguments(self, make: Callable[[TensorSpec], Any]) -> Arguments:
        """Arguments to call the op with, in which `make` makes the tensors."""
        return (
            tuple([_thaw(value, make) for value in self.args]),
            {name: _thaw(value, make) for name, value in self.kwargs},
        )

    def tensors(self) -> Iterator[tuple[tuple[int, ...], TensorSpec]]:
        """Every tensor with its place: the number of its argument, and in a list its own.

        Keyword arguments are counted on, as the schema counts them.
        """
        yield from _tensors(self.args, ())
        numbers = {one.name: index for index, one in enumerate(op_schema(self.op).arguments)}
        for name, value in self.kwargs:
            for place, spec in _tensors((value,), ()):
                yield (numbers.get(name, len(self.args)), *place[1:]), spec

    def change(self, change: Callable[[tuple[int, ...], TensorSpec], TensorSpec]) -> Signature:
        """The same call with other tensors, in the order of `tensors()`."""
        changed = iter([change(place, spec) for place, spec in self.tensors()])
        return Signature(
            self.op,
            tuple([_exchange(value, changed) for value in self.args]),
            tuple([(name, _exchange(value, changed)) for name, value in self.kwargs]),
        )

    def change_sizes(self, change: Callable[[int], int]) -> Signature:
        """The same call with other sizes, in its tensors and its integers."""
        return Signature(
            self.op,
            tuple([_resize(value, change) for value in self.args]),
            tuple([(name, _resize(value, change)) for name, value in self.kwargs]),
        )

    def widen(self) -> Signature:
        """The same call in double precision, in its tensors and its dtypes."""
        return Signature(
            self.op,
            tuple([_widen(value) for value in self.args]),
            tuple([(name, _widen(value)) for name, value in self.kwargs]),
        )

    def constant(self, name: str) -> Any:
        """An argument that is no tensor, or its default; None if the op has none of that name."""
        for index, one in enumerate(op_schema(self.op).arguments):
            if one.name == name:
                given = self.args[index] if index < len(self.args) else dict(self.kwargs).get(name)
                return given.value if isinstance(given, _Constant) else one.default_value
        return None

    def pattern(self, num_ranks: int) -> Pattern:
        """What rules may look at: which sizes are one, small, equal, or shared evenly by ranks."""
        known: dict[int, Any] = {}

        def name(size: int) -> Any:
            is_small = -_SMALL < size < _SMALL
            return size if is_small else known.setdefault(size, (len(known), size % num_ranks == 0))

        values = [value for _, value in self.kwargs]
        kinds = tuple([_pattern(value, name) for value in (*self.args, *values)])
        return self.op, kinds, tuple([key for key, _ in self.kwargs])

    def plain(self) -> Signature:
        """The same call on plain tensors."""
        return self.change(lambda _, spec: spec._replace(placements=None, mesh=None))

    def name_argument(self, place: tuple[int, ...]) -> str:
        """`mat2`, or `tensors[1]` for a tensor of a list."""
        arguments = op_schema(self.op).arguments
        name = arguments[place[0]].name if place[0] < len(arguments) else f"#{place[0]}"
        return name + "".join(f"[{index}]" for index in place[1:])


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Pattern = tuple[Any, ...]
_SMALL = 8  # sizes below are told apart
_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def freeze_call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """The call as what stays the same when it is repeated."""
    return Signature(
        op,
        tuple([_freeze(value) for value in args]),
        tuple([(name, _freeze(kwargs[name])) for name in sorted(kwargs)]) if kwargs else (),
    )


def _freeze(value: Any) -> Frozen:
    if isinstance(value, torch.Tensor):
        stride = tuple(value.stride()) if value.layout is torch.strided else ()
        spec = TensorSpec(tuple(value.shape), stride, value.dtype, layout=value.layout)
        if isinstance(value, DTensor):
            return spec._replace(placements=tuple(value.placements), mesh=value.device_mesh)
        return spec
    if isinstance(value, list | tuple):
        return _Items(type(value), tuple([_freeze(item) for item in value]))
    return _Constant(type(value), value if isinstance(value, _VALUES) else _Object(value))


def _thaw(value: Frozen, make: Callable[[TensorSpec], Any]) -> Any:
    if isinstance(value, TensorSpec):
        return make(value)
    if isinstance(value, _Items):
        return [_thaw(item, make) for item in value.values]
    return value.value.held if isinstance(value.value, _Object) else value.value


def _tensors(
    values: tuple[Frozen, ...], place: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], TensorSpec]]:
    for index, value in enumerate(values):
        if isinstance(value, TensorSpec):
            yield (*place, index), value
        elif isinstance(value, _Items):
            yield from _tensors(value.values, (*place, index))


def _exchange(value: Frozen, changed: Iterator[TensorSpec]) -> Frozen:
    if isinstance(value, TensorSpec):
        return next(changed)
    if isinstance(value, _Items):
        return _Items(value.kind, tuple([_exchange(item, changed) for item in value.values]))
    return value


def _resize(value: Frozen, change: Callable[[int], int]) -> Frozen:
    if isinstance(value, TensorSpec):
        shape = tuple([change(size) for size in value.shape])
        return value._replace(shape=shape, stride=_dense_stride(shape, value.stride))
    if isinstance(value, _Items):
        return _Items(value.kind, tuple([_resize(item, change) for item in value.values]))
    return value._replace(value=change(value.value)) if value.kind is int else value


def _widen(value: Frozen) -> Frozen:
    if isinstance(value, TensorSpec):
        return value._replace(dtype=_WIDER.get(value.dtype, value.dtype))
    if isinstance(value, _Items):
        return _Items(value.kind, tuple([_widen(item) for item in value.values]))
    is_dtype = value.kind is torch.dtype
    return value._replace(value=_WIDER.get(value.value, value.value)) if is_dtype else value


def _dense_stride(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without holes, in the order of `like`; expanded dims stay expanded."""
    strides, step = list(like), 1
    for dim in sorted(range(len(like)), key=lambda dim: (like[dim], -dim)):
        if like[dim]:
            strides[dim] = step
            step *= max(1, shape[dim])
    return tuple(strides)


def _pattern(value: Frozen, name: Callable[[int], Any]) -> Any:
    if isinstance(value, TensorSpec):
        order = sorted(range(len(value.stride)), key=lambda dim: (value.stride[dim], -dim))
        zeros = tuple([step == 0 for step in value.stride])
        shape = tuple([name(size) for size in value.shape])
        return shape, tuple(order), zeros, value.dtype, value.placements
    if isinstance(value, _Items):
        return tuple([_pattern(item, name) for item in value.values])
    return (int, name(value.value)) if value.kind is int else value
