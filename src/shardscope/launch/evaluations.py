"""Evaluations: repeated calls of a model without gradients are not run again.

A program may evaluate its model on hundreds of batches before its first step, or generate text
after it. Without data, all calls with inputs of the same shapes are the same call. After two of
them, the program gets new results of the same shapes at once. The records do not change: nothing is
recorded before training, and after that only calls that issue no collectives are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.hooks import intercept
from shardscope._torch.fake import is_fake
from shardscope._torch.module_calls import replaced_outermost_calls
from shardscope._torch.tree import pytree_flatten
from shardscope.record import Gap

_NUM_CALLS_RUN = 2  # the first may differ: it creates what later calls use
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


@final
class RepeatedEvaluations:
    """Runs calls of models without gradients, or repeats the results of earlier ones."""

    def __init__(self) -> None:
        self.is_training = False  # whether training has begun, so that calls are recorded
        self._results: dict[Any, Callable[[], Any] | None] = {}
        self._with_collectives: set[Any] = set()
        self._num_collectives = 0
        self._num_calls: Counter[Any] = Counter()
        self._num_repeated: Counter[str] = Counter()

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Repeat results until the context ends."""
        with (
            replaced_outermost_calls(self.call),
            intercept(self, report_missing=lambda sentence: None),
        ):
            yield

    def before(self, event: CollectiveEvent) -> None:
        """Called before a collective."""
        self._num_collectives += 1

    def call(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """The result of an outermost call of a module, which is run by `call(*args, **kwargs)`."""
        key = None if torch.is_grad_enabled() else _describe_call(module, args, kwargs)
        if key is None:
            return call(*args, **kwargs)
        self._num_calls[key] += 1
        if self._num_calls[key] <= _NUM_CALLS_RUN:
            before = self._num_collectives
            result = call(*args, **kwargs)
            self._results[key] = _make_copier(result)
            if self._num_collectives > before:
                self._with_collectives.add(key)
            return result
        copy = self._results[key]
        if copy is None or (self.is_training and key in self._with_collectives):
            return call(*args, **kwargs)
        self._num_repeated[type(module).__name__] += 1
        return copy()

    def find_gaps(self, rank: int) -> Iterator[Gap]:
        """How many calls were not run."""
        for name, count in self._num_repeated.items():
            fact = (
                f"{count:,} calls of {name} without gradients, with inputs of shapes that it had "
                "been called with, were not run: the program got results of the same shapes"
            )
            yield Gap(place="evaluation", rank=rank, fact=fact)


def _describe_call(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the result of a call depends on without data; None if that is not known."""
    if next(module.parameters(), None) is None:  # a metric, or another module that collects
        return None
    leaves, structure = pytree_flatten((args, kwargs))
    described = [_describe_leaf(leaf) for leaf in leaves]
    if None in described or not any(is_fake(leaf) for leaf in leaves):
        return None
    is_cast = torch.is_autocast_enabled("cuda")
    state = (module.training, is_cast, torch.is_inference_mode_enabled())
    return (id(module), *state, structure, *described)


def _describe_leaf(leaf: Any) -> Any:
    if type(leaf) in _PLAIN:
        return type(leaf), leaf
    if not isinstance(leaf, torch.Tensor):
        return None
    if is_fake(leaf) and getattr(leaf, "constant", None) is not None:
        return None  # the program may decide by its values
    if not is_fake(leaf) and (type(leaf) is not torch.Tensor or leaf.numel() == 1):
        return None
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device


def _make_copier(result: Any) -> Callable[[], Any] | None:
    """A function that makes results like this one; None if they cannot be made from shapes."""
    leaves, structure = pytree_flatten(result)
    described = []
    for leaf in leaves:
        if type(leaf) in _PLAIN:
            described.append(leaf)
        elif isinstance(leaf, torch.Tensor) and is_fake(leaf) and leaf.constant is None:  # type: ignore[attr-defined]
            described.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device))
        else:
            return None
    return lambda: structure.unflatten([_make_leaf(leaf) for leaf in described])


def _make_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, tuple):
        return leaf
    shape, stride, dtype, device = leaf
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)
