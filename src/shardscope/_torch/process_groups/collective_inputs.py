"""What ranks give to collectives, where it is known; imports no torch."""

from __future__ import annotations

from msgspec import Struct


class GroupKey(Struct, frozen=True):
    """A group of a rank, equal for the corresponding groups of other ranks.

    `index` counts the rank's groups of that size and stride.
    """

    size: int
    stride: int
    index: int


class ValueInput(Struct, frozen=True):
    """The known inputs of a collective: its number in the group, its kind, and the values."""

    group: GroupKey
    number: int
    kind: str
    reduction: str
    root: int
    values: tuple[tuple[float, ...], ...]


class ObjectInput(Struct, frozen=True):
    """The pickled objects that a rank gives to an object collective, by its number in the group."""

    group: GroupKey
    number: int
    content: bytes


class GroupInputs(Struct, frozen=True):
    """What all members of a group give to a collective, in the order of their ranks."""

    group: GroupKey
    number: int
    values: tuple[tuple[tuple[float, ...], ...], ...] = ()
    objects: tuple[bytes, ...] = ()
