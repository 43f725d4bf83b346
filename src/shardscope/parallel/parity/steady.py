"""A run in which nothing is drawn at random: a draw gives what it gives on average.

So dropout lets everything pass, and two versions that differ only in what they drew agree.
"""

from __future__ import annotations

from typing import Any, final

import torch

from shardscope._torch.dispatch import TorchDispatchMode, is_overload, op_packet
from shardscope.numerics.widen import is_random, map_arguments, name_arguments

__all__ = ["Steady"]


@final
class Steady(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers ops that draw."""

    supports_higher_order_operators = True  # torch would refuse to run them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_overload(func) or not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        given = name_arguments(func, args, kwargs)
        name = op_packet(func).__name__
        if name == "native_dropout":
            return given["input"].clone(), torch.ones_like(given["input"], dtype=torch.bool)
        if name == "bernoulli" and given.get("p") is None:
            return given["self"].clone()
        if name == "randperm":
            return torch.arange(given["n"], dtype=given.get("dtype"), device=given.get("device"))
        if name in _MEANS:
            drawn = func(*args, **kwargs)  # for its shape, or to write into
            return map_arguments(drawn, lambda one: one.copy_(_mean(name, given, one)))
        return func(*args, **kwargs)


# Of what is drawn with these arguments, the mean.
_MEANS = {
    "bernoulli": lambda given: given["p"],
    "bernoulli_": lambda given: given["p"],
    "exponential_": lambda given: 1 / given["lambd"],
    "normal": lambda given: given["mean"],
    "normal_": lambda given: given["mean"],
    "normal_functional": lambda given: given["mean"],
    "rand": lambda _: 0.5,
    "rand_like": lambda _: 0.5,
    "randint": lambda given: given.get("low") or 0,
    "randint_like": lambda given: given.get("low") or 0,
    "randn": lambda _: 0.0,
    "randn_like": lambda _: 0.0,
    "uniform": lambda given: (given["from"] + given["to"]) / 2,
    "uniform_": lambda given: (given["from"] + given["to"]) / 2,
}


def _mean(name: str, given: dict[str, Any], drawn: torch.Tensor) -> torch.Tensor:
    mean = _MEANS[name](given)  # type: ignore[no-untyped-call]
    return mean if isinstance(mean, torch.Tensor) else torch.full_like(drawn, mean)
