"""Runs and compares both versions; where something differs, runs them again to locate it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, final

import torch
from torch import nn

from shardscope.errors import CollectiveError, ParityError, RankError
from shardscope.numerics.noise import as_exact, measure
from shardscope.parallel.parity.cases import Case, Runs, cases
from shardscope.parallel.parity.causes import explain
from shardscope.parallel.parity.execute import Probe, is_cleared
from shardscope.parallel.parity.judge import Judged, judge
from shardscope.parallel.parity.layouts import find_layout, ranks_across
from shardscope.parallel.parity.locate import Kind, Mesh, Origin, find_origins
from shardscope.parallel.parity.looks import Look
from shardscope.parallel.parity.opinions import (
    accept_own_outputs,
    apply_exact,
    apply_steady,
    is_coarse,
)
from shardscope.parallel.parity.ops import OpProbe, WrongOp, find_op
from shardscope.parallel.parity.outcome import Key, Outcome, find_stages
from shardscope.parallel.parity.probe import ModuleProbe, Role, Spot
from shardscope.parallel.parity.single import draws_numbers, run_all, run_exact, run_task
from shardscope.parallel.parity.task import Task
from shardscope.parallel.parity.ties import BrokenTie, find_broken_ties
from shardscope.parallel.parity.variants import AS_IT_IS, MARKED, Variant
from shardscope.parallel.parity.weights import TracedWeights, is_unclear
from shardscope.record import TOLERABLE, Agreement, Phase, Suspect, TensorKind

__all__ = ["Examined", "Report", "Version", "examine"]

Report = Callable[[str, str], None]
"""Takes gaps: the place, and the fact."""

# Parameters may well have another shape.
_WRONG_VALUES = (Agreement.DIFFERS, Agreement.RANKS_DISAGREE, Agreement.NONFINITE)
_MAX_MASKED = 8  # shards for each of which the single device is run
_NAMED = 3  # parameters that a gap names


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
        """Those along which the batch is sharded."""

    @property
    def batch_dim(self) -> int:
        """The dim of the inputs that is sharded there."""

    def run(self, variant: Variant = AS_IT_IS, look: Look | None = None) -> list[Outcome]:
        """The outcome of each rank."""


@final
@dataclass(frozen=True, eq=False)
class Examined:
    """Verdicts on all tensors, and where the versions diverge."""

    judged: list[Judged]
    reference: Outcome  # of the single device
    has_exact: bool = True  # a run in double precision gave the noise
    origins: list[Origin] = field(default_factory=list)
    types: Mapping[str, str] = field(default_factory=dict)  # classes of modules
    op: WrongOp | None = None  # at the first origin
    unheld: Mapping[str, str] = field(default_factory=dict)  # weights that are on no rank
    num_calls: int = 1  # of the model, on a rank
    num_cleared: int = 0  # times that a rank cleared gradients before another backward
    broken_ties: Sequence[BrokenTie] = ()


def examine(
    version: Version, *, precision: torch.dtype | None, report: Report, tell: Callable[[str], None]
) -> Examined:
    """Run, compare, and where something differs find the place."""
    session = _Session(version, precision, report, tell)
    judged, reference, has_exact = session.compare()
    is_steady = False
    if _wrong(judged) and draws_numbers(version.model, version.task):
        judged, is_steady = session.compare_steady(judged)
    if not _wrong(judged):
        return Examined(_without_parameters(judged), reference, has_exact)
    # Where ranks drew different numbers, it is the draw that has to be found.
    is_steady &= not any(result.verdict.suspect is Suspect.RANDOMNESS for result in _wrong(judged))
    examined = Examined(
        judged,
        reference,
        has_exact,
        unheld=session.find_unheld(),
        num_calls=session.num_calls,
        num_cleared=session.num_cleared,
        broken_ties=session.broken_ties,
    )
    return session.locate(examined, is_steady=is_steady)


def _wrong(judged: Sequence[Judged]) -> list[Judged]:
    results = _without_parameters(judged)
    return [result for result in results if result.verdict.agreement not in TOLERABLE]


def _without_parameters(judged: Sequence[Judged]) -> list[Judged]:
    """Weights may have any form, as long as what is computed from them is right."""
    return [result for result in judged if result.case.kind is not TensorKind.PARAMETER]


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
        self._traced: TracedWeights | None = None
        self.num_calls = 1  # of the model, on a rank
        self.num_cleared = 0  # times that a rank cleared gradients before another backward
        self.broken_ties: list[BrokenTie] = []
        self._is_clear = False  # names and shapes say where all weights are

        names = list(version.axes)
        self._mesh = Mesh(
            tuple(version.axes.values()),
            tuple(names.index(axis) for axis in version.batch_axes),
            version.batch_dim,
        )

    def compare(self, *, is_steady: bool = False) -> tuple[list[Judged], Outcome, bool]:
        """Verdicts on all tensors, the single device's outcome, and if double precision ran."""
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
        ranks = version.run(Variant(is_steady=is_steady))
        self._trace_weights(runs.reference, ranks)
        judged = self._judge(runs, ranks)
        if self._has_exact and (is_coarse(judged) or _wrong(judged)):
            judged = self._reconsider(judged, is_steady=is_steady)
        self.num_calls = max(rank.num_calls for rank in ranks)
        self.num_cleared = max(rank.num_cleared for rank in ranks)
        self._report_cleared([runs.reference, *ranks])
        stages = find_stages(runs.reference.parameters, ranks)
        return accept_own_outputs(judged, stages, version.axes), runs.reference, has_exact

    def _report_cleared(self, outcomes: Sequence[Outcome]) -> None:
        """Say so where gradients were computed, and none is left to compare."""
        if all(run.num_backwards and is_cleared(run.gradients.values()) for run in outcomes):
            self._report(
                "gradients",
                "not compared: the step runs backward, but no gradient is left when it returns, as "
                "after zero_grad(); call zero_grad() at the start of the step instead",
            )

    def compare_steady(self, judged: list[Judged]) -> tuple[list[Judged], bool]:
        """The verdicts after runs without random numbers, and whether those runs succeeded."""
        try:
            steady, *_ = self.compare(is_steady=True)
        except (RankError, CollectiveError, ParityError) as error:
            fact = f"a run without random numbers failed ({error!s:.200})"
            self._report("randomness", fact)
            return judged, False
        return apply_steady(judged, _by_key(steady)), True

    def find_unheld(self) -> Mapping[str, str]:
        """Weights of which some elements are on no rank."""
        return {} if self._traced is None else self._traced.find_unheld()

    def locate(self, examined: Examined, *, is_steady: bool) -> Examined:
        """Where the versions diverge, found in double precision if both versions run in it."""
        self._tell("locating the first module that differs")
        probes: list[ModuleProbe] = []

        def make_probe() -> ModuleProbe:
            probes.append(ModuleProbe())
            return probes[-1]

        found = self._look(Look(renamed=self._renamed), make_probe, is_steady=is_steady)
        if found is None:
            return examined
        runs, ranks = found
        origins = find_origins(runs, ranks, self._mesh, probes[0], gradients=examined.judged)
        origins = [
            self._test_own_shard(origin, runs, ranks, is_steady=is_steady) for origin in origins
        ]
        del found, runs, ranks
        op = self._find_op(origins, is_steady=is_steady)
        return replace(examined, origins=origins, types=probes[0].types, op=op)

    def _test_own_shard(
        self, origin: Origin, runs: Runs, ranks: Sequence[Outcome], *, is_steady: bool
    ) -> Origin:
        """Find out whether each rank's gradient comes from its own shard of the output only.

        It does if it is the single device's when the gradient of the module's output is zero
        outside that shard.
        """
        case, layout, module = origin.judged.case, origin.judged.layout, origin.module
        shards = [tensor for tensor in case.ranks if tensor is not None]
        spot = Spot(Phase.FORWARD, Role.OUTPUT, module or "", 0, "").encode()
        output, outputs = runs.reference.seen.get(spot), [rank.seen.get(spot) for rank in ranks]
        own = [tensor for tensor in outputs if tensor is not None]
        is_backward = origin.kind in (Kind.GRADIENT_OF_OUTPUT, Kind.GRADIENT_OF_INPUT)
        is_complete = output is not None and len(shards) == len(own) == len(ranks)
        if not is_backward or module is None or layout is None or case.calls or not is_complete:
            return origin
        if explain(origin.judged, self._version.axes).suspect is not Suspect.UNKNOWN:
            return origin
        assert output is not None
        of_output = find_layout(own, output, self._mesh.sizes)
        if of_output is None or case.floor is None:
            return origin
        indices = torch.arange(output.numel()).reshape(output.shape)
        places = of_output.split(indices, own)
        limit = case.floor.at(4.0)

        def is_limited(lines: Sequence[Sequence[int]]) -> bool:
            """Whether gradients are limited to what the ranks of each line hold together."""
            for line in lines:
                mask = torch.zeros(output.numel(), dtype=output.dtype)
                for rank in line:
                    mask[places[rank].flatten()] = 1
                probe = ModuleProbe((module, mask.reshape(output.shape)))
                variant = Variant(self._has_exact, is_steady=is_steady)
                run_task(self._version.model, self._version.task, variant, probe=probe)
                gradient = probe.seen.get(case.name)
                if gradient is None:
                    return False
                parts = layout.split(as_exact(gradient), shards)
                if not all(limit.allows(measure(as_exact(shards[r]), parts[r])) for r in line):
                    return False
            return True

        for axis, dim in enumerate(of_output.dims):
            lines = ranks_across(self._mesh.sizes, axis)
            if dim is not None and 1 < len(lines) <= _MAX_MASKED and is_limited(lines):
                dims = tuple(dim if at == axis else None for at, dim in enumerate(of_output.dims))
                return replace(origin, own_shard=replace(of_output, dims=dims))
        return origin

    def _find_op(self, origins: Sequence[Origin], *, is_steady: bool) -> WrongOp | None:
        module = origins[0].module if origins and origins[0].phase is Phase.FORWARD else None
        if module is None:
            return None
        self._tell("locating the first op in it")
        probes: list[OpProbe] = []

        def make_probe() -> OpProbe:
            probes.append(OpProbe(module))
            return probes[-1]

        found = self._look(Look(module, self._renamed), make_probe, is_steady=is_steady)
        # Calls on other parts of the batch cannot be compared op by op.
        if found is None or (probes[0].num_calls > 1 and self._mesh.batch_axes):
            return None
        return find_op(*found, self._mesh.sizes, probes[0].consumers)

    def _look(
        self, look: Look, make_probe: Callable[[], Probe], *, is_steady: bool
    ) -> tuple[Runs, list[Outcome]] | None:
        version, is_exact = self._version, self._has_exact
        try:
            ranks = version.run(Variant(is_exact=is_exact, is_steady=is_steady), look)
        except (RankError, CollectiveError) as error:
            what = "modules" if look.ops_in is None else "ops"
            fact = f"the ranks fail while their {what} are recorded ({error!s:.200})"
            self._report("the first difference", fact)
            return None
        run = run_exact if is_exact else run_all
        try:
            singles = run(version.model, version.task, is_steady=is_steady, probe=make_probe)
        except Exception as error:  # noqa: BLE001 - it ran before, and its verdicts stand
            fact = (
                f"the original fails while it is recorded ({type(error).__name__}: {error!s:.160})"
            )
            self._report("the first difference", fact)
            return None
        return singles, ranks

    @property
    def _renamed(self) -> dict[int, dict[str, str]]:
        traced = self._traced
        if traced is None:
            return {}
        return {rank: traced.rename_modules(rank) for rank in range(math.prod(self._mesh.sizes))}

    def _trace_weights(self, reference: Outcome, ranks: Sequence[Outcome]) -> None:
        """Find out which weights each rank holds, where names and shapes do not say it."""
        if self._is_clear or self._traced is not None or not is_unclear(reference, ranks):
            self._is_clear = self._traced is None
            return
        self._tell("tracing the weights")
        try:
            marked = self._version.run(MARKED)
        except (RankError, CollectiveError) as error:
            self._is_clear = True
            self._report(
                "weights",
                f"which rank holds which of them is inferred from names and shapes: sharding a "
                f"model with other weights failed ({error!s:.200})",
            )
            return
        self._traced = TracedWeights(reference.parameters, marked, self._mesh.sizes)
        added = sorted(set().union(*(rank.added for rank in self._traced.apply(ranks))))
        if added:
            fact = f"only in the parallel model, and not compared: {_list(added)}"
            self._report("parameters and buffers", fact)

    def _judge(self, runs: Runs, ranks: Sequence[Outcome]) -> list[Judged]:
        resolved = ranks if self._traced is None else self._traced.apply(ranks)
        self.broken_ties = list(find_broken_ties(runs.reference, resolved))
        sizes, batch_axes, batch_dim = self._mesh
        judged = [
            _judge_scaled(judge(case), case)
            for case in cases(runs, resolved, sizes, batch_axes=batch_axes, batch_dim=batch_dim)
        ]
        odd = [
            result for result in judged if self._is_incomparable(result, runs.reference, resolved)
        ]
        if odd:
            fact = "only in the original, or changed by every call, and not compared: "
            self._report(
                "parameters and buffers", fact + _list([result.case.name for result in odd])
            )
        return [
            result
            for result in judged
            if result not in odd
            and (
                result.case.kind is not TensorKind.PARAMETER
                or result.verdict.agreement in _WRONG_VALUES
            )
        ]

    @staticmethod
    def _is_incomparable(result: Judged, reference: Outcome, ranks: Sequence[Outcome]) -> bool:
        """Whether a difference says nothing.

        A parameter may be computed from others now, as in a reparametrization, and a buffer that
        every call changes has another value where the ranks call the model more or less often.
        """
        if result.case.kind is TensorKind.BUFFER and result.verdict.agreement not in TOLERABLE:
            return any(rank.num_calls != reference.num_calls for rank in ranks)
        if result.case.kind is not TensorKind.GRADIENT or result.verdict.agreement in TOLERABLE:
            return False
        module, _, parameter = result.case.name.rpartition(".")
        is_absent = result.verdict.agreement is Agreement.MISSING and all(
            result.case.name in rank.absent for rank in ranks
        )
        prefixes = [f"{module}.parametrizations.{parameter}.", *([f"{module}."] * is_absent)]
        added = {name for rank in ranks for name in rank.added}
        return any(name.startswith(tuple(prefixes)) for name in added)

    def _reconsider(self, judged: list[Judged], *, is_steady: bool) -> list[Judged]:
        """Use double precision where noise may hide an error, or be taken for one."""
        version = self._version
        self._tell("running all ranks in double precision")
        try:
            ranks = version.run(Variant(is_exact=True, is_steady=is_steady))
        except (RankError, CollectiveError) as error:
            self._has_exact = False
            self._report(
                "double precision",
                f"the parallel version does not run in it ({error!s:.200}), so rounding cannot be "
                "distinguished from other differences",
            )
            return judged
        exact = run_exact(version.model, version.task, is_steady=is_steady)
        return apply_exact(judged, _by_key(self._judge(exact, ranks)))


def _judge_scaled(judged: Judged, case: Case) -> Judged:
    """The gradient of an input that is sharded is not averaged, so that it may be larger."""
    is_input = case.kind is TensorKind.GRADIENT and case.name.startswith("inputs")
    if judged.verdict.agreement in TOLERABLE or not is_input or not case.batch_axes:
        return judged
    count = math.prod(case.sizes[axis] for axis in case.batch_axes)
    ranks = tuple(None if tensor is None else tensor / count for tensor in case.ranks)
    scaled = judge(replace(case, ranks=ranks))
    return scaled if scaled.verdict.agreement in TOLERABLE else judged


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _by_key(judged: Sequence[Judged]) -> dict[Key, Judged]:
    return {(result.case.kind, result.case.name): result for result in judged}
