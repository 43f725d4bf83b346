"""Where the two versions diverge: the first module call whose result, or gradient, differs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, final

import torch

from shardscope.parallel.parity.cases import Case, Runs, cases, drop_extra_calls
from shardscope.parallel.parity.judge import Judged, judge
from shardscope.parallel.parity.layouts import Layout, ranks_by_distance
from shardscope.parallel.parity.outcome import Outcome, find_stages
from shardscope.parallel.parity.probe import ModuleProbe, Role, Spot
from shardscope.record import TOLERABLE, Agreement, Phase, TensorKind

__all__ = ["Kind", "Mesh", "Origin", "find_origins", "is_within"]

# Tensors of another shape or dtype on the way may be as they should be.
_WRONG = (
    Agreement.DIFFERS,
    Agreement.RANKS_DISAGREE,
    Agreement.NONFINITE,
    Agreement.MISSING,  # of gradients
)


class Mesh(NamedTuple):
    """The sizes of a mesh, and along which of its axes and which dim the batch is sharded."""

    sizes: tuple[int, ...]
    batch_axes: tuple[int, ...] = ()
    batch_dim: int = 0


class Kind(StrEnum):
    """What differs first."""

    OUTPUT = "output"  # of a module
    INPUT = "input"  # of a module, which its caller computed
    GRADIENT_OF_INPUT = "gradient of input"  # of a module, which its backward returned
    GRADIENT_OF_OUTPUT = "gradient of output"  # of a module, from the code of its caller
    GRADIENT_OF_PARAMETER = "gradient of parameter"  # though that of its module's output agrees
    LOSS = "loss"  # the gradient of the model's own output
    BUFFER = "buffer"  # though all else agrees


@final
@dataclass(frozen=True, eq=False)
class Origin:
    """A place where the versions diverge: tensors that agree go in, and one that differs comes out.

    `module` is the one whose code it is, None outside the model; `at` the one whose input, output
    or parameter it is that differs. `is_first` says that all it is computed from agrees.
    """

    kind: Kind
    module: str | None
    judged: Judged
    at: str = ""
    path: str = ""
    is_first: bool = True
    inputs: tuple[torch.Tensor, ...] = ()  # the single device's, of the module whose output it is
    outer: Origin | None = None  # the output of its caller, if that differs too
    own_shard: Layout | None = None  # of the output of `module`, to which the gradient is limited

    @property
    def phase(self) -> Phase:
        """Forward or backward."""
        is_forward = self.kind in (Kind.OUTPUT, Kind.INPUT)
        return Phase.FORWARD if is_forward else Phase.BACKWARD


def find_origins(
    runs: Runs,
    ranks: Sequence[Outcome],
    mesh: Mesh,
    probe: ModuleProbe,
    *,
    gradients: Sequence[Judged],
) -> list[Origin]:
    """Where the versions diverge: forward, or, where outputs agree, backward.

    `probe` is the single device's, `gradients` are those of parameters, judged.
    """
    seen = _Seen(runs, ranks, mesh, probe)
    if not seen.is_fine("", Phase.FORWARD):
        forward = next(_find_forward(seen), None)
        if forward is not None:
            return [forward]
    loss = next(_find_loss(seen), None)
    if loss is not None:
        return [loss]
    own = list(_find_own(seen, gradients))
    back = next(_find_backward(seen), None)
    if back is None or any(_is_same_place(origin.module, back.module) for origin in own):
        return own
    return [*own, back]


def _is_same_place(module: str | None, outer: str | None) -> bool:
    if module is None or outer is None:
        return False
    return module == outer or (bool(outer) and is_within(module, outer))


@final
class _Seen:
    """What probes recorded on the single device and on the ranks, compared."""

    def __init__(
        self, runs: Runs, ranks: Sequence[Outcome], mesh: Mesh, probe: ModuleProbe
    ) -> None:
        self.callers = probe.callers
        self.same = probe.same
        self.origins = probe.origins
        self.consumers: dict[Spot, list[Spot]] = {}
        for spot, origins in probe.origins.items():
            for origin in origins:
                self.consumers.setdefault(origin, []).append(spot)
        frozen = frozenset(runs.reference.parameters).intersection(*(r.frozen for r in ranks))
        self._frozen_modules = {name.rpartition(".")[0] for name in frozen}
        ranks = [_match_calls(rank, runs.reference) for rank in ranks]
        self.judged = self._judge(runs, ranks, mesh, Phase.FORWARD, 1.0)
        self.judged |= self._judge_gradients(runs, ranks, mesh)
        self._reference = runs.reference.seen

    def _judge_gradients(
        self, runs: Runs, ranks: Sequence[Outcome], mesh: Mesh
    ) -> dict[Spot, Judged]:
        """Ranks that average gradients have larger ones on the way, those that sum them do not.

        Whichever factor makes most of them agree is the one that the program means.
        """
        factors = [math.prod(mesh.sizes[axis] for axis in mesh.batch_axes), 1]
        for count in range(1, len(mesh.sizes) + 1):
            factors += [math.prod(some) for some in itertools.combinations(mesh.sizes, count)]
        best: dict[Spot, Judged] = {}
        best_count = -1
        for factor in dict.fromkeys(factors):
            judged = self._judge(runs, ranks, mesh, Phase.BACKWARD, float(factor))
            count = sum(result.verdict.agreement in TOLERABLE for result in judged.values())
            if count > best_count:
                best, best_count = judged, count
            if count == len(judged):
                break
        return best

    @staticmethod
    def _judge(
        runs: Runs, ranks: Sequence[Outcome], mesh: Mesh, phase: Phase, factor: float
    ) -> dict[Spot, Judged]:
        """All calls of a module together, or, where these differ, one by one."""
        calls: dict[Spot, list[Spot]] = {}
        for name in runs.reference.seen:
            spot = Spot.decode(name)
            if spot.phase is phase:
                calls.setdefault(spot._replace(call=0), []).append(spot)
        found: dict[Spot, Judged] = {}
        for spot, judged in _judge_spots(runs, ranks, mesh, factor, set(calls), is_merged=True):
            is_one = judged.verdict.agreement in TOLERABLE or len(calls[spot]) == 1
            found |= dict.fromkeys(calls[spot] if is_one else [spot], judged)
        several = {
            spot
            for first, spots in calls.items()
            for spot in spots
            if first in found and len(spots) > 1 and found[first].verdict.agreement not in TOLERABLE
        }
        found |= dict(_judge_spots(runs, ranks, mesh, factor, several, is_merged=False))
        return {spot: found[spot] for spots in calls.values() for spot in spots if spot in found}

    def wrong(self, phase: Phase) -> Iterator[tuple[Spot, Judged]]:
        """Tensors that differ, in order, unless what is computed from them agrees again.

        A layer may leave its ranks with partial sums that its caller, or another module, reduces.
        """
        for spot, judged in self.judged.items():
            is_wrong = spot.phase is phase and judged.verdict.agreement in _WRONG
            if is_wrong and not self._is_made_right(spot):
                yield spot, judged

    def _is_made_right(self, spot: Spot, known: frozenset[Spot] = frozenset()) -> bool:
        forward = spot._replace(phase=Phase.FORWARD)
        first = self.same[forward]
        known |= {first}
        is_forward = spot.phase is Phase.FORWARD
        # On ranks a module may take a tensor of its own, made from the one that others take too:
        # its gradient is then that of one use, and the sum of all uses is what counts.
        total = self.judged.get(first._replace(phase=spot.phase))
        if not is_forward and total is not None and total.verdict.agreement in TOLERABLE:
            return True
        neighbours = self.consumers.get(first, ()) if is_forward else self.origins.get(first, ())
        others = [
            neighbour._replace(phase=spot.phase)
            for neighbour in neighbours
            if neighbour._replace(phase=spot.phase) in self.judged
            and self.same[neighbour] not in known
        ]
        if others:
            return all(
                self.judged[other].verdict.agreement in TOLERABLE
                or self._is_made_right(other, known)
                for other in others
            )
        return is_forward and any(
            self.is_fine(caller, spot.phase) for caller in self._callers_of(spot)
        )

    def is_frozen(self, module: str) -> bool:
        """Whether the module has a parameter of its own that no rank trains."""
        return module in self._frozen_modules

    def is_behind_frozen(self, spot: Spot) -> bool:
        """Whether a tensor is computed only from parameters that the ranks do not train."""
        first = self.same[spot._replace(phase=Phase.FORWARD)]
        if first.role is Role.OUTPUT and first.module in self._frozen_modules:
            return True
        origins = self.origins.get(first)
        return bool(origins) and all(map(self.is_behind_frozen, origins or ()))

    def _callers_of(self, spot: Spot) -> Iterator[str]:
        module = self.callers.get(spot.module)
        while module is not None:
            yield module
            module = self.callers.get(module)

    def is_fine(self, module: str, phase: Phase, role: Role = Role.OUTPUT) -> bool | None:
        """Whether all that the module returned, or took, agrees; None if nothing was compared."""
        found = [
            judged.verdict.agreement
            for spot, judged in self.judged.items()
            if (spot.phase, spot.role, spot.module) == (phase, role, module)
        ]
        return all(agreement in TOLERABLE for agreement in found) if found else None

    def inputs_of(self, spot: Spot) -> tuple[torch.Tensor, ...]:
        """What the module took in that call on the single device."""
        return tuple(
            tensor
            for name, tensor in self._reference.items()
            if Spot.decode(name)[:4] == (Phase.FORWARD, Role.INPUT, spot.module, spot.call)
        )

    def find_outer(self, spot: Spot) -> Origin | None:
        """The output of the caller, if that differs too."""
        caller = self.callers.get(spot.module)
        for other, judged in self.judged.items():
            is_its = (other.phase, other.role, other.module) == (spot.phase, Role.OUTPUT, caller)
            if is_its and caller is not None and judged.verdict.agreement in _WRONG:
                inputs = self.inputs_of(other)
                return Origin(
                    Kind.OUTPUT,
                    caller,
                    judged,
                    caller,
                    other.path,
                    inputs=inputs,
                    outer=self.find_outer(other),
                )
        return None

    def takers(self, spot: Spot, *, is_outer: bool = False) -> list[str]:
        """The modules that take the very tensor of a spot, none that calls another of them.

        Or, where `is_outer`, none that another of them calls.
        """
        first = self.same[spot._replace(phase=Phase.FORWARD)]
        modules = dict.fromkeys(
            taken.module
            for taken, its_first in self.same.items()
            if its_first == first and taken.role is Role.INPUT
        )
        callers = {
            module: set(self._callers_of(first._replace(module=module))) for module in modules
        }
        if is_outer:
            return [module for module in modules if not callers[module] & modules.keys()]
        outer = set().union(*callers.values())
        return [module for module in modules if module not in outer]


def _match_calls(rank: Outcome, reference: Outcome) -> Outcome:
    """A rank's spots with the single device's numbers of calls, without extra calls."""
    calls: dict[Spot, list[Spot]] = {}
    own_calls: dict[Spot, list[Spot]] = {}
    for seen, table in ((reference.seen, calls), (rank.seen, own_calls)):
        for spot in map(Spot.decode, seen):
            table.setdefault(spot._replace(call=0), []).append(spot)
    matched: dict[str, torch.Tensor] = {}
    for key, spots in own_calls.items():
        tensors = [rank.seen[spot.encode()] for spot in spots]
        wanted = [reference.seen[spot.encode()] for spot in calls.get(key, ())]
        chosen = drop_extra_calls(tensors, wanted)
        names = calls[key] if len(chosen) == len(wanted) else spots
        matched |= {spot.encode(): tensor for spot, tensor in zip(names, chosen, strict=True)}
    return replace(rank, seen=matched)


def _judge_spots(
    runs: Runs,
    ranks: Sequence[Outcome],
    mesh: Mesh,
    factor: float,
    wanted: set[Spot],
    *,
    is_merged: bool,
) -> Iterator[tuple[Spot, Judged]]:
    """What was recorded at some spots; of all calls together, under the first one's name."""

    def choose(outcome: Outcome, divisor: float = 1.0) -> Outcome:
        outputs = []
        for name, tensor in outcome.seen.items():
            spot = Spot.decode(name)
            spot = spot._replace(call=0) if is_merged else spot
            if spot in wanted:
                outputs.append((spot.encode(), tensor if divisor == 1.0 else tensor / divisor))
        return Outcome(outputs, {}, {})

    singles = Runs(
        choose(runs.reference),
        None if runs.exact is None else choose(runs.exact),
        tuple(
            (choose(rounded), None if exact is None else choose(exact))
            for rounded, exact in runs.jittered
        ),
        runs.precision,
    )
    chosen = [choose(rank, factor) for rank in ranks]
    modules = [{Spot.decode(name).module for name in rank.seen} for rank in ranks]
    stages = find_stages(runs.reference.parameters, ranks)
    for case in cases(singles, chosen, mesh.sizes, batch_dim=mesh.batch_dim):
        spot = Spot.decode(case.name)
        # Of a scalar, such as a loss, each rank may have its own; its gradient says nothing.
        if case.reference is None or case.reference.ndim == 0:
            continue
        case = _fill_absent(case, [spot.module not in own for own in modules])
        is_missing = spot.phase is Phase.BACKWARD and all(tensor is None for tensor in case.ranks)
        forward = spot._replace(phase=Phase.FORWARD).encode()
        if None not in case.ranks or (is_missing and all(forward in rank.seen for rank in ranks)):
            yield spot, _judge_stages(case, stages)


def _judge_stages(case: Case, stages: Sequence[Sequence[int]]) -> Judged:
    """A module that is divided over pipeline stages takes and returns its own on one of them."""
    judged = judge(case)
    if judged.verdict.agreement in TOLERABLE or len(stages) < 2 or None in case.ranks:
        return judged
    by_stage = (judge(case.choose_ranks(stage)) for stage in stages)
    return next((own for own in by_stage if own.verdict.agreement in TOLERABLE), judged)


def _fill_absent(case: Case, is_absent: Sequence[bool]) -> Case:
    """For ranks that do not run a module, such as other ranks' experts, a rank next to them."""
    if not any(is_absent) or all(is_absent):
        return case
    near = [
        next(other for other in ranks_by_distance(case.sizes, rank) if not is_absent[other])
        for rank in range(len(case.ranks))
    ]
    return replace(case, ranks=tuple(case.ranks[other] for other in near), calls=())


def _find_forward(seen: _Seen) -> Iterator[Origin]:
    for spot, judged in seen.wrong(Phase.FORWARD):
        if spot.role is Role.INPUT:
            caller = seen.callers.get(spot.module)
            agreements = [
                seen.judged[origin].verdict.agreement
                for origin in seen.origins.get(spot, ())
                if origin in seen.judged
            ]
            is_first = bool(agreements) and all(agreement in TOLERABLE for agreement in agreements)
            yield Origin(Kind.INPUT, caller, judged, spot.module, spot.path, is_first)
        else:
            is_first = seen.is_fine(spot.module, Phase.FORWARD, Role.INPUT) is True
            yield Origin(
                Kind.OUTPUT,
                spot.module,
                judged,
                spot.module,
                spot.path,
                is_first,
                seen.inputs_of(spot),
                seen.find_outer(spot),
            )


def _find_loss(seen: _Seen) -> Iterator[Origin]:
    for spot, judged in seen.judged.items():
        is_gradient = spot.phase is Phase.BACKWARD and spot.role is Role.OUTPUT
        if is_gradient and not spot.module and judged.verdict.agreement in _WRONG:
            yield Origin(Kind.LOSS, None, judged, "", spot.path)


def _find_backward(seen: _Seen) -> Iterator[Origin]:
    """The first gradient that differs."""
    for spot, judged in seen.wrong(Phase.BACKWARD):
        is_missing = judged.verdict.agreement is Agreement.MISSING
        if is_missing and seen.is_behind_frozen(spot):  # the parameter itself is reported
            continue
        takers = seen.takers(spot, is_outer=is_missing)
        if len(takers) == 1:
            yield Origin(Kind.GRADIENT_OF_INPUT, takers[0], judged, takers[0], spot.path)
        elif takers:
            callers = {seen.callers.get(module) for module in takers}
            caller = callers.pop() if len(callers) == 1 else seen.callers.get(spot.module)
            yield Origin(Kind.GRADIENT_OF_OUTPUT, caller, judged, spot.module, spot.path)
        else:
            caller = seen.callers.get(spot.module)
            yield Origin(Kind.GRADIENT_OF_OUTPUT, caller, judged, spot.module, spot.path)


def _find_own(seen: _Seen, gradients: Sequence[Judged]) -> Iterator[Origin]:
    """Parameters whose gradient differs although that of their module's output agrees."""
    for judged in gradients:
        if judged.case.kind is not TensorKind.GRADIENT or judged.verdict.agreement in TOLERABLE:
            continue
        module, _, parameter = judged.case.name.rpartition(".")
        is_fine = seen.is_fine(module, Phase.BACKWARD)
        if judged.verdict.agreement is Agreement.MISSING and seen.is_frozen(module):
            is_fine = None
        if is_fine is not False and not judged.case.name.startswith("inputs"):
            is_first = is_fine is True
            yield Origin(Kind.GRADIENT_OF_PARAMETER, module, judged, module, parameter, is_first)


def is_within(module: str, other: str) -> bool:
    """Whether a module, or a name in it, is the other module or in it."""
    return not other or module == other or module.startswith(f"{other}.")
