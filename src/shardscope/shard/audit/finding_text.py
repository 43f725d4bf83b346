"""How findings print the names of tensors; repeated layers are folded into one name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardscope.record.layer_names import fold_layers
from shardscope.shard.audit.sharded_tensors import TensorEntry

RIGHT_ORDER = "Apply tensor parallelism first, then checkpointing, then torch.compile, then FSDP."


def fold_names(entries: Iterable[TensorEntry]) -> list[tuple[str, list[TensorEntry]]]:
    """Group tensors of repeated layers under one name: `layers.*.up.weight (×32)`."""
    folded: dict[tuple[object, ...], list[TensorEntry]] = {}
    for entry in entries:
        pattern = fold_layers(entry.name)
        folded.setdefault((pattern, entry.record.shape, entry.record.dtype), []).append(entry)
    return [(_name_all(group), group) for group in folded.values()]


def _name_all(entries: list[TensorEntry]) -> str:
    if len(entries) == 1:
        return entries[0].name
    return f"{fold_layers(entries[0].name)} (×{len(entries)})"


def join_names(names: Sequence[str]) -> str:
    """Join names for a sentence: `dp`, `dp and tp`."""
    return " and ".join(names)
