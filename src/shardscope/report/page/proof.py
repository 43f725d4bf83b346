"""Whether the parallel program is the same, and how it was made, for the browser."""

from __future__ import annotations

from msgspec import Struct

__all__ = [
    "DivergenceItem",
    "FallbackRow",
    "InsertedRow",
    "ParallelItem",
    "ParityItem",
    "Proof",
    "VerdictTable",
]


class VerdictTable(Struct, frozen=True, kw_only=True):
    """Tensors that were compared, in columns; those that differ come first."""

    name: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()
    agreement: tuple[str, ...] = ()
    is_fine: tuple[bool, ...] = ()
    error: tuple[float | None, ...] = ()
    noise: tuple[float | None, ...] = ()
    suspect: tuple[str, ...] = ()
    detail: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()


class DivergenceItem(Struct, frozen=True, kw_only=True):
    """Where the two versions part."""

    module: int
    path: str
    phase: str
    suspect: str
    detail: str
    op: str = ""
    remedy: str = ""
    source: int = -1


class ParityItem(Struct, frozen=True, kw_only=True):
    """A comparison with the single device."""

    mesh: str
    words: str  # a sentence: `all of 312 tensors agree`
    is_fine: bool
    tensors: VerdictTable
    divergences: tuple[DivergenceItem, ...] = ()


class InsertedRow(Struct, frozen=True, kw_only=True):
    """Collectives that were put in, alike but for their layer."""

    what: str
    phase: str
    count: int
    size_bytes: int  # that a rank puts into all of them
    cause: str
    module: int = -1
    source: int = -1


class FallbackRow(Struct, frozen=True, kw_only=True):
    """Ops that could not run on pieces, alike but for their layer."""

    op: str
    kind: str
    axis: str
    count: int
    size_bytes: int  # moved because of all of them
    placements: str
    remedy: str
    module: int = -1
    source: int = -1


class ParallelItem(Struct, frozen=True, kw_only=True):
    """A program that was cut for a mesh."""

    program: str
    mesh: str
    words: str
    is_fine: bool
    inserted: tuple[InsertedRow, ...] = ()
    fallbacks: tuple[FallbackRow, ...] = ()
    tensors: VerdictTable = VerdictTable()


class Proof(Struct, frozen=True, kw_only=True):
    """All comparisons and all programs that were cut."""

    parity: tuple[ParityItem, ...] = ()
    parallel: tuple[ParallelItem, ...] = ()
