"""The module tree as it is walked through: a place at a time, worked out when it is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from msgspec import Struct

from shardscope.report.fold import NO_MODULE, ModuleNode, find_runs, number_contents
from shardscope.report.numbered import fold_path

__all__ = ["Chain", "Outline", "Place"]


class Place(Struct, frozen=True, eq=False):
    """A module, or several that are alike (`paths`), each with the figures of `node`."""

    name: str  # `layers.{0…31}.attention`; the root's is empty
    label: str  # its last part: `attention`, `0…31`
    node: ModuleNode
    paths: tuple[str, ...]
    repeat: int = 1  # how many share the label, in one place above
    is_nowhere: bool = False  # it stands for what belongs to no module


# A place, after all those above it.
Chain = tuple[Place, ...]


@final
class Outline:
    """The places of a recording; those below one are made when they are asked for."""

    def __init__(self, roots: Sequence[ModuleNode], *, is_folded: bool = True) -> None:
        self._is_folded = is_folded
        self._below: dict[int, tuple[Place, ...]] = {}
        self._contents = {key: one for root in roots for key, one in number_contents(root).items()}
        self.tops = tuple(
            Place(node.label, node.label, node, (node.path,), is_nowhere=node.label == NO_MODULE)
            for node in roots
        )

    def below(self, place: Place) -> tuple[Place, ...]:
        """The places right below one, the same objects each time."""
        key = id(place)
        if key not in self._below:
            self._below[key] = tuple(self._make_below(place))
        return self._below[key]

    def _make_below(self, place: Place) -> Iterator[Place]:
        for run in self._list_runs(place.node):
            first, last = run[0].label, run[-1].label
            label = first if len(run) == 1 else f"{first}…{last}"
            name = label if len(run) == 1 else f"{{{label}}}"
            paths = tuple(_join(path, one.label) for path in place.paths for one in run)
            yield Place(_join(place.name, name), label, run[0], paths, len(run))

    def _list_runs(self, node: ModuleNode) -> Iterator[list[ModuleNode]]:
        if self._is_folded:
            return find_runs(node, self._contents)
        return ([child] for child in node.children)

    def walk(self) -> Iterator[Chain]:
        """Every place, from the top down."""
        waiting: list[Chain] = [(top,) for top in reversed(self.tops)]
        while waiting:
            chain = waiting.pop()
            yield chain
            waiting += [(*chain, one) for one in reversed(self.below(chain[-1]))]

    def search(self, term: str) -> list[Chain]:
        """Places whose own name or class has the term; one below a match needs it once more."""
        wanted = term.strip().casefold()
        return [chain for chain in self.walk() if _matches(chain, wanted)] if wanted else []

    def find(self, path: str) -> Chain | None:
        """The place of a module or, of a parameter or part that has none, of the one above.

        In a path such as `layers.*.attention` any layer is meant, and the first is found.
        """
        chain: Chain = self.tops[:1]
        while chain:
            for one in self.below(chain[-1]):
                if any(_is_within(path, own) for own in one.paths):
                    chain = (*chain, one)
                    break
            else:
                break
        return chain if len(chain) > 1 or not path else None


def _join(path: str, label: str) -> str:
    return f"{path}.{label}" if path else label


def _is_within(path: str, above: str) -> bool:
    if "*" in path:
        above = fold_path(above)
    return path == above or path.startswith(f"{above}.")


def _matches(chain: Chain, wanted: str) -> bool:
    place = chain[-1]
    if any(wanted in kind.casefold() for kind in place.node.types):
        return True
    # `layers.1` is found in layers.1 and in layers.10, and not in each of their children.
    return any(
        folded.count(wanted) > folded.rpartition(".")[0].count(wanted)
        for folded in map(str.casefold, (*place.paths, place.name))
    )
