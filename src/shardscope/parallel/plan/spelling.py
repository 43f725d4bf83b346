"""Placements as people write them: ours, torch's, or as text such as `shard(0)`."""

from __future__ import annotations

import re
from typing import Any

from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from shardscope.errors import PlanError
from shardscope.parallel.placements import Partial, Placement, Replicate, Shard

__all__ = ["is_placement", "read_placement", "read_placement_text", "say", "spell"]

_SHARD = re.compile(
    r"shard\(\s*(?:dim\s*=\s*)?(-?\d+)\s*"
    r"(?:,\s*outer\s*=\s*(\d+)\s*|,\s*segments\s*=\s*[\[(]\s*(\d+(?:\s*,\s*\d+)*)\s*,?\s*[\])]\s*)?\)"
)
_PARTIAL = re.compile(r"partial(?:\(\s*[\"']?(sum|max|min)?[\"']?\s*\))?")
_REPLICATE = re.compile(r"replicate(?:\(\s*\))?")
_REDUCTIONS = {"sum", "max", "min"}


def is_placement(value: Any) -> bool:
    """Whether it is a placement as an object, ours or torch's."""
    return isinstance(value, (Replicate, Shard, Partial, TorchPlacement)) or (
        isinstance(value, type) and issubclass(value, (Replicate, Shard, Partial, TorchPlacement))
    )


def read_placement(value: Any, place: str) -> Placement:
    """The placement that the user gave at `place`, in our terms."""
    if isinstance(value, str) and (read := read_placement_text(value)) is not None:
        return read
    if isinstance(value, type) and issubclass(value, (Replicate, TorchReplicate)):
        return Replicate()
    if isinstance(value, Shard):
        return _checked(value, place)
    if isinstance(value, (Replicate, Partial)):
        return value
    if isinstance(value, TorchPlacement):
        return _read_torch(value, place)
    raise PlanError(
        f"{place} is {_show(value)}, which is not a placement. Give Shard(dim), Replicate() or "
        "Partial(), as an object or as text: 'shard(0)', 'replicate', 'partial'."
    )


def read_placement_text(text: str) -> Placement | None:
    """The placement that the text spells, or None."""
    text = text.strip().lower()
    if found := _SHARD.fullmatch(text):
        segments = tuple(int(one) for one in re.findall(r"\d+", found[3] or ""))
        return _checked(Shard(int(found[1]), int(found[2] or 1), segments), repr(text))
    if found := _PARTIAL.fullmatch(text):
        reduction = found[1] or "sum"
        return Partial(reduction)  # type: ignore[arg-type]
    return Replicate() if _REPLICATE.fullmatch(text) else None


def spell(placement: Placement) -> str:
    """The placement as text that `read_placement_text` reads."""
    if isinstance(placement, Shard):
        return f"shard({_inner(placement)})"
    if isinstance(placement, Partial):
        return "partial" if placement.reduction == "sum" else f"partial({placement.reduction})"
    return "replicate"


def say(placement: Placement | None) -> str:
    """The placement as Python code makes it."""
    if isinstance(placement, Shard):
        return f"Shard({_inner(placement)})"
    if isinstance(placement, Partial):
        return "Partial()" if placement.reduction == "sum" else f"Partial({placement.reduction!r})"
    return "None" if placement is None else "Replicate()"


def _inner(placement: Shard) -> str:
    if placement.segments:
        return f"{placement.dim}, segments={list(placement.segments)}"
    return f"{placement.dim}" + (f", outer={placement.outer}" if placement.outer != 1 else "")


def _read_torch(value: TorchPlacement, place: str) -> Placement:
    # By their very types: what torch derives from them (strided shards, masked sums) is internal
    # to DTensor and means something else.
    if type(value) is TorchShard:
        return Shard(value.dim)
    if type(value) is TorchReplicate:
        return Replicate()
    if type(value) is TorchPartial and value.reduce_op in _REDUCTIONS:
        return Partial(value.reduce_op)  # type: ignore[arg-type]
    raise PlanError(
        f"{place} is {value}, which a plan does not support. Give Shard(dim), Replicate() or "
        "Partial('sum' | 'max' | 'min')."
    )


def _checked(shard: Shard, place: str) -> Shard:
    outer, segments = shard.outer, shard.segments
    if isinstance(shard.dim, bool) or not isinstance(shard.dim, int):
        raise PlanError(
            f"{place} shards dim {shard.dim!r}, which is not a number. Give Shard(dim)."
        )
    is_sound = isinstance(outer, int) and outer > 0 and all(one > 0 for one in segments)
    if not is_sound or (segments and outer != 1):
        raise PlanError(
            f"{place} is {say(shard)}, which has no blocks. Give a positive outer, or positive "
            "segments without outer."
        )
    return shard


def _show(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
