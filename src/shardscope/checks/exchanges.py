"""All-to-alls in which a rank sends other than the receiver expects."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from shardscope.hang import P2P_KINDS
from shardscope.launch.decisions import Decisions, Excess, Exchange, find_excess
from shardscope.record import Collective, Recording, expand_ranks


@final
@dataclass(frozen=True)
class ExchangeMismatch:
    """The first all-to-all of a group in which the sizes of two ranks do not match."""

    group: str
    position: int  # among the collectives of the group
    excess: Excess
    sender_call: Collective
    receiver_call: Collective


def find_exchange_mismatch(
    recording: Recording, decisions: Mapping[int, Decisions]
) -> ExchangeMismatch | None:
    """The first all-to-all in which the sizes of two ranks do not match; None if there is none."""
    members = {group.name: tuple(expand_ranks(group.ranks)) for group in recording.groups}
    for (group, position), by_rank in sorted(_sort_exchanges(recording, decisions).items()):
        for first, second in itertools.combinations(sorted(by_rank), 2):
            calls = {rank: by_rank[rank][0] for rank in (first, second)}
            exchanges = by_rank[first][1], by_rank[second][1]
            excess = find_excess(*exchanges, (first, second), members[group])
            if excess is not None:
                sender, receiver = calls[excess.sender], calls[excess.receiver]
                return ExchangeMismatch(group, position, excess, sender, receiver)
    return None


def _sort_exchanges(
    recording: Recording, decisions: Mapping[int, Decisions]
) -> dict[tuple[str, int], dict[int, tuple[Collective, Exchange]]]:
    """The all-to-alls of each rank by group and position."""
    known = {
        (rank, exchange.order): exchange
        for rank, own in decisions.items()
        for exchange in own.exchanges
    }
    found: defaultdict[tuple[str, int], dict[int, tuple[Collective, Exchange]]] = defaultdict(dict)
    counts: Counter[tuple[int, str]] = Counter()
    for call in sorted(recording.collectives, key=lambda call: (call.rank, call.order)):
        if call.kind in P2P_KINDS:
            continue
        position = counts[call.rank, call.group]
        counts[call.rank, call.group] += 1
        exchange = known.get((call.rank, call.order))
        if exchange is not None:
            found[call.group, position][call.rank] = (call, exchange)
    return found
