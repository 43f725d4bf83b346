"""What a rank's program is called with: in the order it takes them, and as it was made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import sympy
from torch import Tensor, dtype
from torch.export import ExportedProgram

from shardscope._torch.programs import expression_of, flatten, flatten_as, range_of, unflatten
from shardscope.errors import ParallelError
from shardscope.parallel.flow import Flow, Value
from shardscope.parallel.layouts import Seat
from shardscope.parallel.placements import Size
from shardscope.parallel.symbols import OpenSizes, symbols_in

__all__ = ["Inputs"]


@final
@dataclass(frozen=True)
class _Open:
    """A size that is left open: so many times that of a symbol."""

    symbol: str
    factor: int
    lowest: int
    highest: int | None


@final
@dataclass(frozen=True)
class _Wanted:
    """One input: a tensor by its shape and dtype, or a value that the program was made with."""

    name: str
    shape: tuple[int | None, ...] = ()  # None for sizes that are open
    opened: tuple[tuple[int, _Open], ...] = ()
    dtype: dtype | None = None
    value: Any = None
    is_any: bool = False


@final
class Inputs:
    """Takes the arguments of a call apart, and refuses what the program was not made for."""

    def __init__(self, source: ExportedProgram, flow: Flow, seat: Seat) -> None:
        values = [(value, role.name) for value, role in flow.inputs if role.kind == "input"]
        self._wanted = [_want(value, name, seat, flow.sizes) for value, name in values]
        signature = source.module_call_graph[0].signature
        assert signature is not None, "export notes how a program is called"
        self._tree = signature.in_spec
        args, kwargs = unflatten(list(range(len(values))), self._tree)
        self._is_plain = not kwargs and args == tuple(range(len(values)))
        self._is_expected = _write_check(self._wanted if self._is_plain else [])
        names = list(signature.forward_arg_names or ())
        self._positional = (names + [f"argument {i}" for i in range(len(args))])[: len(args)]
        self._keywords = list(kwargs)

    def __deepcopy__(self, memo: Any) -> Inputs:
        """Nothing of it changes; modules are copied with it."""
        return self

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The tensors (and other values) that the program takes."""
        # Most calls end here.
        if not kwargs and len(args) == len(self._wanted) and self._is_expected(*args):
            return args
        is_plain = self._is_plain and not kwargs and len(args) == len(self._wanted)
        leaves = args if is_plain else self._flatten(args, kwargs)
        for one, wanted in zip(leaves, self._wanted, strict=True):
            if wanted.dtype is None:
                _check_value(one, wanted)
            elif not isinstance(one, Tensor) or one.dtype is not wanted.dtype:
                raise _another_kind(one, wanted)
            elif wanted.opened or one.shape != wanted.shape:
                _check_shape(one, wanted)
        if len(self._wanted) > 1:
            self._check_symbols(leaves)
        return leaves

    def _flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        given = dict(kwargs)
        positional = list(args)
        for name in self._positional[len(args) :]:
            if name in given:
                positional.append(given.pop(name))
        if len(positional) != len(self._positional) or set(given) != set(self._keywords):
            raise self._another_call(args, kwargs)
        nest = (tuple(positional), {name: given[name] for name in self._keywords})
        given_leaves, tree = flatten(nest)
        leaves = given_leaves if tree == self._tree else flatten_as(nest, self._tree)
        if leaves is None:
            raise ParallelError(
                f"the inputs are nested differently than in the export ({tree}, not "
                f"{self._tree}). Call it as the model was exported."
            )
        return leaves

    def _check_symbols(self, leaves: Sequence[Any]) -> None:
        """A size that several inputs share is one size."""
        found: dict[str, tuple[int, str]] = {}
        for one, wanted in zip(leaves, self._wanted, strict=True):
            for dim, size in wanted.opened:
                length = one.shape[dim] // size.factor
                before, name = found.setdefault(size.symbol, (length, wanted.name))
                if before != length:
                    raise ParallelError(
                        f"{wanted.name} has {one.shape[dim]} along dim {dim}, which does not "
                        f"match the sizes of {name}: the program was exported with one size for "
                        "both. Give matching inputs."
                    )

    def _another_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ParallelError:
        wanted = ", ".join([*self._positional, *(f"{name}=" for name in self._keywords)])
        given = ", ".join(["…"] * len(args) + [f"{name}=" for name in kwargs])
        return ParallelError(
            f"the program takes ({wanted}) and was given ({given}). Call it as the model was "
            "exported; with a loss, its inputs come first and then the targets."
        )


def _write_check(wanted: Sequence[_Wanted]) -> Callable[..., bool]:
    """Whether arguments are the very tensors that are wanted, in one expression.

    It is part of each call, and a loop would take as long as a small op. Where sizes are open or
    values are no tensors it says no, and they are looked at one by one.
    """
    if not wanted or any(one.opened or one.dtype is None for one in wanted):
        return lambda *_: False
    names = [f"x{i}" for i in range(len(wanted))]
    terms = [
        f"type({x}) is Tensor and {x}.shape == {x}_shape and {x}.dtype is {x}_dtype" for x in names
    ]
    scope: dict[str, Any] = {"Tensor": Tensor}
    for x, one in zip(names, wanted, strict=True):
        scope |= {f"{x}_shape": one.shape, f"{x}_dtype": one.dtype}
    check: Callable[..., bool] = eval(f"lambda {', '.join(names)}: {' and '.join(terms)}", scope)
    return check


def _want(value: Value, name: str, seat: Seat, sizes: OpenSizes) -> _Wanted:
    if not value.is_tensor:
        is_any = isinstance(value.scalar, sympy.Expr) and bool(symbols_in(value.scalar))
        return _Wanted(name, value=value.example, is_any=is_any)
    shape = value.layout.local_shape(seat)
    return _Wanted(
        name,
        shape=tuple(None if symbols_in(size) else int(size) for size in shape),
        opened=tuple(
            (dim, _open(size, sizes)) for dim, size in enumerate(shape) if symbols_in(size)
        ),
        dtype=value.dtype,
    )


def _open(size: Size, sizes: OpenSizes) -> _Open:
    """The size as a multiple of its symbol; a symbol of its own where it is something else."""
    symbols = list(symbols_in(size))
    factor = sympy.cancel(size / symbols[0]) if len(symbols) == 1 else None
    if factor is None or not factor.is_Integer or symbols[0] not in sizes.known:
        return _Open(symbol=str(size), factor=1, lowest=0, highest=None)
    within = sizes.ranges.get(symbols[0]) or range_of(sizes.known[symbols[0]])
    highest = int(within.upper) if expression_of(within.upper).is_Integer else None
    return _Open(str(symbols[0]), int(factor), int(within.lower), highest)


def _check_shape(tensor: Tensor, wanted: _Wanted) -> None:
    shape = tensor.shape
    is_right = len(shape) == len(wanted.shape) and all(
        want is None or want == size for want, size in zip(wanted.shape, shape, strict=True)
    )
    if not is_right or not all(_fits(shape[dim], size) for dim, size in wanted.opened):
        says = dict(wanted.opened)
        sizes = ", ".join(
            str(one) if one is not None else _describe(says[dim])
            for dim, one in enumerate(wanted.shape)
        )
        raise ParallelError(
            f"{wanted.name} is {list(shape)} and the program of this rank takes [{sizes}]. Give "
            "this rank's shard, or export with dynamic_shapes where sizes may differ."
        )


def _fits(size: int, wanted: _Open) -> bool:
    length, rest = divmod(size, wanted.factor)
    is_enough = length >= wanted.lowest
    return not rest and is_enough and (wanted.highest is None or length <= wanted.highest)


def _describe(size: _Open) -> str:
    upper = "…" if size.highest is None else size.highest * size.factor
    each = f", multiples of {size.factor}" if size.factor > 1 else ""
    return f"{size.lowest * size.factor}–{upper}{each}"


def _check_value(value: Any, wanted: _Wanted) -> None:
    if wanted.is_any:
        return
    if type(value) is not type(wanted.value) or value != wanted.value:
        raise ParallelError(
            f"{wanted.name} is {value!r}, and the program was exported with {wanted.value!r}, "
            "which is a constant in it. Export it again with the new value."
        )


def _another_kind(value: Any, wanted: _Wanted) -> ParallelError:
    kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
    return ParallelError(
        f"{wanted.name} is {kind}, and the program was exported with {wanted.dtype}. Convert "
        "it, or export the program again."
    )
