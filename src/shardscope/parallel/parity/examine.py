"""All runs that a verdict takes: first both versions; more only where something differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import nn

from shardscope.errors import CollectiveError, RankError
from shardscope.parallel.parity.cases import Runs, cases
from shardscope.parallel.parity.execute import Probe
from shardscope.parallel.parity.judge import Judged, judge
from shardscope.parallel.parity.locate import Parting, find_partings
from shardscope.parallel.parity.looks import MODULES, Look
from shardscope.parallel.parity.opinions import apply_exact, apply_steady, is_coarse
from shardscope.parallel.parity.ops import WrongOp, find_op
from shardscope.parallel.parity.outcome import Key, Outcome
from shardscope.parallel.parity.probe import ModuleProbe
from shardscope.parallel.parity.relearn import relearn
from shardscope.parallel.parity.single import draws_numbers, run_all, run_exact
from shardscope.parallel.parity.task import Task
from shardscope.parallel.parity.variants import AS_IT_IS, Variant
from shardscope.record import FINE, Agreement, Phase, Suspect, TensorKind

__all__ = ["Examined", "Report", "Version", "examine"]

Report = Callable[[str, str], None]
"""Told of gaps: the place, and the fact."""

_HARMLESS = (*FINE, Agreement.ROUNDED, Agreement.RANDOM)
# Of parameters, another shape is worth no word.
_WRONG_VALUES = (Agreement.DIFFERS, Agreement.RANKS_DISAGREE, Agreement.NONFINITE)


class Version(Protocol):
    """A parallel version that can be run, all ranks of it, in any variant."""

    @property
    def model(self) -> nn.Module:
        """The original."""

    @property
    def axes(self) -> Mapping[str, int]:
        """Of the mesh."""

    @property
    def task(self) -> Task:
        """What a step is."""

    @property
    def batch_axes(self) -> Sequence[str]:
        """Those along which the batch is cut."""

    def run(self, variant: Variant = AS_IT_IS, look: Look | None = None) -> list[Outcome]:
        """What each rank gave."""


@final
@dataclass(frozen=True, eq=False)
class Examined:
    """Verdicts on all tensors, and where what is wrong begins."""

    judged: list[Judged]
    partings: list[Parting]
    types: Mapping[str, str]  # classes of modules
    reference: Outcome  # what the single device gave
    has_exact: bool = True  # a run in double precision gave the noise
    op: WrongOp | None = None  # in the first of those places


Located = tuple[list[Parting], Mapping[str, str], WrongOp | None]


def examine(
    version: Version, *, precision: torch.dtype | None, report: Report, tell: Callable[[str], None]
) -> Examined:
    """Run, compare, and where something differs look for the place."""
    session = _Session(version, precision, report, tell)
    judged, reference, has_exact = session.compare()
    if not _is_wrong(judged):
        return Examined(_without_parameters(judged), [], {}, reference, has_exact)
    is_steady = False
    if draws_numbers(version.model, version.task):
        judged, is_steady = session.compare_steady(judged)
    if not _is_wrong(judged):
        return Examined(_without_parameters(judged), [], {}, reference, has_exact)
    # Where ranks drew different numbers, it is the draw that has to be found.
    is_steady &= not any(one.verdict.suspect is Suspect.RANDOMNESS for one in _wrong(judged))
    partings, types, op = session.locate(judged, is_steady=is_steady)
    return Examined(judged, partings, types, reference, has_exact, op)


def _is_wrong(judged: Sequence[Judged]) -> bool:
    return bool(_wrong(judged))


def _wrong(judged: Sequence[Judged]) -> list[Judged]:
    results = _without_parameters(judged)
    return [one for one in results if one.verdict.agreement not in _HARMLESS]


def _without_parameters(judged: Sequence[Judged]) -> list[Judged]:
    """Weights may be held in any form, as long as what comes of them is right."""
    return [one for one in judged if one.case.kind is not TensorKind.PARAMETER]


@final
class _Session:
    def __init__(
        self,
        version: Version,
        precision: torch.dtype | None,
        report: Report,
        tell: Callable[[str], None],
    ) -> None:
        self._version = version
        self._precision = precision
        self._report = report
        self._tell = tell
        self._has_exact = True

    def compare(self, *, is_steady: bool = False) -> tuple[list[Judged], Outcome, bool]:
        """Verdicts on all tensors, what the single device gave, and if double precision ran."""
        version = self._version
        self._tell("running the original")
        runs = run_all(
            version.model,
            version.task,
            is_steady=is_steady,
            precision=self._precision,
            report=self._report,
        )
        has_exact = runs.exact is not None
        self._has_exact &= has_exact
        self._tell("running all ranks")
        judged = self._judge(runs, version.run(Variant(is_steady=is_steady)))
        if self._has_exact and (is_coarse(judged) or _is_wrong(judged)):
            judged = self._ask_exact(judged, is_steady=is_steady)
        return judged, runs.reference, has_exact

    def compare_steady(self, judged: list[Judged]) -> tuple[list[Judged], bool]:
        """The same, in the light of runs in which nothing is drawn; whether they could be had."""
        try:
            steady, *_ = self.compare(is_steady=True)
        except (RankError, CollectiveError) as error:
            self._report("randomness", f"the ranks do not run without it ({error!s:.200})")
            return judged, False
        return apply_steady(judged, _by_key(steady)), True

    def locate(self, judged: list[Judged], *, is_steady: bool) -> Located:
        """Where what is wrong begins: in double precision, which sees most, if it can be."""
        self._tell("looking for the first module that differs")
        probes: list[ModuleProbe] = []

        def make_probe() -> ModuleProbe:
            probes.append(ModuleProbe())
            return probes[-1]

        found = self._look(MODULES, make_probe, is_steady=is_steady)
        if found is None:
            return [], {}, None
        consumers = probes[0].consumers
        partings = find_partings(*found, self._sizes, gradients=judged, consumers=consumers)
        del found
        return partings, probes[0].types, self._find_op(partings, is_steady=is_steady)

    def _find_op(self, partings: Sequence[Parting], *, is_steady: bool) -> WrongOp | None:
        if not partings or partings[0].phase is not Phase.FORWARD:
            return None
        self._tell("looking for the first op in it")
        look = Look(ops_in=partings[0].module)
        found = self._look(look, look.make_probe, is_steady=is_steady)
        return None if found is None else find_op(*found, self._sizes)

    def _look(
        self, look: Look, make_probe: Callable[[], Probe], *, is_steady: bool
    ) -> tuple[Runs, list[Outcome]] | None:
        version, is_exact = self._version, self._has_exact
        try:
            ranks = version.run(Variant(is_exact=is_exact, is_steady=is_steady), look)
        except (RankError, CollectiveError) as error:
            what = "modules" if look.ops_in is None else "ops"
            fact = f"the ranks do not run while their {what} are watched ({error!s:.200})"
            self._report("the first difference", fact)
            return None
        run = run_exact if is_exact else run_all
        singles = run(version.model, version.task, is_steady=is_steady, probe=make_probe)
        return singles, ranks

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(self._version.axes.values())

    def _judge(self, runs: Runs, ranks: Sequence[Outcome]) -> list[Judged]:
        names = list(self._version.axes)
        batch_axes = [names.index(axis) for axis in self._version.batch_axes]
        all_cases = cases(runs, ranks, self._sizes, batch_axes=batch_axes)
        judged = relearn([judge(case) for case in all_cases], runs.reference, ranks)
        return [
            one
            for one in judged
            if one.case.kind is not TensorKind.PARAMETER or one.verdict.agreement in _WRONG_VALUES
        ]

    def _ask_exact(self, judged: list[Judged], *, is_steady: bool) -> list[Judged]:
        """Ask double precision where noise may hide an error, or be taken for one."""
        version = self._version
        self._tell("running all ranks in double precision")
        try:
            ranks = version.run(Variant(is_exact=True, is_steady=is_steady))
        except (RankError, CollectiveError) as error:
            self._has_exact = False
            self._report(
                "double precision",
                f"the parallel version does not run in it ({error!s:.200}), so rounding cannot "
                "be separated from other differences",
            )
            return judged
        exact = run_exact(version.model, version.task, is_steady=is_steady)
        return apply_exact(judged, _by_key(self._judge(exact, ranks)))


def _by_key(judged: Sequence[Judged]) -> dict[Key, Judged]:
    return {(one.case.kind, one.case.name): one for one in judged}
