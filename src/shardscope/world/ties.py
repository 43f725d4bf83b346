"""Tensors that a model holds in several places, such as an embedding tied to its output layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from torch import nn

__all__ = ["kept_ties"]


@contextmanager
def kept_ties(model: nn.Module) -> Iterator[None]:
    """Make one again what was one, after `to_empty()` gave each place a tensor of its own."""
    places = _find_places(model)
    yield
    for (first, name), *others in places:
        for module, other_name in others:
            setattr(module, other_name, getattr(first, name))


def _find_places(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, tensor in chain(
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            places[id(tensor)].append((module, name))
    return [found for found in places.values() if len(found) > 1]
