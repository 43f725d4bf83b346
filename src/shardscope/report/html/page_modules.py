"""The page's module tree: figures of each module, also in the recording it is compared with."""

from __future__ import annotations

from msgspec import Struct


class PeakParts(Struct, frozen=True, kw_only=True):
    """Bytes at the peak of memory that belong to a module itself, by memory kind, in columns."""

    kinds: tuple[str, ...] = ()
    module: tuple[int, ...] = ()
    kind: tuple[int, ...] = ()  # position in `kinds`
    num_bytes: tuple[int, ...] = ()


class GoneModules(Struct, frozen=True, kw_only=True):
    """Modules that only the earlier recording has, identical names folded, with their figures."""

    parent: int  # the nearest ancestor that the page has
    name: str  # `layers.{4…31}`
    paths: tuple[str, ...]  # of each of them, as in `EarlierRecording.modules`
    num_modules: int
    count: int
    wire_bytes: int
    parameters: int
    local_bytes: int
    peak_bytes: int


class EarlierModules(Struct, frozen=True, kw_only=True):
    """Figures of the page's modules in the recording that it is compared with, in columns.

    Figures include children and are zero for modules that are new. `recorded` names the columns
    that the earlier recording has, as in `Modules`.
    """

    recorded: tuple[str, ...]
    is_new: tuple[bool, ...]
    count: tuple[int, ...]
    wire_bytes: tuple[int, ...]
    parameters: tuple[int, ...]
    local_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    gone: tuple[GoneModules, ...] = ()


class Modules(Struct, frozen=True, kw_only=True):
    """All modules in the order of a walk from the root, in columns; figures are of one rank.

    `first_identical` is the position of the first sibling that is identical except for its number,
    or the module's own position; folding hides every module whose `first_identical` is another
    module, and its descendants. `total` figures include children; those of collectives are summed
    from `Communication.traffic`. `recorded` names the figures that were recorded: zeros of others
    mean nothing.
    """

    recorded: tuple[str, ...] = ()  # of wire, parameters, local, peak, findings

    path: tuple[str, ...] = ()
    label: tuple[str, ...] = ()
    type: tuple[str, ...] = ()
    parent: tuple[int, ...] = ()
    end: tuple[int, ...] = ()  # position after the last one below it
    first_identical: tuple[int, ...] = ()
    repeat: tuple[int, ...] = ()  # how many are folded into it, itself included
    total_parameters: tuple[int, ...] = ()  # elements of the global parameters; tied ones once
    total_parameter_bytes: tuple[int, ...] = ()
    total_local_bytes: tuple[int, ...] = ()  # of them, on one rank
    total_peak_bytes: tuple[int, ...] = ()  # at the peak of memory
    marks: tuple[str, ...] = ()  # fully_shard, tensor_parallel (ColwiseParallel), …
    num_findings: tuple[int, ...] = ()  # children included
    own_peak: PeakParts = PeakParts()
    earlier: EarlierModules | None = None  # of the recording that the page is compared with
