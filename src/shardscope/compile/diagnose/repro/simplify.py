"""Inputs that are nicer to read than those that the program had, if it still fails with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch

from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.repro.inputs import SEED_LINE, find_groups
from shardscope.compile.diagnose.repro.tensors import MOST_ELEMENTS, spell_tensor

__all__ = ["Recipe", "simplify"]


@final
@dataclass(frozen=True)
class Recipe:
    """An expression for an input, and what it makes."""

    text: str
    value: torch.Tensor


def simplify(
    fragment: Fragment, still_fails: Callable[[tuple[Any, ...]], bool]
) -> dict[int, Recipe]:
    """Recipes for some of the inputs, by position; with at most two calls of `still_fails`."""
    for offer in (_offer_ones, _offer_short):
        recipes = dict(_list_recipes(fragment, offer))
        if recipes and still_fails(_apply(fragment, recipes)):
            return recipes
    return {}


def _list_recipes(
    fragment: Fragment, offer: Callable[[torch.Tensor], str | None]
) -> Iterator[tuple[int, Recipe]]:
    """Where an offer is nicer than what there is; tensors that share memory stay as they are."""
    shared = {id(one) for group in find_groups(fragment.inputs).values() for one in group}
    scope = {"torch": torch}
    with torch.random.fork_rng(devices=[]):
        exec(SEED_LINE, scope)
        for position, one in enumerate(fragment.inputs):
            if not _is_open_to_offers(one) or id(one) in shared:
                continue
            text = offer(one)
            if text is not None and text != spell_tensor(one):
                yield position, Recipe(text, _restyle(eval(text, scope), one))


def _is_open_to_offers(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and value.is_contiguous()
        and value.numel() > 1
        and value.device.type != "meta"
    )


def _restyle(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor that is a parameter, or asks for a gradient, where another does."""
    if isinstance(like, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=like.requires_grad)
    return made.requires_grad_(like.requires_grad)


def _apply(fragment: Fragment, recipes: dict[int, Recipe]) -> tuple[Any, ...]:
    return tuple(
        recipes[position].value if position in recipes else one
        for position, one in enumerate(fragment.inputs)
    )


def _offer_ones(tensor: torch.Tensor) -> str | None:
    if not tensor.is_floating_point():
        return None
    return spell_tensor(torch.ones_like(tensor))


def _offer_short(tensor: torch.Tensor) -> str | None:
    """Numbers of two digits, or drawn at random where there are many."""
    if tensor.numel() > MOST_ELEMENTS:
        return _offer_drawn(tensor)
    if not tensor.is_floating_point():
        return None
    rounded = [float(f"{one:.2g}") for one in tensor.detach().double().flatten().tolist()]
    short = torch.tensor(rounded, dtype=torch.float64).view(tensor.shape)
    return spell_tensor(short.to(tensor.device, tensor.dtype))


def _offer_drawn(tensor: torch.Tensor) -> str | None:
    if spell_tensor(tensor) is not None:
        return None
    shape = tuple(tensor.shape)
    place = "" if tensor.device.type == "cpu" else f".to({str(tensor.device)!r})"
    if tensor.dtype is torch.float32:
        return f"torch.randn({shape}){place}"
    if tensor.is_floating_point():
        return f"torch.randn({shape}).to({tensor.dtype}){place}"
    if tensor.dtype is torch.bool:
        return f"(torch.rand({shape}) < 0.5){place}"
    if tensor.is_complex():
        return None
    low, high = int(tensor.min()), int(tensor.max())
    kind = "" if tensor.dtype is torch.int64 else f", dtype={tensor.dtype}"
    return f"torch.randint({low}, {high + 1}, {shape}{kind}){place}"
