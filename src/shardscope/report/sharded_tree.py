"""The module tree as lines: four spaces a level, `u1.l1[Linear]`, and FULLY SHARDED where it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import final

from shardscope.record import MarkKind, Module
from shardscope.report.fold import facts_of

__all__ = ["FULLY_SHARDED", "TreeLine", "format_tree", "list_tree"]

FULLY_SHARDED = "FULLY SHARDED"
_SHARDED = {MarkKind.FULLY_SHARD, MarkKind.FSDP1}
_MAX_DEPTH = 64  # names nested deeper stay in one piece, so that recursion is bounded


@final
class TreeLine:
    """One module, or several alike next to each other: `repeat` of them, `last` the last's name."""

    def __init__(self, module: Module, depth: int) -> None:
        self.module = module
        self.depth = depth
        self.repeat = 1
        self.last = module.name

    @property
    def label(self) -> str:
        """`u1.l1[Linear]`; of folded layers `layers.0-31[Block]`."""
        name = self.module.name
        if self.repeat > 1:
            name = f"{name}-{self.last.rpartition('.')[2]}"
        return f"{name}[{self.module.type}]" if self.module.type else name

    @property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP was applied to the module itself."""
        return any(mark.kind in _SHARDED for mark in self.module.marks)


def format_tree(modules: Sequence[Module], *, is_folded: bool = False) -> str:
    """The tree as text, in the format that PyTorch documents for a fully sharded model."""
    lines = (
        f"{'    ' * line.depth}{line.label}"
        + (f" {FULLY_SHARDED}" if line.is_fully_sharded else "")
        + (f" ×{line.repeat}" if line.repeat > 1 else "")
        for line in list_tree(modules, is_folded=is_folded)
    )
    return "".join(f"{line}\n" for line in lines)


def list_tree(modules: Sequence[Module], *, is_folded: bool = False) -> list[TreeLine]:
    """The lines from the root down; `is_folded` leaves of layers that are alike only the first."""
    return list(_walk(_Node.build(modules), is_folded=is_folded))


@final
class _Node:
    def __init__(self) -> None:
        self.module: Module | None = None
        self.children: dict[str, _Node] = {}

    @classmethod
    def build(cls, modules: Iterable[Module]) -> _Node:
        root = cls()
        for module in modules:
            node = root
            for part in module.name.split(".", _MAX_DEPTH) if module.name else ():
                node = node.children.setdefault(part, cls())
            if node.module is None:  # ranks may hold it in other forms: the first is shown
                node.module = module
        return root

    def signature(self) -> object:
        """Equal for modules that differ in nothing but their place."""
        module = self.module
        own = None
        if module is not None:
            own = (module.type, module.marks, tuple(map(facts_of, module.parameters)))
        return own, tuple((name, child.signature()) for name, child in self.children.items())


def _walk(node: _Node, depth: int = 0, *, is_folded: bool) -> Iterator[TreeLine]:
    if node.module is not None:
        yield TreeLine(node.module, depth)
        depth += 1
    first: TreeLine | None = None
    signature: object = None
    for name, child in node.children.items():
        is_layer = is_folded and name.isdecimal() and child.module is not None
        if is_layer and first is not None and child.signature() == signature:
            assert child.module is not None
            first.repeat += 1
            first.last = child.module.name
            continue
        lines = list(_walk(child, depth, is_folded=is_folded))
        first = lines[0] if is_layer and lines else None
        signature = child.signature() if is_layer else None
        yield from lines
