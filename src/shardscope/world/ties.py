"""Tensors that models hold in several places, such as an embedding tied to its output layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

__all__ = ["Materialized", "kept_ties"]

Materialized = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By the identity of a tensor on meta: that tensor, and what has taken its place."""


@contextmanager
def kept_ties(model: nn.Module, materialized: Materialized) -> Iterator[None]:
    """Make one again what was one, after `to_empty()` gave each place a tensor of its own.

    `materialized` remembers, for what the next model shares with this one.
    """
    places = [(*place, getattr(*place)) for place in _places(model)]
    yield
    for module, name, before in places:
        now = getattr(module, name)
        if now is not before:
            _, first = materialized.setdefault(id(before), (before, now))
            if first is not now:
                setattr(module, name, first)


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        for name, _ in chain(
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            yield module, name
