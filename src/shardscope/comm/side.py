"""One side of a disagreement in words: which ranks, what they issued, and where."""

from __future__ import annotations

from collections.abc import Iterable

from shardscope.record.ranks import compress_ranks, format_ranks
from shardscope.record.recording import Collective

__all__ = ["RANK_MISMATCH", "describe_call", "name_ranks", "payload_bytes"]

RANK_MISMATCH = "rank-mismatch"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-7`."""
    ordered = sorted(ranks)
    return f"rank{'s' if len(ordered) > 1 else ''} {format_ranks(compress_ranks(ordered))}"


def payload_bytes(call: Collective) -> int:
    """The size of what travels, whichever end of it this rank is."""
    return max(call.input_bytes, call.output_bytes)


def describe_call(call: Collective) -> str:
    """What was issued, and for which module, phase and line."""
    parts = [str(call.kind), call.dtype, f"{payload_bytes(call):,} bytes"]
    if call.reduce_op is not None:
        parts.append(f"op {call.reduce_op}")
    if call.peer is not None:
        parts.append(f"peer {call.peer}")
    owner = call.owner or ("the root module" if call.owner == "" else "no module")
    where = f"{owner}, {call.phase}"
    if call.source is not None:
        where += f", {call.source.file}:{call.source.line}"
    return f"{' '.join(part for part in parts if part)} ({where})"
