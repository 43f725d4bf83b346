"""Finds where the versions diverge: the first module call whose result or gradient differs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import final

import torch

from shardscope.parallel.equivalence import (
    Mesh,
    Runs,
    StepResult,
    TensorComparison,
)
from shardscope.parallel.parity.points import are_calls_aligned, compare_points, match_calls
from shardscope.parallel.parity.probe import ModuleProbe, ProbePoint, Role
from shardscope.parallel.parity.result import Origin, OriginKind, is_within
from shardscope.parallel.parity.scale_causes import find_factor
from shardscope.record import TOLERABLE, Agreement, Phase, TensorKind

# Intermediate tensors may rightly have another shape or dtype.
_WRONG = (
    Agreement.DIFFERS,
    Agreement.RANKS_DISAGREE,
    Agreement.NONFINITE,
    Agreement.MISSING,  # of gradients
)
_MAX_EXCHANGED = 16  # modules whose inputs are looked for at other modules


def find_origins(
    runs: Runs,
    ranks: Sequence[StepResult],
    mesh: Mesh,
    probe: ModuleProbe,
    *,
    gradients: Sequence[TensorComparison],
) -> list[Origin]:
    """Where the versions diverge: in forward, or, if outputs agree, in backward.

    `probe` is the single device's; `gradients` are the compared gradients of parameters.
    """
    wrong = [result for result in gradients if result.verdict.agreement not in TOLERABLE]
    is_mostly_right = 2 * len(wrong) < len(gradients)
    wrong_modules = {
        result.case.name.rpartition(".")[0]
        for result in wrong
        if result.case.kind is TensorKind.GRADIENT
    }
    probed = _ProbeComparisons(
        runs, ranks, mesh, probe, has_own_scale=is_mostly_right, wrong_modules=wrong_modules
    )
    if not probed.is_fine("", Phase.FORWARD):
        forward = next(_find_forward(probed), None)
        if forward is not None:
            return [forward]
    loss = next(_find_loss(probed), None)
    if loss is not None:
        return [loss]
    parameter_origins = list(_find_own(probed, gradients))
    backward = next(_find_backward(probed), None)
    if backward is None or any(
        _is_same_module(origin.module, backward.module) for origin in parameter_origins
    ):
        return parameter_origins
    calls = _order_modules(runs.reference)
    start = calls.get(backward.named_module, 0)
    # Where it is not known whether the gradient of a module's output agrees, and the module is
    # called before the gradient that differs first, its parameters differ as a consequence.
    own = [o for o in parameter_origins if o.is_first or calls.get(o.module or "", start) >= start]
    return [*own, backward]


def _order_modules(reference: StepResult) -> dict[str, int]:
    """The modules that are called in forward, with their positions in that order."""
    points = map(ProbePoint.decode, reference.snapshots)
    called = dict.fromkeys(point.module for point in points if point.phase is Phase.FORWARD)
    return {module: position for position, module in enumerate(called)}


def _is_same_module(module: str | None, outer: str | None) -> bool:
    if module is None or outer is None:
        return False
    return module == outer or (bool(outer) and is_within(module, outer))


@final
class _ProbeComparisons:
    """The compared tensors that probes recorded on the single device and on the ranks."""

    def __init__(
        self,
        runs: Runs,
        ranks: Sequence[StepResult],
        mesh: Mesh,
        probe: ModuleProbe,
        *,
        has_own_scale: bool = False,
        wrong_modules: Collection[str] = (),
    ) -> None:
        """With `has_own_scale`, backward may run with any loss scale, undone afterwards.

        `wrong_modules` have a parameter of their own whose gradient differs.
        """
        self._has_own_scale = has_own_scale
        self._wrong_modules = wrong_modules
        self.callers = probe.callers
        self.first_points = probe.first_points
        self.origins = probe.origins
        self.consumers: dict[ProbePoint, list[ProbePoint]] = {}
        for point, origins in probe.origins.items():
            for origin in origins:
                self.consumers.setdefault(origin, []).append(point)
        frozen = frozenset(runs.reference.parameters).intersection(*(r.frozen for r in ranks))
        self._frozen_modules = {name.rpartition(".")[0] for name in frozen}
        self._modules = [{ProbePoint.decode(n).module for n in r.snapshots} for r in ranks]
        ranks = [match_calls(rank, runs.reference) for rank in ranks]
        self._are_calls_aligned = not mesh.batch_axes or are_calls_aligned(runs, ranks, mesh)
        self.comparisons = self._compare(runs, ranks, mesh, Phase.FORWARD, 1.0)
        self.comparisons |= self._compare_gradients(runs, ranks, mesh)
        self._reference = runs.reference.snapshots

    def _compare_gradients(
        self, runs: Runs, ranks: Sequence[StepResult], mesh: Mesh
    ) -> dict[ProbePoint, TensorComparison]:
        """Compare gradients, scaled by the factor that makes most of them agree.

        Ranks that average parameter gradients have larger intermediate gradients; ranks
        that sum do not.
        """
        factors: list[float | None] = [
            math.prod(mesh.sizes[axis] for axis in mesh.batch_axes),
            1,
        ]
        for count in range(1, len(mesh.sizes) + 1):
            factors += [math.prod(subset) for subset in itertools.combinations(mesh.sizes, count)]
        if self._has_own_scale:
            unscaled = self._compare(runs, ranks, mesh, Phase.BACKWARD, 1.0)
            factors += [find_factor(comparison) for comparison in unscaled.values()]
        best: dict[ProbePoint, TensorComparison] = {}
        best_count = -1
        for factor in dict.fromkeys(filter(None, factors)):
            comparisons = self._compare(runs, ranks, mesh, Phase.BACKWARD, float(factor))
            count = sum(result.verdict.agreement in TOLERABLE for result in comparisons.values())
            if count > best_count:
                best, best_count = comparisons, count
            if count == len(comparisons):
                break
        return best

    def _compare(
        self, runs: Runs, ranks: Sequence[StepResult], mesh: Mesh, phase: Phase, factor: float
    ) -> dict[ProbePoint, TensorComparison]:
        """Compare all calls of a module together, or, where these differ, one by one."""
        calls: dict[ProbePoint, list[ProbePoint]] = {}
        for name in runs.reference.snapshots:
            point = ProbePoint.decode(name)
            if point.phase is phase:
                calls.setdefault(point._replace(call=0), []).append(point)
        results: dict[ProbePoint, TensorComparison] = {}
        for point, comparison in compare_points(
            runs, ranks, mesh, factor, set(calls), is_merged=True
        ):
            is_shared = (
                comparison.verdict.agreement in TOLERABLE
                or len(calls[point]) == 1
                or not self._are_calls_aligned
            )
            results |= dict.fromkeys(calls[point] if is_shared else [point], comparison)
        several = {
            point
            for first, points in calls.items()
            for point in points
            if first in results
            and len(points) > 1
            and results[first].verdict.agreement not in TOLERABLE
            and self._are_calls_aligned
        }
        results |= dict(compare_points(runs, ranks, mesh, factor, several, is_merged=False))
        return {
            point: results[point]
            for points in calls.values()
            for point in points
            if point in results
        }

    def wrong(self, phase: Phase) -> Iterator[tuple[ProbePoint, TensorComparison]]:
        """Tensors that differ, in order, unless the tensors computed from them agree again.

        A layer may return partial sums that its caller, or another module, reduces, or tokens in an
        order of its own; gradients of such tensors say nothing.
        """
        for point, comparison in self.comparisons.items():
            is_wrong = point.phase is phase and comparison.verdict.agreement in _WRONG
            if phase is Phase.BACKWARD:
                is_wrong &= self._is_right_in_forward(point)
            if is_wrong and not self.is_corrected_later(point):
                yield point, comparison

    def _is_right_in_forward(self, point: ProbePoint) -> bool:
        forward = self.comparisons.get(point._replace(phase=Phase.FORWARD))
        return forward is None or forward.verdict.agreement not in _WRONG

    def is_corrected_later(
        self, point: ProbePoint, known: frozenset[ProbePoint] = frozenset()
    ) -> bool:
        """Whether what is computed from a tensor that differs agrees again.

        In backward, that includes the gradients of the parameters of the module that returned it.
        """
        is_output = point.phase is Phase.BACKWARD and point.role is Role.OUTPUT
        if is_output and point.module in self._wrong_modules:
            return False
        forward = point._replace(phase=Phase.FORWARD)
        first = self.first_points[forward]
        known |= {first}
        is_forward = point.phase is Phase.FORWARD
        # On ranks, a module may take its own copy of a tensor that several modules take. Its
        # gradient is then that of one use, and the sum over all uses is compared.
        total = self.comparisons.get(first._replace(phase=point.phase))
        if not is_forward and total is not None and total.verdict.agreement in TOLERABLE:
            return True
        neighbours = self.consumers.get(first, ()) if is_forward else self.origins.get(first, ())
        neighbour_points = [
            neighbour._replace(phase=point.phase)
            for neighbour in neighbours
            if neighbour._replace(phase=point.phase) in self.comparisons
            and self.first_points[neighbour] not in known
        ]
        if neighbour_points:
            return all(
                self.comparisons[neighbour_point].verdict.agreement in TOLERABLE
                or self.is_corrected_later(neighbour_point, known)
                for neighbour_point in neighbour_points
            )
        return is_forward and any(
            self.is_fine(caller, point.phase) for caller in self._callers_of(point)
        )

    def is_on_all_ranks(self, module: str) -> bool:
        """Whether every rank calls the module."""
        return all(module in modules for modules in self._modules)

    def is_frozen(self, module: str) -> bool:
        """Whether the module has a parameter of its own that no rank trains."""
        return module in self._frozen_modules

    def is_behind_frozen(self, point: ProbePoint) -> bool:
        """Whether a tensor is computed only from parameters that the ranks do not train."""
        first = self.first_points[point._replace(phase=Phase.FORWARD)]
        if first.role is Role.OUTPUT and first.module in self._frozen_modules:
            return True
        origins = self.origins.get(first)
        return bool(origins) and all(map(self.is_behind_frozen, origins or ()))

    def _callers_of(self, point: ProbePoint) -> Iterator[str]:
        module = self.callers.get(point.module)
        while module is not None:
            yield module
            module = self.callers.get(module)

    def is_fine(self, module: str, phase: Phase, role: Role = Role.OUTPUT) -> bool | None:
        """Whether all outputs, or inputs, of a module agree; None if none could be compared.

        Gradients of tensors that differ, such as tokens in another order, cannot.
        """
        agreements = [
            comparison.verdict.agreement
            for point, comparison in self.comparisons.items()
            if (point.phase, point.role, point.module) == (phase, role, module)
            and (phase is Phase.FORWARD or self._is_right_in_forward(point))
        ]
        return all(agreement in TOLERABLE for agreement in agreements) if agreements else None

    def inputs_of(self, point: ProbePoint) -> tuple[torch.Tensor, ...]:
        """The inputs of the module in that call on the single device."""
        return tuple(
            tensor
            for name, tensor in self._reference.items()
            if ProbePoint.decode(name)[:4] == (Phase.FORWARD, Role.INPUT, point.module, point.call)
        )

    def terms_of(self, point: ProbePoint) -> dict[str, torch.Tensor]:
        """What modules return that the module calls in that call, on the single device."""
        terms: dict[str, torch.Tensor] = {}
        for name, tensor in self._reference.items():
            inner = ProbePoint.decode(name)
            is_output = inner.phase is Phase.FORWARD and inner.role is Role.OUTPUT
            if is_output and self.callers.get(inner.module) == point.module:
                terms.setdefault(inner.module, tensor)
        return terms

    def find_exchanged(self) -> tuple[str, str] | None:
        """A module that takes on the ranks what another one takes on the single device."""
        inputs = {
            point: comparison
            for point, comparison in self.comparisons.items()
            if point.phase is Phase.FORWARD and point.role is Role.INPUT and point.module
        }
        wrong = (
            (point, comparison)
            for point, comparison in inputs.items()
            if comparison.verdict.agreement in _WRONG and comparison.full
        )
        for point, comparison in itertools.islice(wrong, _MAX_EXCHANGED):
            for wanted, candidate in inputs.items():
                target, floor = candidate.case.target, candidate.case.floor
                if (
                    wanted.module != point.module
                    and target is not None
                    and floor is not None
                    and all(
                        full.shape == target.shape and floor.scale_by(4.0).covers(full, target)
                        for full in comparison.full
                    )
                ):
                    return point.module, wanted.module
        return None

    def compared_inputs_of(self, point: ProbePoint) -> dict[str, TensorComparison]:
        """The comparisons of the module's inputs in that call, by their paths."""
        return {
            candidate.path: comparison
            for candidate, comparison in self.comparisons.items()
            if candidate[:4] == (Phase.FORWARD, Role.INPUT, point.module, point.call)
        }

    def find_outer(self, point: ProbePoint) -> Origin | None:
        """The output of the caller, if that differs too."""
        caller = self.callers.get(point.module)
        for candidate, comparison in self.comparisons.items():
            is_caller_output = (candidate.phase, candidate.role, candidate.module) == (
                point.phase,
                Role.OUTPUT,
                caller,
            )
            if is_caller_output and caller is not None and comparison.verdict.agreement in _WRONG:
                inputs = self.inputs_of(candidate)
                return Origin(
                    OriginKind.OUTPUT,
                    caller,
                    comparison,
                    caller,
                    candidate.path,
                    inputs=inputs,
                    outer=self.find_outer(candidate),
                )
        return None

    def find_consumers(self, point: ProbePoint, *, is_outer: bool = False) -> list[str]:
        """The modules that take the tensor of a point, without those that call another of them.

        With `is_outer`, without those that another of them calls.
        """
        first = self.first_points[point._replace(phase=Phase.FORWARD)]
        modules = dict.fromkeys(
            consumer.module
            for consumer, first_point in self.first_points.items()
            if first_point == first and consumer.role is Role.INPUT
        )
        callers = {
            module: set(self._callers_of(first._replace(module=module))) for module in modules
        }
        if is_outer:
            return [module for module in modules if not callers[module] & modules.keys()]
        outer = set().union(*callers.values())
        return [module for module in modules if module not in outer]


def _find_forward(probed: _ProbeComparisons) -> Iterator[Origin]:
    for point, comparison in probed.wrong(Phase.FORWARD):
        if point.role is Role.INPUT:
            caller = probed.callers.get(point.module)
            agreements = [
                probed.comparisons[origin].verdict.agreement
                for origin in probed.origins.get(point, ())
                if origin in probed.comparisons
            ]
            is_first = bool(agreements) and all(agreement in TOLERABLE for agreement in agreements)
            yield Origin(
                OriginKind.INPUT,
                caller,
                comparison,
                point.module,
                point.path,
                is_first,
                is_of_stage=not probed.is_on_all_ranks(point.module),
                exchanged=probed.find_exchanged() if is_first else None,
            )
        else:
            is_first = probed.is_fine(point.module, Phase.FORWARD, Role.INPUT) is True
            yield Origin(
                OriginKind.OUTPUT,
                point.module,
                comparison,
                point.module,
                point.path,
                is_first,
                probed.inputs_of(point),
                probed.compared_inputs_of(point),
                probed.find_outer(point),
                terms=probed.terms_of(point),
            )


def _find_loss(probed: _ProbeComparisons) -> Iterator[Origin]:
    for point, comparison in probed.comparisons.items():
        is_gradient = point.phase is Phase.BACKWARD and point.role is Role.OUTPUT
        is_wrong = comparison.verdict.agreement in _WRONG
        if is_gradient and not point.module and is_wrong and not probed.is_corrected_later(point):
            yield Origin(OriginKind.LOSS, None, comparison, "", point.path)


def _find_backward(probed: _ProbeComparisons) -> Iterator[Origin]:
    """The gradients that differ, in order, with the module that computed each."""
    for point, comparison in probed.wrong(Phase.BACKWARD):
        is_missing = comparison.verdict.agreement is Agreement.MISSING
        if is_missing and probed.is_behind_frozen(point):  # the parameter itself is reported
            continue
        consumer_modules = probed.find_consumers(point, is_outer=is_missing)
        if len(consumer_modules) == 1:
            yield Origin(
                OriginKind.GRADIENT_OF_INPUT,
                consumer_modules[0],
                comparison,
                consumer_modules[0],
                point.path,
            )
        else:
            callers = {probed.callers.get(module) for module in consumer_modules}
            caller = callers.pop() if len(callers) == 1 else probed.callers.get(point.module)
            yield Origin(
                OriginKind.GRADIENT_OF_OUTPUT, caller, comparison, point.module, point.path
            )


def _find_own(probed: _ProbeComparisons, gradients: Sequence[TensorComparison]) -> Iterator[Origin]:
    """Parameters whose gradient differs although that of their module's output agrees."""
    for comparison in gradients:
        if (
            comparison.case.kind is not TensorKind.GRADIENT
            or comparison.verdict.agreement in TOLERABLE
        ):
            continue
        module, _, parameter = comparison.case.name.rpartition(".")
        is_fine = probed.is_fine(module, Phase.BACKWARD)
        if comparison.verdict.agreement is Agreement.MISSING and probed.is_frozen(module):
            is_fine = None
        if is_fine is not False and not comparison.case.name.startswith("inputs"):
            is_first = is_fine is True
            yield Origin(
                OriginKind.GRADIENT_OF_PARAMETER, module, comparison, module, parameter, is_first
            )
