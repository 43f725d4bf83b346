"""Runs and compares both versions; where something differs, runs them again to locate it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, final

import torch
from torch import nn

from shardscope.errors import CollectiveError, ParityError, RankError
from shardscope.parallel.equivalence import (
    AS_IT_IS,
    MARKED,
    Case,
    Key,
    Mesh,
    Probe,
    ProbedStep,
    Runs,
    StepResult,
    Task,
    TensorComparison,
    TracedWeights,
    Variant,
    compare_case,
    draws_numbers,
    find_stages,
    is_cleared,
    is_unclear,
    make_cases,
    ranks_across,
    run_all,
    run_fp64,
    run_task,
)
from shardscope.parallel.parity.attached_loss import find_attached_factor
from shardscope.parallel.parity.backward_probe import (
    BackwardProbe,
    Contributions,
    list_contributions,
    sum_contributions,
)
from shardscope.parallel.parity.causes import explain
from shardscope.parallel.parity.collectives import take_collectives
from shardscope.parallel.parity.explanation import list_names
from shardscope.parallel.parity.first_op import WrongOp, find_first_wrong_op
from shardscope.parallel.parity.locate import find_origins, find_output_layout
from shardscope.parallel.parity.moments import (
    StepComparison,
    choose_moment,
    count_wrong_gradients,
    find_first_wrong,
    list_moments,
    list_wrong,
    without_parameters,
)
from shardscope.parallel.parity.probe import (
    OUTSIDE,
    ModuleProbe,
    OpProbe,
    ProbePoint,
    ProbeSpec,
    Role,
)
from shardscope.parallel.parity.recheck import (
    ONLY_IN_OWN,
    accept_own_values,
    is_coarse,
    recheck_fp64,
    recheck_without_rng,
)
from shardscope.parallel.parity.result import (
    OF_MODEL,
    Origin,
    OriginKind,
    ParityResult,
)
from shardscope.parallel.parity.scale_causes import find_scaling
from shardscope.parallel.parity.ties import find_broken_ties
from shardscope.record import TOLERABLE, Agreement, Phase, Suspect, TensorKind

Report = Callable[[str, str], None]
"""Takes gaps: the place, and the fact."""

# Parameters may rightly have another shape.
_WRONG_VALUES = (Agreement.DIFFERS, Agreement.RANKS_DISAGREE, Agreement.NONFINITE)
# What differs first if the code outside the modules computes a loss or changes gradients.
_OUTSIDE_MODULES = (OriginKind.LOSS, OriginKind.GRADIENT_OF_PARAMETER)
_MAX_BACKWARDS = 16  # micro-batches whose gradients are kept apart
_MAX_MASKED = 8  # shards; the single device runs once for each


class Version(Protocol):
    """A parallel version of a model, of which all ranks can be run in any variant."""

    @property
    def model(self) -> nn.Module:
        """The original model."""

    @property
    def axes(self) -> Mapping[str, int]:
        """Names and sizes of the mesh axes."""

    @property
    def task(self) -> Task:
        """The step to run."""

    @property
    def batch_axes(self) -> Sequence[str]:
        """The mesh axes along which the batch is sharded."""

    @property
    def batch_dim(self) -> int:
        """The dim of the inputs that is sharded along the batch axes."""

    def run(
        self, variant: Variant = AS_IT_IS, probe_spec: ProbeSpec | None = None
    ) -> list[list[StepResult]]:
        """The results of each rank, a list over steps."""


def check_parity(
    version: Version,
    *,
    precision: torch.dtype | None,
    report: Report,
    report_progress: Callable[[str], None],
) -> ParityResult:
    """Run and compare both versions, and locate the first difference, if any."""
    session = _Session(version, precision, report, report_progress)
    steps = session.compare()
    is_deterministic = False
    if find_first_wrong(steps) is not None and draws_numbers(version.model, version.task):
        steps, is_deterministic = session.compare_without_rng(steps)
    index = find_first_wrong(steps)
    if index is None:
        return ParityResult(
            without_parameters(steps[0].comparisons),
            steps[0].reference,
            session.has_exact,
            steps=[without_parameters(step.comparisons) for step in steps],
            is_training=version.task.training is not None,
        )
    step = steps[index]
    # If ranks drew different numbers, keep the RNG, to locate the draw.
    is_deterministic &= not any(
        result.verdict.suspect is Suspect.RANDOMNESS for result in list_wrong(step.comparisons)
    )
    parity_result = ParityResult(
        step.comparisons,
        step.reference,
        session.has_exact,
        missing_elements=session.find_missing_elements(),
        num_calls=max(rank.num_calls for rank in step.ranks),
        num_cleared=max(rank.num_cleared for rank in step.ranks),
        broken_ties=step.broken_ties,
        index=index,
        ranks=step.ranks,
        steps=[without_parameters(compared.comparisons) for compared in steps],
        is_training=version.task.training is not None,
        previous=steps[index - 1].reference if index else None,
    )
    return session.locate(parity_result, is_deterministic=is_deterministic)


@final
class _Session:
    def __init__(
        self,
        version: Version,
        precision: torch.dtype | None,
        report: Report,
        report_progress: Callable[[str], None],
    ) -> None:
        self._version = version
        self._precision = precision
        self._report = report
        self._report_progress = report_progress
        self.has_exact = True  # both versions run in double precision
        self._traced: TracedWeights | None = None
        self._is_clear = False  # names and shapes determine which rank holds which weights

        names = list(version.axes)
        self._mesh = Mesh(
            tuple(version.axes.values()),
            tuple(names.index(axis) for axis in version.batch_axes),
            version.batch_dim,
        )

    def compare(self, *, is_deterministic: bool = False) -> list[StepComparison]:
        """The comparisons of each step."""
        version = self._version
        self._report_progress("running the original")
        runs = run_all(
            version.model,
            version.task,
            is_deterministic=is_deterministic,
            precision=self._precision,
            report=self._report,
        )
        self.has_exact &= runs[0].fp64 is not None
        self._report_progress("running all ranks")
        ranks = _list_by_step(version.run(Variant(is_deterministic=is_deterministic)))
        self._trace_weights(runs[0].reference, ranks[0])
        steps = list(map(self._compare_step, runs, ranks))
        if self.has_exact and self._is_unsure(steps):
            steps = self._reconsider(steps, is_deterministic=is_deterministic)
        for single, step_ranks in zip(runs, ranks, strict=True):
            self._report_uncompared([single.reference, *step_ranks])
        stages = find_stages(runs[0].reference.parameters, ranks[0])
        accepted = accept_own_values(
            [step.comparisons for step in steps],
            stages,
            version.axes,
            [step.reference.training for step in steps],
        )
        return [
            replace(step, comparisons=comparisons)
            for step, comparisons in zip(steps, accepted, strict=True)
        ]

    def _is_unsure(self, steps: Sequence[StepComparison]) -> bool:
        """Whether verdicts in the model's own precision need those in double precision.

        Those of training do: an optimizer amplifies the noise of small gradients.
        """
        return self._version.task.training is not None or any(
            is_coarse(step.comparisons) or bool(list_wrong(step.comparisons)) for step in steps
        )

    def _compare_step(self, runs: Runs, ranks: Sequence[StepResult]) -> StepComparison:
        resolved = ranks if self._traced is None else self._traced.apply(ranks)
        comparison = self._compare_gradients_at(runs, resolved)
        if not count_wrong_gradients(comparison.comparisons):
            return comparison
        compared = [self._compare_gradients_at(*moment) for moment in list_moments(runs, resolved)]
        # If gradients are only scaled after collectives, those before that show a cause better.
        is_clipped = find_scaling(runs.reference) is not None and all(
            find_scaling(replace(rank, raw_gradients=rank.reduced_gradients)) is not None
            for rank in resolved
        )
        compared = [*compared, comparison] if is_clipped else [comparison, *compared]
        return compared[choose_moment([step.comparisons for step in compared])]

    def _compare_gradients_at(self, runs: Runs, resolved: Sequence[StepResult]) -> StepComparison:
        return StepComparison(
            runs.reference,
            resolved,
            self._compare_tensors(runs, resolved),
            list(find_broken_ties(runs.reference, resolved)),
        )

    def _report_uncompared(self, step_results: Sequence[StepResult]) -> None:
        """Report gaps: outputs that cannot be kept, and gradients of which none is left."""
        if any(run.num_transformed for run in step_results):
            self._report(
                "outputs",
                "not compared where the step calls the model in a transform of torch.func, such as "
                "vmap; what it computes from them is",
            )
        if all(run.num_backwards and is_cleared(run.gradients.values()) for run in step_results):
            self._report(
                "gradients",
                "not compared: the step runs backward, but no gradient is left when it returns, as "
                "after zero_grad(); call zero_grad() at the start of the step instead",
            )

    def compare_without_rng(self, steps: list[StepComparison]) -> tuple[list[StepComparison], bool]:
        """The verdicts after runs without random numbers, and whether those runs succeeded."""
        try:
            deterministic = self.compare(is_deterministic=True)
        except (RankError, CollectiveError, ParityError) as error:
            fact = f"a run without random numbers failed ({error!s:.200})"
            self._report("randomness", fact)
            return steps, False
        return [
            replace(
                step, comparisons=recheck_without_rng(step.comparisons, _by_key(again.comparisons))
            )
            for step, again in zip(steps, deterministic, strict=True)
        ], True

    def find_missing_elements(self) -> Mapping[str, str]:
        """Weights of which no rank holds some elements."""
        return {} if self._traced is None else self._traced.find_missing_elements()

    def locate(self, parity_result: ParityResult, *, is_deterministic: bool) -> ParityResult:
        """Add where the versions diverge; in double precision if both versions run in it."""
        self._report_progress("locating the first module that differs")
        probes: list[ModuleProbe] = []

        def make_probe() -> ModuleProbe:
            probes.append(ModuleProbe())
            return probes[-1]

        index = parity_result.index
        recorded = self._run_with_probes(
            ProbeSpec(renamed=self._renamed, step=index),
            make_probe,
            is_deterministic=is_deterministic,
        )
        if recorded is None:
            return parity_result
        runs, (ranks, collectives) = recorded[0], take_collectives(recorded[1])
        is_of_model = any(
            result.case.kind in OF_MODEL for result in list_wrong(parity_result.comparisons)
        )
        origins = (
            find_origins(runs, ranks, self._mesh, probes[0], gradients=parity_result.comparisons)
            if is_of_model
            else []
        )
        origins = [
            self._test_own_shard(origin, runs, ranks, index, is_deterministic=is_deterministic)
            for origin in origins
        ]
        origins = [
            self._test_attached_loss(origin, index, is_deterministic=is_deterministic)
            for origin in origins
        ]
        del recorded, runs, ranks
        op = self._find_op(origins, index, is_deterministic=is_deterministic)
        return replace(
            parity_result,
            origins=origins,
            types=probes[0].types,
            op=op,
            collectives=collectives,
            contributions=self._find_contributions(parity_result, origins),
        )

    def _find_contributions(
        self, parity_result: ParityResult, origins: Sequence[Origin]
    ) -> Contributions:
        """What each micro-batch adds to gradients, if outputs agree: on the single device, or,
        if that computes all samples at once, on the ranks together.
        """
        wrong = list_wrong(parity_result.comparisons)
        has_wrong_gradients = any(result.case.kind is TensorKind.GRADIENT for result in wrong)
        is_forward = bool(origins) and origins[0].phase is Phase.FORWARD
        if is_forward or not has_wrong_gradients:
            return []
        version, variant = self._version, Variant(is_fp64=self.has_exact)
        if 1 < parity_result.reference.num_backwards <= _MAX_BACKWARDS:
            probe = BackwardProbe()
            probed = ProbedStep(probe, parity_result.index)
            run_task(version.model, version.task, variant, probed=probed)
            return list_contributions(probe.snapshots)
        if not 1 < max(rank.num_backwards for rank in parity_result.ranks) <= _MAX_BACKWARDS:
            return []
        spec = ProbeSpec(renamed=self._renamed, step=parity_result.index, is_backward=True)
        try:
            ranks = version.run(variant, spec)
        except (RankError, CollectiveError):  # they ran before, and their verdicts stand
            return []
        return sum_contributions([steps[parity_result.index] for steps in ranks])

    def _test_own_shard(
        self,
        origin: Origin,
        runs: Runs,
        ranks: Sequence[StepResult],
        step: int,
        *,
        is_deterministic: bool,
    ) -> Origin:
        """Test whether each rank's gradient comes only from its own shard of the output.

        It does if it equals the single device's gradient when the gradient of the module's
        output is zero outside that shard.
        """
        case, layout, module = origin.comparison.case, origin.comparison.layout, origin.module
        shards = [tensor for tensor in case.ranks if tensor is not None]
        point = ProbePoint(Phase.FORWARD, Role.OUTPUT, module or "", 0, "").encode()
        output, outputs = (
            runs.reference.snapshots.get(point),
            [rank.snapshots.get(point) for rank in ranks],
        )
        output_shards = [tensor for tensor in outputs if tensor is not None]
        is_backward = origin.kind in (OriginKind.GRADIENT_OF_OUTPUT, OriginKind.GRADIENT_OF_INPUT)
        is_complete = output is not None and len(shards) == len(output_shards) == len(ranks)
        if not is_backward or module is None or layout is None or case.calls or not is_complete:
            return origin
        if explain(origin.comparison, self._version.axes).suspect is not Suspect.UNKNOWN:
            return origin
        assert output is not None
        output_layout = find_output_layout(runs, ranks, self._mesh, module)
        if output_layout is None or case.floor is None:
            return origin
        indices = torch.arange(output.numel()).reshape(output.shape)
        shard_indices = output_layout.split(indices, output_shards)
        limit = case.floor.scale_by(4.0)

        def is_limited(lines: Sequence[Sequence[int]]) -> bool:
            """Whether gradients come only from what the ranks of each line hold together."""
            for line in lines:
                mask = torch.zeros(output.numel(), dtype=output.dtype)
                for rank in line:
                    mask[shard_indices[rank].flatten()] = 1
                probe = ModuleProbe((module, mask.reshape(output.shape)))
                variant = Variant(self.has_exact, is_deterministic=is_deterministic)
                probed = ProbedStep(probe, step)
                run_task(self._version.model, self._version.task, variant, probed=probed)
                gradient = probe.snapshots.get(case.name)
                if gradient is None:
                    return False
                parts = layout.split(gradient.cpu(), shards)
                if not all(limit.covers(shards[rank], parts[rank]) for rank in line):
                    return False
            return True

        for axis, dim in enumerate(output_layout.dims):
            lines = ranks_across(self._mesh.sizes, axis)
            if dim is not None and 1 < len(lines) <= _MAX_MASKED and is_limited(lines):
                dims = tuple(
                    dim if index == axis else None for index, dim in enumerate(output_layout.dims)
                )
                return replace(origin, own_shard=replace(output_layout, dims=dims))
        return origin

    def _test_attached_loss(self, origin: Origin, step: int, *, is_deterministic: bool) -> Origin:
        """Test whether a gradient is off by a multiple of that of a loss inside the module."""
        if explain(origin.comparison, self._version.axes).suspect is not Suspect.UNKNOWN:
            return origin
        variant = Variant(self.has_exact, is_deterministic=is_deterministic)

        def run_single(probe: ModuleProbe) -> None:
            version = self._version
            run_task(version.model, version.task, variant, probed=ProbedStep(probe, step))

        return replace(origin, attached_factor=find_attached_factor(origin, run_single))

    def _find_op(
        self, origins: Sequence[Origin], step: int, *, is_deterministic: bool
    ) -> WrongOp | None:
        """The first op that differs in the module of the origin, or outside of modules."""
        if all(origin.kind in _OUTSIDE_MODULES for origin in origins):
            module = OUTSIDE if self._version.task.training is not None else None
        else:
            module = origins[0].module if origins[0].phase is Phase.FORWARD else None
        if module is None:
            return None
        self._report_progress("locating the first op")
        probes: list[OpProbe] = []

        def make_probe() -> OpProbe:
            probes.append(OpProbe(module))
            return probes[-1]

        recorded = self._run_with_probes(
            ProbeSpec(module, self._renamed, step), make_probe, is_deterministic=is_deterministic
        )
        # Calls on different parts of the batch cannot be compared op by op.
        if recorded is None or (probes[0].num_calls > 1 and self._mesh.batch_axes):
            return None
        op = find_first_wrong_op(*recorded, self._mesh, probes[0].consumers)
        # Outside the modules, an op with wrong inputs shows only that something before it differs.
        has_wrong_inputs = op is not None and any(
            taken.verdict.agreement not in TOLERABLE for taken in op.inputs
        )
        # Nor does one that is called in place of another, as a loss may be computed in other ways.
        is_other = op is not None and not op.inputs and not op.outputs
        if op is None or (module == OUTSIDE and (has_wrong_inputs or is_other)):
            return None
        return self._blame_collective(op)

    def _blame_collective(self, op: WrongOp) -> WrongOp:
        """The op with its result after a collective, if before it each rank has its right part."""
        if not op.communicated or not op.outputs:
            return op
        cause = explain(op.outputs[0], self._version.axes, is_forward=True)
        is_right_part = cause.suspect is Suspect.MISSING_REDUCTION and bool(cause.reduction)
        if not is_right_part:
            return op
        return replace(op, outputs=op.communicated, source=op.collective_source)

    def _run_with_probes(
        self, probe_spec: ProbeSpec, make_probe: Callable[[], Probe], *, is_deterministic: bool
    ) -> tuple[Runs, list[StepResult]] | None:
        """The runs of the single device, and the ranks' results, of the step that is probed."""
        version, is_fp64, step = self._version, self.has_exact, probe_spec.step
        try:
            ranks = version.run(
                Variant(is_fp64=is_fp64, is_deterministic=is_deterministic), probe_spec
            )
        except (RankError, CollectiveError) as error:
            what = "modules" if probe_spec.ops_in is None else "ops"
            fact = f"the ranks fail while their {what} are recorded ({error!s:.200})"
            self._report("the first difference", fact)
            return None
        run = run_fp64 if is_fp64 else run_all
        try:
            singles = run(
                version.model,
                version.task,
                is_deterministic=is_deterministic,
                probe=lambda: ProbedStep(make_probe(), step),
            )
        except Exception as error:  # noqa: BLE001 - it ran before, and its verdicts stand
            fact = (
                f"the original fails while it is recorded ({type(error).__name__}: {error!s:.160})"
            )
            self._report("the first difference", fact)
            return None
        return singles[step], [steps[step] for steps in ranks]

    @property
    def _renamed(self) -> dict[int, dict[str, str]]:
        traced = self._traced
        if traced is None:
            return {}
        return {rank: traced.rename_modules(rank) for rank in range(math.prod(self._mesh.sizes))}

    def _trace_weights(self, reference: StepResult, ranks: Sequence[StepResult]) -> None:
        """Find out which weights each rank holds, if names and shapes do not determine it."""
        if self._is_clear or self._traced is not None or not is_unclear(reference, ranks):
            self._is_clear = self._traced is None
            return
        self._report_progress("tracing the weights")
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
        first = [steps[0] for steps in marked]
        self._traced = TracedWeights(reference.parameters, first, self._mesh.sizes)
        added = sorted(set().union(*(rank.added for rank in self._traced.apply(ranks))))
        if added:
            fact = f"only in the parallel model, and not compared: {list_names(added)}"
            self._report("parameters and buffers", fact)

    def _compare_tensors(
        self, runs: Runs, resolved: Sequence[StepResult]
    ) -> list[TensorComparison]:
        sizes, batch_axes, batch_dim = self._mesh
        comparisons = [
            _compare_scaled(compare_case(case), case)
            for case in make_cases(
                runs, resolved, sizes, batch_axes=batch_axes, batch_dim=batch_dim
            )
        ]
        odd = [
            result
            for result in comparisons
            if self._is_incomparable(result, runs.reference, resolved)
        ]
        states = [result for result in odd if result.case.kind is TensorKind.STATE]
        others = [result for result in odd if result.case.kind is not TensorKind.STATE]
        if states:
            fact = (
                "not compared where the optimizers of the ranks hold other tensors, such as main "
            )
            fact += f"parameters: {list_names([result.case.name for result in states])}"
            self._report("the optimizer's state", fact)
        if others:
            fact = "only in the original, or changed by every call, and not compared: "
            self._report(
                "parameters and buffers", fact + list_names([result.case.name for result in others])
            )
        return [
            result
            for result in comparisons
            if result not in odd
            and (
                result.case.kind is not TensorKind.PARAMETER
                or result.verdict.agreement in _WRONG_VALUES
            )
        ]

    @staticmethod
    def _is_incomparable(
        result: TensorComparison, reference: StepResult, ranks: Sequence[StepResult]
    ) -> bool:
        """Whether a difference is no evidence of an error.

        A parameter may now be computed from others, as in a reparametrization; a buffer that
        every call changes differs if the ranks call the model more or less often; and optimizers
        may hold main parameters, which updated parameters show to be right or wrong.
        """
        if result.case.kind is TensorKind.STATE:
            return result.verdict.agreement is Agreement.MISSING
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

    def _reconsider(
        self, steps: list[StepComparison], *, is_deterministic: bool
    ) -> list[StepComparison]:
        """Repeat the comparison in double precision, where noise may hide or mimic an error."""
        version = self._version
        self._report_progress("running all ranks in double precision")
        try:
            ranks = version.run(Variant(is_fp64=True, is_deterministic=is_deterministic))
        except (RankError, CollectiveError) as error:
            self.has_exact = False
            self._report(
                "double precision",
                f"the parallel version does not run in it ({error!s:.200}), so rounding cannot be "
                "distinguished from other differences",
            )
            return steps
        fp64 = run_fp64(version.model, version.task, is_deterministic=is_deterministic)
        exact = list(map(self._compare_step, fp64, _list_by_step(ranks)))
        rechecked = [
            replace(again, comparisons=recheck_fp64(step.comparisons, _by_key(again.comparisons)))
            for step, again in zip(steps, exact, strict=True)
        ]
        others = [
            r for step in rechecked for r in step.comparisons if r.verdict.detail == ONLY_IN_OWN
        ]
        if others:
            names = list_names([result.case.name or "the output" for result in others])
            self._report(
                "double precision",
                f"not compared in it, as the original gives other results in it: {names}",
            )
        return rechecked


def _list_by_step(ranks: Sequence[Sequence[StepResult]]) -> list[list[StepResult]]:
    """The results of all ranks, for each step."""
    return [list(step) for step in zip(*ranks, strict=True)]


def _compare_scaled(comparison: TensorComparison, case: Case) -> TensorComparison:
    """Accept the gradient of a sharded input without the average over ranks."""
    is_input = case.kind is TensorKind.GRADIENT and case.name.startswith("inputs")
    if comparison.verdict.agreement in TOLERABLE or not is_input or not case.batch_axes:
        return comparison
    count = math.prod(case.sizes[axis] for axis in case.batch_axes)
    ranks = tuple(None if tensor is None else tensor / count for tensor in case.ranks)
    scaled = compare_case(replace(case, ranks=ranks))
    return scaled if scaled.verdict.agreement in TOLERABLE else comparison


def _by_key(comparisons: Sequence[TensorComparison]) -> dict[Key, TensorComparison]:
    return {(result.case.kind, result.case.name): result for result in comparisons}
