"""What a module said and holds, as the figures of one rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from shardscope.record import Module, Parameter, Phase
from shardscope.report.fold import ModuleNode
from shardscope.report.traffic import Facet, Tally, add_up

__all__ = ["PHASES", "Held", "Said", "gather_parameters", "measure", "measure_traffic"]

PHASES = tuple(Phase)


class Said(NamedTuple):
    """Collectives of the busiest rank in a module, by phase where there are several figures."""

    own: Tally
    total: Tally
    own_count: tuple[int, ...]
    total_count: tuple[int, ...]
    total_wire_bytes: tuple[int, ...]
    is_uneven: bool


class Held(NamedTuple):
    """What parameters are made of."""

    num_elements: int = 0
    global_bytes: int = 0
    local_bytes: int = 0

    def plus(self, other: Held) -> Held:
        """Both together."""
        return Held(*(mine + its for mine, its in zip(self, other, strict=True)))


def measure_traffic(node: ModuleNode) -> Said:
    """All of the rank that sent most, so that the figures are of one rank and add up."""
    totals = [add_up(traffic.values()) for traffic in node.total]
    busy = [one for one in totals if one.count]  # a stage of a pipeline knows nothing of the others
    if not busy:
        none = (0,) * len(PHASES)
        return Said(Tally(), Tally(), none, none, none, is_uneven=False)
    index = max(range(len(totals)), key=lambda i: (totals[i].wire_bytes, totals[i].count))
    own, total = _by_phase(node.own[index]), _by_phase(node.total[index])
    return Said(
        add_up(own),
        totals[index],
        tuple(one.count for one in own),
        tuple(one.count for one in total),
        tuple(one.wire_bytes for one in total),
        is_uneven=any(one != busy[0] for one in busy),
    )


def _by_phase(traffic: dict[Facet, Tally]) -> list[Tally]:
    sums = dict.fromkeys(PHASES, Tally())
    for facet, one in traffic.items():
        sums[facet.phase] += one
    return list(sums.values())


def gather_parameters(modules: Iterable[Module]) -> dict[str, list[Parameter]]:
    """The parameters of each module; of one that ranks hold in several forms, the largest."""
    found: defaultdict[str, dict[str, Parameter]] = defaultdict(dict)
    for module in modules:
        known = found[module.name]
        for one in module.parameters:
            other = known.get(one.name)
            if other is None or (other.local_bytes or 0) < (one.local_bytes or 0):
                known[one.name] = one
    return {
        name: [one for one in ones.values() if not one.is_buffer] for name, ones in found.items()
    }


def measure(one: Parameter) -> Held:
    """One parameter; `Modules.recorded` says whether bytes are known."""
    return Held(math.prod(one.shape), one.global_bytes or 0, one.local_bytes or 0)
