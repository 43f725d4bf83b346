"""Names as findings print them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardscope.shard.tensors import Held

__all__ = ["RIGHT_ORDER", "fold_indices", "fold_names", "join_names"]

RIGHT_ORDER = "Apply tensor parallelism first, then checkpointing, then torch.compile, then FSDP."

_INDEX = re.compile(r"(?<![^. ])\d+(?![^. ])")


def fold_indices(text: str) -> str:
    """`layers.*.up` of `layers.7.up`: the same for layers that are alike."""
    return _INDEX.sub("*", text)


def fold_names(ones: Iterable[Held]) -> list[tuple[str, list[Held]]]:
    """Tensors of repeated layers together, under one name: `layers.*.up.weight (×32)`."""
    folded: dict[tuple[object, ...], list[Held]] = {}
    for one in ones:
        pattern = fold_indices(one.name)
        folded.setdefault((pattern, one.record.shape, one.record.dtype), []).append(one)
    return [(_name_all(same), same) for same in folded.values()]


def _name_all(same: list[Held]) -> str:
    if len(same) == 1:
        return same[0].name
    return f"{fold_indices(same[0].name)} (×{len(same)})"


def join_names(names: Sequence[str]) -> str:
    """`dp`, `dp and tp`."""
    return " and ".join(names)
