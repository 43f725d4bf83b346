"""Where the two versions part: the first module whose result, or whose gradient, differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from shardscope.parallel.parity.cases import Runs, cases
from shardscope.parallel.parity.judge import Judged, judge
from shardscope.parallel.parity.outcome import Outcome
from shardscope.parallel.parity.probe import Spot
from shardscope.record import FINE, Agreement, Phase, TensorKind

__all__ = ["Parting", "find_partings", "is_within"]

# Tensors of another shape or dtype on the way may be as they should be.
_WRONG = (Agreement.DIFFERS, Agreement.RANKS_DISAGREE, Agreement.NONFINITE)


@final
@dataclass(frozen=True, eq=False)
class Parting:
    """A place where a right result goes in and a wrong one comes out."""

    module: str
    phase: Phase
    judged: Judged
    path: str = ""  # of the result, or of the parameter whose gradient it is
    back_to: str | None = None  # the module whose output's gradient it is


@final
class _Seen:
    """All that probes saw, judged."""

    def __init__(self, runs: Runs, ranks: Sequence[Outcome], sizes: Sequence[int]) -> None:
        seen = Runs(
            _as_outputs(runs.reference),
            None if runs.exact is None else _as_outputs(runs.exact),
            tuple(
                (_as_outputs(one), None if other is None else _as_outputs(other))
                for one, other in runs.jittered
            ),
            runs.precision,
        )
        outputs = [_as_outputs(one) for one in ranks]
        self.judged: dict[Spot, Judged] = {}
        for case in cases(seen, outputs, sizes):
            if case.reference is not None and None not in case.ranks:
                self.judged[Spot.decode(case.name)] = judge(case)

    def wrong(self, phase: Phase) -> Iterator[tuple[Spot, Judged]]:
        """What differs, in the order it was put out."""
        for spot, one in self.judged.items():
            if spot.phase is phase and one.verdict.agreement in _WRONG:
                yield spot, one

    def is_fine(self, module: str, phase: Phase) -> bool | None:
        """Whether all that the module put out is as it should be; None if nothing was seen."""
        found = [
            one.verdict.agreement
            for spot, one in self.judged.items()
            if spot.module == module and spot.phase is phase
        ]
        return all(one in FINE for one in found) if found else None

    def is_before(self, module: str, other: str) -> bool:
        """Whether backward came to the one module before it came to the other."""
        order = [spot.module for spot in self.judged if spot.phase is Phase.BACKWARD]
        return module in order and other in order and order.index(module) < order.index(other)

    def is_healed(self, spot: Spot) -> bool:
        """Whether a module around it gave a right result all the same.

        A layer may leave its ranks with addends that the module around it sums.
        """
        return any(self.is_fine(one, spot.phase) for one in _around(spot.module))


def find_partings(
    runs: Runs,
    ranks: Sequence[Outcome],
    sizes: Sequence[int],
    *,
    gradients: Sequence[Judged],
    consumers: Mapping[str, Sequence[str]],
) -> list[Parting]:
    """Where forward parts; or, where it does not, where backward does.

    `gradients` are those of parameters, judged; `consumers` the modules that took an output.
    """
    seen = _Seen(runs, ranks, sizes)
    for spot, one in seen.wrong(Phase.FORWARD):
        if not seen.is_healed(spot):
            return [Parting(spot.module, Phase.FORWARD, one, spot.path)]
    own = next(_find_own(seen, gradients), None)
    back = next(_find_backward(seen, consumers), None)
    if own is not None and back is not None and seen.is_before(own.module, back.back_to or ""):
        back = None  # it is the same module that hands back a wrong one
    return [one for one in (own, back) if one is not None]


def _find_backward(seen: _Seen, consumers: Mapping[str, Sequence[str]]) -> Iterator[Parting]:
    """The first gradient that comes back wrong to a module's output."""
    for spot, one in seen.wrong(Phase.BACKWARD):
        takers = consumers.get(spot._replace(phase=Phase.FORWARD).encode(), ())
        others = [name for name in dict.fromkeys(takers) if not is_within(spot.module, name)]
        module = next(iter(_around(spot.module)), spot.module)
        for name in others:  # the innermost of those that the first handed it on to
            module = name if module not in others or is_within(name, module) else module
        yield Parting(module, Phase.BACKWARD, one, spot.path, back_to=spot.module)
        return


def _find_own(seen: _Seen, gradients: Sequence[Judged]) -> Iterator[Parting]:
    """A parameter's gradient that is wrong although a right one came to its module."""
    for one in reversed(gradients):
        if one.case.kind is not TensorKind.GRADIENT or one.verdict.agreement in FINE:
            continue
        module, _, parameter = one.case.name.rpartition(".")
        if seen.is_fine(module, Phase.BACKWARD) is not False:
            yield Parting(module, Phase.BACKWARD, one, parameter)
            return


def _as_outputs(outcome: Outcome) -> Outcome:
    return Outcome(list(outcome.seen.items()), {}, {})


def _around(module: str) -> Iterator[str]:
    """The modules that hold it, the nearest first; the root's name is empty."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def is_within(module: str, other: str) -> bool:
    """Whether the one is the other, or in it."""
    return not other or module == other or module.startswith(f"{other}.")
