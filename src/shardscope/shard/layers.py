"""Layers of one list or sequence, and what they hold together."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from shardscope.record import MemoryKind, MemoryProfile

__all__ = ["LayerGroup", "find_layers"]

_LAYER = re.compile(r"((?:.*?\.)?)(\d+)(?:\.|$)")


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
        found = _LAYER.match(use.module or "") if use.kind is kind else None
        if found is not None:
            groups[found[1]][int(found[2])] += use.num_bytes
    for prefix, layers in groups.items():
        if len(layers) > 1:
            name = f"{prefix}{min(layers)} … {prefix}{max(layers)}"
            largest = max(layers.values())
            yield LayerGroup(name, len(layers), sum(layers.values()), largest)
