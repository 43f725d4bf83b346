"""A program near to one that fails, which does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, final

import torch

from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.outcome import Outcome
from shardscope.compile.diagnose.repro.harness import (
    as_ones,
    in_double,
    make_contiguous,
    without_gradient,
)

__all__ = ["Change", "Variant", "find_passing"]

Judge = Callable[[Fragment, Compiler], Outcome]


class Change(StrEnum):
    """What a variant has that the failing program has not."""

    DOUBLE = "in double precision"
    NO_GRADIENTS = "without gradients"
    CONTIGUOUS = "with contiguous inputs"
    ONES = "with ones as inputs"
    PROGRAM = "with other ops"
    EAGER = 'with backend="eager"'


@final
@dataclass(frozen=True)
class Variant:
    """What to run instead, and how it differs."""

    fragment: Fragment
    compiler: Compiler
    change: Change
    difference: str  # as a phrase: in double precision, without torch.relu, …


_CHANGES: dict[Change, Callable[[Any], Any]] = {
    Change.DOUBLE: in_double,
    Change.NO_GRADIENTS: without_gradient,
    Change.CONTIGUOUS: make_contiguous,
    Change.ONES: as_ones,
}


def find_passing(
    fragment: Fragment,
    *,
    compiler: Compiler,
    judge: Judge,
    smaller: Fragment | None = None,
    missing: str = "",
    most_calls: int = 3,
) -> Variant:
    """The nearest program that does not fail, with at most so many calls of `judge`.

    `smaller` is a piece of the program that the search saw pass, without the ops named by
    `missing`. Without any compiler nothing fails: that is the last resort.
    """
    for change in _list_applicable(fragment)[:most_calls]:
        variant = _make_variant(fragment, compiler, change)
        if _passes(variant, judge):
            return variant
    if smaller is not None:
        difference = f"without {missing}" if missing else str(Change.PROGRAM)
        return Variant(smaller, compiler, Change.PROGRAM, difference)
    return Variant(fragment, Compiler("eager"), Change.EAGER, str(Change.EAGER))


def _passes(variant: Variant, judge: Judge) -> bool:
    try:
        return not judge(variant.fragment, variant.compiler).is_bad
    except Exception:  # noqa: BLE001 - not every program runs with every dtype
        return False


def _make_variant(fragment: Fragment, compiler: Compiler, change: Change) -> Variant:
    inputs = tuple(_CHANGES[change](one) for one in fragment.inputs)
    with_gradients = fragment.with_gradients and change is not Change.NO_GRADIENTS
    changed = replace(fragment, inputs=inputs, with_gradients=with_gradients)
    return Variant(changed, compiler, change, str(change))


def _list_applicable(fragment: Fragment) -> list[Change]:
    """Changes that would change something, the nearest first."""
    tensors = [one for one in fragment.inputs if isinstance(one, torch.Tensor)]
    narrow = [one for one in tensors if one.is_floating_point() and one.dtype != torch.float64]
    tests = {
        Change.DOUBLE: bool(narrow),
        Change.NO_GRADIENTS: fragment.with_gradients and any(one.requires_grad for one in tensors),
        Change.CONTIGUOUS: not all(one.is_contiguous() for one in tensors),
        Change.ONES: any(one.is_floating_point() for one in tensors),
    }
    return [change for change, applies in tests.items() if applies]
