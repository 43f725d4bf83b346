"""The module tree × phases, for the browser."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["Modules"]


class Modules(Struct, frozen=True, kw_only=True):
    """All modules in the order of a walk from the root, in columns; figures are of one rank.

    Where ranks differ they are the busiest rank's, and `is_uneven` says so. A module that is like
    an earlier sibling but for its number has that one's position in `alike`, others their own;
    folding leaves out whatever is not its own, with all below it. Columns of phases are in the
    order of `phases`. `own` figures leave out children, `total` figures do not. `recorded` names
    the columns whose figures were recorded: zeros of the others mean nothing.
    """

    recorded: tuple[str, ...] = ()  # of wire, parameters, local, peak, findings

    phases: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    label: tuple[str, ...] = ()
    type: tuple[str, ...] = ()
    parent: tuple[int, ...] = ()
    end: tuple[int, ...] = ()  # position after the last one below it
    alike: tuple[int, ...] = ()
    repeat: tuple[int, ...] = ()  # how many are folded into it, itself included
    what: tuple[str, ...] = ()  # its own collectives: `2× all_gather[tp]`
    is_uneven: tuple[bool, ...] = ()
    own_count: tuple[tuple[int, ...], ...] = ()  # of each phase, for each module
    total_count: tuple[tuple[int, ...], ...] = ()  # likewise
    total_input_bytes: tuple[int, ...] = ()
    own_wire_bytes: tuple[int, ...] = ()
    total_wire_bytes: tuple[tuple[int, ...], ...] = ()  # likewise
    total_parameters: tuple[int, ...] = ()  # elements, of the whole model; tied ones once
    total_parameter_bytes: tuple[int, ...] = ()
    total_local_bytes: tuple[int, ...] = ()  # of them, on one rank
    total_peak_bytes: tuple[int, ...] = ()  # at the peak of memory
    marks: tuple[str, ...] = ()  # fully_shard, tensor_parallel (ColwiseParallel), …
    num_findings: tuple[int, ...] = ()  # children included
