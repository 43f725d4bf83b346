"""The module tree as it is browsed; entries are created when they are first needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from msgspec import Struct

from shardscope.record.layer_names import fold_layers
from shardscope.report.model.module_tree import NO_MODULE, ModuleNode, find_runs, number_contents


class ModuleEntry(Struct, frozen=True, eq=False):
    """A module, or several identical ones (`paths`); `node` has the numbers of each."""

    name: str  # `layers.{0…31}.attention`; the root's is empty
    label: str  # its last component: `attention`, `0…31`
    node: ModuleNode
    paths: tuple[str, ...]
    repeat: int = 1  # number of folded modules below one parent
    is_nowhere: bool = False  # stands for calls outside any module


# An entry, preceded by its ancestors.
Chain = tuple[ModuleEntry, ...]


@final
class ModuleIndex:
    """The entries of a recording; children are created when they are needed."""

    def __init__(self, roots: Sequence[ModuleNode], *, is_folded: bool = True) -> None:
        self._is_folded = is_folded
        self._below: dict[int, tuple[ModuleEntry, ...]] = {}
        self._contents = {
            key: number for root in roots for key, number in number_contents(root).items()
        }
        self.tops = tuple(
            ModuleEntry(
                node.label, node.label, node, (node.path,), is_nowhere=node.label == NO_MODULE
            )
            for node in roots
        )

    def below(self, entry: ModuleEntry) -> tuple[ModuleEntry, ...]:
        """Return the children of an entry, the same objects each time."""
        key = id(entry)
        if key not in self._below:
            self._below[key] = tuple(self._make_below(entry))
        return self._below[key]

    def _make_below(self, entry: ModuleEntry) -> Iterator[ModuleEntry]:
        for run in self._list_runs(entry.node):
            first, last = run[0].label, run[-1].label
            label = first if len(run) == 1 else f"{first}…{last}"
            name = label if len(run) == 1 else f"{{{label}}}"
            paths = tuple(_join(path, node.label) for path in entry.paths for node in run)
            yield ModuleEntry(_join(entry.name, name), label, run[0], paths, len(run))

    def _list_runs(self, node: ModuleNode) -> Iterator[list[ModuleNode]]:
        if self._is_folded:
            return find_runs(node, self._contents)
        return ([child] for child in node.children)

    def walk(self) -> Iterator[Chain]:
        """Yield every entry with its ancestors, parents first."""
        waiting: list[Chain] = [(top,) for top in reversed(self.tops)]
        while waiting:
            chain = waiting.pop()
            yield chain
            waiting += [(*chain, child) for child in reversed(self.below(chain[-1]))]

    def search(self, term: str) -> list[Chain]:
        """Find entries whose own name or class contains the term.

        Descendants of a match are found only if the term occurs again in their own part of the
        name.
        """
        wanted = term.strip().casefold()
        return [chain for chain in self.walk() if _matches(chain, wanted)] if wanted else []

    def find(self, path: str) -> Chain | None:
        """Find the entry of a module; for a parameter or unknown child, its nearest ancestor.

        A pattern such as `layers.*.attention` matches any layer, and the first is returned.
        """
        chain: Chain = self.tops[:1]
        while chain:
            for child in self.below(chain[-1]):
                if any(_is_within(path, own) for own in child.paths):
                    chain = (*chain, child)
                    break
            else:
                break
        return chain if len(chain) > 1 or not path else None


def _join(path: str, label: str) -> str:
    return f"{path}.{label}" if path else label


def _is_within(path: str, above: str) -> bool:
    if "*" in path:
        above = fold_layers(above)
    return path == above or path.startswith(f"{above}.")


def _matches(chain: Chain, wanted: str) -> bool:
    entry = chain[-1]
    if any(wanted in kind.casefold() for kind in entry.node.types):
        return True
    # `layers.1` matches layers.1 and layers.10, but not each of their children.
    return any(
        folded.count(wanted) > folded.rpartition(".")[0].count(wanted)
        for folded in map(str.casefold, (*entry.paths, entry.name))
    )
