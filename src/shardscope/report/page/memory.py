"""What memory holds over a step, for the browser."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["HeldRow", "MemoryCurve", "PhaseStretch"]


class HeldRow(Struct, frozen=True, kw_only=True):
    """What one module held of one kind at the peak; the most comes first."""

    kind: int
    module: int
    num_bytes: int


class PhaseStretch(Struct, frozen=True, kw_only=True):
    """From which moment to which (both included) a phase lasted, as positions of samples."""

    phase: str
    first: int
    last: int


class MemoryCurve(Struct, frozen=True, kw_only=True):
    """A step's memory on ranks that held the same; columns have one entry for each sample.

    Where there were more moments than a screen has columns, the highest of each stretch is kept,
    and the peak always. The curve of the ranks that need most comes first; of others there are
    fewer moments, and of what they held at the peak only the largest.
    """

    ranks: str
    kinds: tuple[str, ...]
    order: tuple[int, ...]
    num_bytes: tuple[tuple[int, ...], ...]  # a column for each kind
    module: tuple[int, ...]  # that ran
    phases: tuple[PhaseStretch, ...]
    peak: int  # position of the sample
    peak_bytes: int
    peak_phase: str
    peak_module: int
    at_peak: tuple[HeldRow, ...]
    first_peak_bytes: int | None = None  # None is what was not recorded
    reserved_bytes: int | None = None
    needed_bytes: int | None = None
    device_bytes: int | None = None
    room: str = ""  # whether it fits in the device, in words
    caveat: str = ""  # where the figures come from
