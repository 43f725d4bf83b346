"""Layers of one list or sequence, and what they hold together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shardscope.record import MemoryKind, MemoryProfile

__all__ = ["LayerGroup", "find_layers"]


class LayerGroup(NamedTuple):
    """Adjacent layers, such as `layers.0 … layers.31`."""

    name: str
    num_layers: int
    num_bytes: int
    largest_bytes: int
    freed_bytes: int  # if all but one layer kept nothing but what they hand on


def find_layers(
    profile: MemoryProfile, kind: MemoryKind, output_bytes: Mapping[str, int]
) -> Iterator[LayerGroup]:
    """What each list of layers, the outermost ones only, holds of a kind at the peak.

    `output_bytes` are what modules return, by name.
    """
    groups: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    for use in profile.at_peak:
        prefix, number = _find_layer(use.module or "")
        if use.kind is kind and number is not None:
            groups[prefix][number] += use.num_bytes
    for prefix, layers in groups.items():
        if len(layers) > 1:
            name = f"{prefix}{min(layers)} … {prefix}{max(layers)}"
            largest = max(layers.values())
            inner = [
                max(0, held - output_bytes.get(f"{prefix}{number}", 0))
                for number, held in layers.items()
            ]
            freed = sum(inner) - max(inner)
            yield LayerGroup(name, len(layers), sum(layers.values()), largest, freed)


def _find_layer(name: str) -> tuple[str, int | None]:
    """`layers.` and 3 of `layers.3.experts.0.up`."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isascii() and part.isdecimal():
            return "".join(f"{one}." for one in parts[:index]), int(part)
    return name, None
