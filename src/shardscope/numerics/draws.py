"""Whether a run draws numbers at random."""

from __future__ import annotations

from typing import Any, final

from shardscope._torch.dispatch import TorchDispatchMode, is_overload
from shardscope.numerics.widen import is_random

__all__ = ["Watching"]


@final
class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether anything is drawn at random."""

    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.has_drawn |= is_overload(func) and is_random(func, args, kwargs)
        return func(*args, **kwargs)
