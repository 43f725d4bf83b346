"""Whatever a contract holds, a file of it can be read, and written again with other numbers."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from sample_recordings import HOSTILE_NAMES
from shardscope.contract import Contract, Figure, Limit, render_contract
from shardscope.contract.limits import COMM_FIGURES, CauseKind
from shardscope.contract.toml_reader import parse_contract
from shardscope.record import CollectiveKind, Phase, Severity

NAMES = (*HOSTILE_NAMES[:9], "layers.*", "", '"quo\'ted"', "back\\slash", "#", "[x]", "64MiB", "8")
SIZES = (0, 1, 1024, 2**20, 2**40 + 1, 2**63 - 1)
_OTHERS = (*COMM_FIGURES, Figure.FINDINGS, Figure.TYPES)
TOTALS = [figure for figure in Figure if figure not in _OTHERS]


def make_contract(random: Random) -> Contract:
    """Limits of every kind in any order, some on the same collectives."""
    limits = [
        *(Limit(figure=figure, most=random.choice(SIZES)) for figure in some(TOTALS, random)),
        *(
            Limit(figure=Figure.FINDINGS, severity=severity, most=1)
            for severity in some(Severity, random)
        ),
        *(Limit(figure=Figure.FINDINGS, rule=name or "-", most=2) for name in some(NAMES, random)),
        *(
            Limit(figure=Figure.TYPES, tensor=f"{name} output", types="tp: S(0) / S(0)")
            for name in some(NAMES, random)
        ),
        Limit(figure=Figure.COUNT, causes=(CauseKind.UNASKED,), most=4),
    ]
    for _ in range(random.randrange(4)):
        selector = {
            "module": random.choice((None, *NAMES)),
            "phases": some(Phase, random),
            "axes": some(NAMES, random),
            "kinds": some(CollectiveKind, random),
            "causes": some(CauseKind, random),
        }
        for figure in random.choices(COMM_FIGURES, k=2):
            least, most = sorted(random.choices(SIZES, k=2))
            sides = random.choice(((least, most), (None, most), (least, None), (most, most)))
            limits.append(Limit(figure=figure, least=sides[0], most=sides[1], **selector))
    random.shuffle(limits)
    return Contract(tuple(limit for limit in limits if not limit.is_on_unasked or limit.most == 4))


def some(things: object, random: Random) -> tuple[object, ...]:
    every = list(things)
    return tuple(random.sample(every, random.choice((0, 1, 1, 2))))


@pytest.mark.parametrize("seed", range(60))
def test_any_contract_is_read_as_it_was_written_and_can_take_the_place_of_any_other(
    seed: int,
) -> None:
    random = Random(seed)
    before, after = make_contract(random), make_contract(random)
    text = render_contract(before)
    assert parse_contract(text).contract == before
    assert render_contract(before, before=text) == text
    renewed = parse_contract(render_contract(after, before=text)).contract
    assert Counter(renewed.limits) == Counter(after.limits)
