"""Finds where the versions diverge: runs both again with probes, on the step that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch

from shardscope.errors import CollectiveError, RankError
from shardscope.parallel.equivalence import (
    DRAWN,
    Mesh,
    Probe,
    ProbedStep,
    Runs,
    StepResult,
    Variant,
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
from shardscope.parallel.parity.first_op import WrongOp, find_first_wrong_op
from shardscope.parallel.parity.locate import find_origins, find_output_layout
from shardscope.parallel.parity.moments import list_wrong
from shardscope.parallel.parity.probe import (
    OUTSIDE,
    ModuleProbe,
    OpProbe,
    ProbePoint,
    ProbeSpec,
    Role,
)
from shardscope.parallel.parity.result import OF_MODEL, Origin, OriginKind, ParityResult
from shardscope.parallel.parity.version import Report, Version
from shardscope.record import TOLERABLE, Phase, Suspect, TensorKind

# What differs first if the code outside the modules computes a loss or changes gradients.
_OUTSIDE_MODULES = (OriginKind.LOSS, OriginKind.GRADIENT_OF_PARAMETER)
_MAX_BACKWARDS = 16  # micro-batches whose gradients are kept apart
_MAX_MASKED = 8  # shards; the single device runs once for each


@final
class Locator:
    """Finds the first difference of a step, with runs of one variant: in double precision if both
    versions run in it. `renamed` maps each rank's module names to the original's.
    """

    def __init__(
        self,
        version: Version,
        mesh: Mesh,
        renamed: Mapping[int, Mapping[str, str]],
        variant: Variant,
        report: Report,
        report_progress: Callable[[str], None],
    ) -> None:
        self._version = version
        self._mesh = mesh
        self._renamed = renamed
        self._variant = variant
        self._report = report
        self._report_progress = report_progress

    def locate(self, parity_result: ParityResult) -> ParityResult:
        """Add where the versions diverge; in double precision if both versions run in it."""
        self._report_progress("locating the first module that differs")
        probes: list[ModuleProbe] = []

        def make_probe() -> ModuleProbe:
            probes.append(ModuleProbe())
            return probes[-1]

        index = parity_result.index
        recorded = self._run_with_probes(ProbeSpec(renamed=self._renamed, step=index), make_probe)
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
        origins = [self._test_own_shard(origin, runs, ranks, index) for origin in origins]
        origins = [self._test_attached_loss(origin, index) for origin in origins]
        del recorded, runs, ranks
        op = self._find_op(origins, index)
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
        version, variant = self._version, replace(self._variant, rng=DRAWN)
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
                probed = ProbedStep(probe, step)
                run_task(self._version.model, self._version.task, self._variant, probed=probed)
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

    def _test_attached_loss(self, origin: Origin, step: int) -> Origin:
        """Test whether a gradient is off by a multiple of that of a loss inside the module."""
        if explain(origin.comparison, self._version.axes).suspect is not Suspect.UNKNOWN:
            return origin

        def run_single(probe: ModuleProbe) -> None:
            version = self._version
            run_task(version.model, version.task, self._variant, probed=ProbedStep(probe, step))

        return replace(origin, attached_factor=find_attached_factor(origin, run_single))

    def _find_op(self, origins: Sequence[Origin], step: int) -> WrongOp | None:
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

        recorded = self._run_with_probes(ProbeSpec(module, self._renamed, step), make_probe)
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
        self, probe_spec: ProbeSpec, make_probe: Callable[[], Probe]
    ) -> tuple[Runs, list[StepResult]] | None:
        """The runs of the single device, and the ranks' results, of the step that is probed."""
        version, step = self._version, probe_spec.step
        try:
            ranks = version.run(self._variant, probe_spec)
        except (RankError, CollectiveError) as error:
            what = "modules" if probe_spec.ops_in is None else "ops"
            fact = f"the ranks fail while their {what} are recorded ({error!s:.200})"
            self._report("the first difference", fact)
            return None
        run = run_fp64 if self._variant.is_fp64 else run_all
        try:
            singles = run(
                version.model,
                version.task,
                rng=self._variant.rng,
                probe=lambda: ProbedStep(make_probe(), step),
            )
        except Exception as error:  # noqa: BLE001 - it ran before, and its verdicts stand
            fact = (
                f"the original fails while it is recorded ({type(error).__name__}: {error!s:.160})"
            )
            self._report("the first difference", fact)
            return None
        return singles[step], [steps[step] for steps in ranks]
