"""What a part of a fragment must be given, so that each of its ops reads what it read in the whole.

In the part, a storage of the whole may have several stand-ins: an input for each value that ops
outside of the part made of it, and those that kept ops make. A kept op writes to the stand-in that
it is given, so every other one is out of date from then on; an op that is left out leaves all of
them behind. Who reads a value whose stand-in is out of date gets a new input instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import fx, nn

from shardscope.compile.diagnose.cutting.tape import Seen, Step, Tape, Want
from shardscope.compile.diagnose.cutting.values import map_leaves

__all__ = ["Plan", "Slot", "seen_in"]


@final
@dataclass(eq=False, slots=True)
class _StandIn:
    """Memory of the part that is in the state that a storage of the whole had at some version."""

    storage: int
    version: int
    slot: Slot | None = None

    def is_current(self, seen: Seen) -> bool:
        return (self.storage, self.version) == (seen.storage, seen.version)


@final
@dataclass(eq=False, slots=True)
class Slot:
    """An input of the part: a tensor, or whatever else the program was given."""

    node: fx.Node  # whose value it is
    want: Want | None
    is_whole: bool  # the node's value is this one tensor, not several
    is_written: bool = False

    @property
    def requires_grad(self) -> bool:
        """Whether it did when it was read."""
        return self.want is not None and self.want.seen.requires_grad


@final
class Plan:
    """The inputs of a part, and for each of its steps where what it reads comes from."""

    def __init__(self, tape: Tape, kept: frozenset[fx.Node]) -> None:
        self._made = tape.made
        self._written = tape.written
        self._stand_ins: dict[tuple[fx.Node, int], _StandIn] = {}
        self._slots: dict[tuple[fx.Node, int], Slot] = {}
        self.kept = kept
        self.slots: list[Slot] = []
        self.attributes: dict[fx.Node, None] = {}
        self.sources: dict[fx.Node, dict[fx.Node, Any]] = {}  # by reader, then by what it reads
        for index, step in enumerate(tape.steps):
            if step.nodes[0] in kept:
                self._plan_step(index, step)

    def _plan_step(self, index: int, step: Step) -> None:
        sources = {node: self._source(index, node, value) for node, value in step.reads.items()}
        self.sources.update(dict.fromkeys(step.nodes, sources))
        given = [self._stand_ins[key] for key, _ in _places(step.reads) if key in self._stand_ins]
        for storage in step.writes:
            _write({stand_in for stand_in in given if stand_in.storage == storage})
        made = {node: self._made[node] for node in step.nodes if node in self._made}
        self._place(made, set(given))

    def _source(self, index: int, node: fx.Node, value: Any) -> Any:
        """The node itself, if the part has it and its value is as it was; else inputs."""
        if node.op == "get_attr" and self._is_constant(value):
            self.attributes[node] = None
            return node
        places = dict(_places({node: value}))
        is_current = all(self._is_current(key, seen) for key, seen in places.items())
        if node in self.kept and is_current and self._slots.keys().isdisjoint(places):
            return node
        if node.op == "placeholder" and not places:
            return self._given_slot(node)
        counter = itertools.count()
        return map_leaves(
            value, Seen, lambda seen: self._slot(Want(index, node, next(counter), seen), value)
        )

    def _is_constant(self, value: Any) -> bool:
        return isinstance(value, nn.Module) or self._written.isdisjoint(
            seen.storage for seen in seen_in(value)
        )

    def _is_current(self, key: tuple[fx.Node, int], seen: Seen) -> bool:
        stand_in = self._stand_ins.get(key)
        return stand_in is not None and stand_in.is_current(seen)

    def _given_slot(self, node: fx.Node) -> Slot:
        """What the program was given and is no tensor."""
        if (node, 0) not in self._slots:
            self._slots[node, 0] = Slot(node, None, is_whole=True)
            self.slots.append(self._slots[node, 0])
        return self._slots[node, 0]

    def _slot(self, want: Want, value: Any) -> Slot:
        key = (want.node, want.place)
        if key not in self._slots or not self._is_current(key, want.seen):
            slot = Slot(want.node, want, is_whole=value is want.seen)
            self.slots.append(slot)
            self._slots[key] = slot
            self._stand_ins[key] = _StandIn(want.seen.storage, want.seen.version, slot)
        return self._slots[key]

    def _place(self, made: dict[fx.Node, Any], given: set[_StandIn]) -> None:
        """What a step makes is in memory that it was given, or in memory of its own."""
        own: dict[int, _StandIn] = {}
        for key, seen in _places(made):
            shared = [one for one in given if one.is_current(seen)]
            new = own.setdefault(seen.storage, _StandIn(seen.storage, seen.version))
            self._stand_ins[key] = shared[0] if len(shared) == 1 else new


def _write(given: set[_StandIn]) -> None:
    for stand_in in given:
        # Of several there is no telling which was written to: none of them is up to date then.
        stand_in.version += len(given) == 1
        if stand_in.slot is not None:
            stand_in.slot.is_written = True


def seen_in(value: Any) -> Iterator[Seen]:
    """The tensors of a value that was seen."""
    found: list[Seen] = []
    map_leaves(value, Seen, found.append)
    return iter(found)


def _places(values: dict[fx.Node, Any]) -> Iterator[tuple[tuple[fx.Node, int], Seen]]:
    for node, value in values.items():
        for place, seen in enumerate(seen_in(value)):
            yield (node, place), seen
