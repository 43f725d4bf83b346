"""Simpler inputs with which a program still fails, and a similar program that passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, final

import torch
from torch import fx

from shardscope.compile.diagnose.accuracy import CheckResult
from shardscope.compile.diagnose.repro.print_values import (
    MAX_ELEMENTS,
    SEED_LINE,
    find_groups,
    format_tensor,
)
from shardscope.compile.diagnose.subgraph import Compiler, Subgraph
from shardscope.compile.diagnose.worker.harness import (
    as_ones,
    in_double,
    make_contiguous,
    without_gradient,
)

AccuracyCheck = Callable[[Subgraph, Compiler], CheckResult]


class Change(StrEnum):
    """How a variant differs from the failing program."""

    DOUBLE = "in double precision"
    NO_GRADIENTS = "without gradients"
    CONTIGUOUS = "with contiguous inputs"
    ONES = "with ones as inputs"
    PROGRAM = "with other ops"
    EAGER = 'with backend="eager"'


@final
@dataclass(frozen=True)
class Variant:
    """A program similar to the failing one, and how it differs."""

    subgraph: Subgraph
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
    subgraph: Subgraph,
    *,
    compiler: Compiler,
    check_accuracy: AccuracyCheck,
    smaller: Subgraph | None = None,
    missing: str = "",
    max_calls: int = 3,
) -> Variant:
    """The nearest program that passes, with at most `max_calls` calls of `check_accuracy`.

    `smaller` is a subset of the program that passed in the search, without the ops named by
    `missing`. The last resort is the backend "eager", with which nothing fails.
    """
    for change in _list_applicable(subgraph)[:max_calls]:
        variant = _make_variant(subgraph, compiler, change)
        if _passes(variant, check_accuracy):
            return variant
    if smaller is not None:
        difference = f"without {missing}" if missing else str(Change.PROGRAM)
        return Variant(smaller, compiler, Change.PROGRAM, difference)
    return Variant(subgraph, Compiler("eager"), Change.EAGER, str(Change.EAGER))


def _passes(variant: Variant, check_accuracy: AccuracyCheck) -> bool:
    try:
        return not check_accuracy(variant.subgraph, variant.compiler).is_bad
    except Exception:  # noqa: BLE001 - not every program runs with every dtype
        return False


def _make_variant(subgraph: Subgraph, compiler: Compiler, change: Change) -> Variant:
    inputs = tuple(_CHANGES[change](value) for value in subgraph.inputs)
    with_gradients = subgraph.with_gradients and change is not Change.NO_GRADIENTS
    changed = replace(subgraph, inputs=inputs, with_gradients=with_gradients)
    return Variant(changed, compiler, change, str(change))


def _list_applicable(subgraph: Subgraph) -> list[Change]:
    """Changes that have an effect on this subgraph, the smallest first."""
    tensors = [value for value in subgraph.inputs if isinstance(value, torch.Tensor)]
    narrow = [
        tensor for tensor in tensors if tensor.is_floating_point() and tensor.dtype != torch.float64
    ]
    tests = {
        Change.DOUBLE: bool(narrow),
        Change.NO_GRADIENTS: subgraph.with_gradients
        and any(tensor.requires_grad for tensor in tensors),
        Change.CONTIGUOUS: not all(tensor.is_contiguous() for tensor in tensors),
        Change.ONES: any(tensor.is_floating_point() for tensor in tensors),
    }
    return [change for change, applies in tests.items() if applies]


@final
@dataclass(frozen=True)
class InputExpression:
    """An expression for an input, and its value."""

    text: str
    value: torch.Tensor


def simplify(
    subgraph: Subgraph, still_fails: Callable[[tuple[Any, ...]], bool]
) -> dict[int, InputExpression]:
    """Recipes for some of the inputs, by position; with at most two calls of `still_fails`."""
    for offer in (_offer_ones, _offer_short):
        recipes = dict(_list_recipes(subgraph, offer))
        if recipes and still_fails(_apply(subgraph, recipes)):
            return recipes
    return {}


def _list_recipes(
    subgraph: Subgraph, offer: Callable[[torch.Tensor], str | None]
) -> Iterator[tuple[int, InputExpression]]:
    """Recipes that are simpler than the current inputs; tensors that share memory are left as
    is.
    """
    shared = {id(tensor) for group in find_groups(subgraph.inputs).values() for tensor in group}
    scope = {"torch": torch}
    with torch.random.fork_rng(devices=[]):
        exec(SEED_LINE, scope)
        for position, value in enumerate(subgraph.inputs):
            if not _can_be_simplified(value) or id(value) in shared:
                continue
            text = offer(value)
            if text is not None and text != format_tensor(value):
                yield position, InputExpression(text, _restyle(eval(text, scope), value))


def _can_be_simplified(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and value.is_contiguous()
        and value.numel() > 1
        and value.device.type != "meta"
    )


def _restyle(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor as a parameter, or with `requires_grad`, as in `like`."""
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=like.requires_grad)
    return tensor.requires_grad_(like.requires_grad)


def _apply(subgraph: Subgraph, recipes: dict[int, InputExpression]) -> tuple[Any, ...]:
    return tuple(
        recipes[position].value if position in recipes else value
        for position, value in enumerate(subgraph.inputs)
    )


def _offer_ones(tensor: torch.Tensor) -> str | None:
    if not tensor.is_floating_point():
        return None
    return format_tensor(torch.ones_like(tensor))


def _offer_short(tensor: torch.Tensor) -> str | None:
    """Numbers of two digits, or random ones if there are many."""
    if tensor.numel() > MAX_ELEMENTS:
        return _offer_random(tensor)
    if not tensor.is_floating_point():
        return None
    rounded = [float(f"{number:.2g}") for number in tensor.detach().double().flatten().tolist()]
    short = torch.tensor(rounded, dtype=torch.float64).view(tensor.shape)
    return format_tensor(short.to(tensor.device, tensor.dtype))


def _offer_random(tensor: torch.Tensor) -> str | None:
    if format_tensor(tensor) is not None:
        return None
    shape = tuple(tensor.shape)
    device = "" if tensor.device.type == "cpu" else f".to({str(tensor.device)!r})"
    if tensor.dtype is torch.float32:
        return f"torch.randn({shape}){device}"
    if tensor.is_floating_point():
        return f"torch.randn({shape}).to({tensor.dtype}){device}"
    if tensor.dtype is torch.bool:
        return f"(torch.rand({shape}) < 0.5){device}"
    if tensor.is_complex():
        return None
    low, high = int(tensor.min()), int(tensor.max())
    kind = "" if tensor.dtype is torch.int64 else f", dtype={tensor.dtype}"
    return f"torch.randint({low}, {high + 1}, {shape}{kind}){device}"


def uses_rng(subgraph: Subgraph) -> bool:
    """Whether a run on copies of its inputs changes the state of a random generator."""
    is_cuda_on = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if is_cuda_on else []):
        before = _read_states(is_cuda_on)
        try:
            with torch.no_grad():
                fx.Interpreter(subgraph.graph).run(*map(_copy, subgraph.inputs))
        except Exception:  # noqa: BLE001 - then the script will show it
            return False
        return not all(map(torch.equal, before, _read_states(is_cuda_on)))


def _read_states(is_cuda_on: bool) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if is_cuda_on else [])]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
