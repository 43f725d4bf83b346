"""Which modules a finding is about: findings name modules, parameters, patterns, or neither."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import final

from shardscope.report.page.index import NOWHERE, Index

__all__ = ["Subjects"]

_LAYER = re.compile(r"(?<![^.])(\d+(-\d+)?|\*)(?![^.])")
_MANY = re.compile(r"(?<![^.])(\d+-\d+|\*)(?![^.])")
_ROOTS = {"", "(the root)", "the model", "the model itself", "the root", "the root module"}


@final
class Subjects:
    """Finds modules by what findings call them."""

    def __init__(self, paths: Iterable[str], index: Index, *, model: str = "") -> None:
        """`model` is the root's type, by which some findings call it."""
        self._index = index
        self._roots = _ROOTS | {model}
        self._layers: defaultdict[str, list[int]] = defaultdict(list)
        for position, path in enumerate(paths):
            if path and index.named(path) == position:
                self._layers[_LAYER.sub("*", path)].append(position)
        self._found: dict[str, tuple[int, ...]] = {}

    def find(self, subject: str) -> tuple[int, ...]:
        """Those that are named, or whose parameters are; of a pattern (`layers.*.wq`), all."""
        if subject not in self._found:
            self._found[subject] = self._look_for(subject)
        return self._found[subject]

    def _look_for(self, subject: str) -> tuple[int, ...]:
        if subject in self._roots:
            root = self._index.module("")
            return () if root == NOWHERE else (root,)
        # `layers.*.wq (×32)`, `embed.weight, output.weight`
        name = subject if self._index.has(subject) else subject.split(" ")[0].rstrip(",")
        if _MANY.search(name):
            return self._find_layers(name)
        position = self._index.named(name) if name else NOWHERE
        return () if position == NOWHERE else (position,)

    def _find_layers(self, name: str) -> tuple[int, ...]:
        pattern = _LAYER.sub("*", name)
        while pattern and pattern not in self._layers:
            pattern = pattern.rpartition(".")[0]
        return tuple(self._layers.get(pattern, ()))
