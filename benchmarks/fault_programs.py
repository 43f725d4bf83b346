"""Programs of so many ops, one or two of which are like no other: faults are put there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["chain"]


def chain(num_ops: int, places: dict[str, int], size: int = 16) -> tuple[Callable[..., Any], Any]:
    """A row of ops, of which `places` says which stands where, by name. The others hide nothing."""
    by_place = {place: name for name, place in places.items()}

    def function(x: torch.Tensor) -> torch.Tensor:
        for place in range(num_ops):
            name = by_place.get(place)
            if name is not None:
                x = getattr(torch, name)(x)
            elif place % 2:
                x = torch.neg(x)
            else:
                x = x + 0.5
        return x

    return function, (torch.linspace(-1, 1, size, requires_grad=True),)
