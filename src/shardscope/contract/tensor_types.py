"""Limits on inferred types: which tensors they name, and whether these have the types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardscope.contract.limits import BreachKind, Figure, Limit, Violation
from shardscope.record import Recording, TensorTypes

_REMEDY = "If the change is intended, update the types; otherwise find what distributes it."
_MAX_NAMES = 5


def name_types(tensor: TensorTypes) -> str:
    """The types along all axes as a contract has them: `dp: S(0) / S(0), tp: S(2) / S(2)`."""
    return ", ".join(f"{axis.axis}: {axis.describe()}" for axis in tensor.axes)


def list_type_limits(recordings: Sequence[Recording]) -> Iterator[Limit]:
    """A limit for each tensor; layers that have the same types share one."""
    for recording in recordings:
        tensors = [tensor for types in recording.types for tensor in types.tensors]
        by_shape: dict[str, set[str]] = {}
        for tensor in tensors:
            by_shape.setdefault(_name(tensor, is_folded=True), set()).add(name_types(tensor))
        limits: dict[str, str] = {}
        for tensor in tensors:
            is_folded = len(by_shape[_name(tensor, is_folded=True)]) == 1
            limits.setdefault(_name(tensor, is_folded=is_folded), name_types(tensor))
        for name, types in limits.items():
            yield Limit(figure=Figure.TYPES, tensor=name, types=types)


def _name(tensor: TensorTypes, *, is_folded: bool) -> str:
    call = "" if tensor.call is None else f" of call {tensor.call + 1}"
    return f"{tensor.describe(is_folded=is_folded)} {tensor.role}{call}"


def find_tensors(limit: Limit, recordings: Sequence[Recording]) -> list[TensorTypes]:
    """The tensors that the limit names: exactly, or with `*` for the numbers of layers."""
    return [
        tensor
        for recording in recordings
        for types in recording.types
        for tensor in types.tensors
        if limit.tensor in (_name(tensor, is_folded=False), _name(tensor, is_folded=True))
    ]


def check_types(limit: Limit, recordings: Sequence[Recording]) -> Iterator[Violation]:
    """The violation of a limit on types, if any tensor that it names has others."""
    title = f"types of {limit.tensor}"
    if not any(recording.types for recording in recordings):
        yield Violation(
            limit=limit,
            kind=BreachKind.NOT_MEASURED,
            title=title,
            expected=limit.types,
            actual="not measured: no recording has it",
            remedy="Run `shardscope types TARGET -o types.json` and give types.json to the check "
            "as well, or remove the limit.",
        )
        return
    tensors = find_tensors(limit, recordings)
    if not tensors:
        yield Violation(
            limit=limit,
            kind=BreachKind.NOTHING_FITS,
            title=title,
            expected=limit.types,
            actual=f"no tensor matches {limit.tensor!r}",
            remedy="Correct the name; `shardscope show` lists all of them.",
        )
    wrong = [tensor for tensor in tensors if not _has_types(tensor, _parse(limit.types))]
    if wrong:
        yield Violation(
            limit=limit,
            kind=BreachKind.OTHER_TYPE,
            title=title,
            expected=limit.types,
            actual=name_types(wrong[0]),
            modules=tuple(dict.fromkeys(tensor.module for tensor in wrong))[:_MAX_NAMES],
            remedy=_REMEDY,
        )


def _parse(types: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in types.split(","))
    return {axis.strip(): kind.strip() for axis, _, kind in pairs}


def _has_types(tensor: TensorTypes, expected: Mapping[str, str]) -> bool:
    """Whether the tensor has the types along the named axes; gradients count where named."""
    axes = {axis.axis: axis for axis in tensor.axes}
    return all(
        name in axes and kind in (axes[name].describe(), axes[name].forward)
        for name, kind in expected.items()
    )
