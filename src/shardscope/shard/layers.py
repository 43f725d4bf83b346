"""Layers of one list or sequence, and what they hold together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from shardscope.record import MemoryKind, MemoryProfile

__all__ = ["LayerGroup", "find_layers"]


class LayerGroup(NamedTuple):
    """Adjacent layers, such as `layers.0 … layers.31`."""

    name: str
    num_layers: int
    num_bytes: int
    largest_bytes: int


def find_layers(profile: MemoryProfile, kind: MemoryKind) -> Iterator[LayerGroup]:
    """What each list of layers, the outermost ones only, holds of a kind at the peak."""
    groups: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    for use in profile.at_peak:
        prefix, number = _find_layer(use.module or "")
        if use.kind is kind and number is not None:
            groups[prefix][number] += use.num_bytes
    for prefix, layers in groups.items():
        if len(layers) > 1:
            name = f"{prefix}{min(layers)} … {prefix}{max(layers)}"
            largest = max(layers.values())
            yield LayerGroup(name, len(layers), sum(layers.values()), largest)


def _find_layer(name: str) -> tuple[str, int | None]:
    """`layers.` and 3 of `layers.3.experts.0.up`."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isascii() and part.isdecimal():
            return "".join(f"{one}." for one in parts[:index]), int(part)
    return name, None
