"""Compares the entire steps of a program's ranks with those that a single process has taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch

from shardscope.numerics import to_fp64_on_cpu
from shardscope.parallel.equivalence import (
    Mesh,
    Runs,
    StepResult,
    TensorComparison,
    compare_case,
    find_stages,
    make_cases,
)
from shardscope.parallel.parity.captured_data import DataUse, group_by_data, is_equal, sort_rows
from shardscope.parallel.parity.captured_steps import CapturedTraining, ReplayPlan, Replays
from shardscope.parallel.parity.moments import choose_moment, count_wrong_gradients, list_moments
from shardscope.parallel.parity.recheck import accept_own_values, call_close
from shardscope.parallel.parity.result import ParityResult
from shardscope.record import TOLERABLE, Gap, TensorKind

_LOSS = (TensorKind.LOSS, "loss")
_SAME = 1e-4  # relative: how far sums in another order may be apart
_MARGIN = 8.0  # times the noise
_UNORDERED = (
    "the loss depends on the order in which the samples of the ranks make one batch, as where it "
    "pairs samples by their positions; so the loss and what depends on it were not compared, but "
    "the gradients of each rank's own samples"
)
# What depends on the data that the single process is trained on.
_OF_DATA = (TensorKind.LOSS, TensorKind.GRADIENT, TensorKind.REPORTED, TensorKind.COUNTER)


@final
@dataclass(frozen=True, eq=False)
class TrainingComparison:
    """The comparisons of each step, and what was not compared.

    `single` is what was observed of the single process. `has_data` says whether it was trained on
    the samples of all ranks; otherwise only what follows from given gradients was compared.
    """

    steps: list[list[TensorComparison]]
    references: list[StepResult]
    ranks: list[Sequence[StepResult]]
    gaps: list[Gap]
    has_data: bool
    single: CapturedTraining

    @property
    def has_wrong_data(self) -> bool:
        """Whether losses, gradients or numbers differ, all of which follow from the data."""
        index = self.index
        return index is not None and any(
            result.case.kind in _OF_DATA for result in list_wrong(self.steps[index])
        )

    @property
    def is_right(self) -> bool:
        """Whether the ranks train as the single process does on the samples of all of them."""
        return self.has_data and self.index is None

    @property
    def has_right_losses(self) -> bool:
        """Whether the first losses are those of the single process on the samples of all ranks."""
        losses = [r for r in self.steps[0] if r.case.kind is TensorKind.LOSS]
        return self.has_data and bool(losses) and not list_wrong(losses)

    @property
    def index(self) -> int | None:
        """The first step in which something differs."""
        wrong = (index for index, step in enumerate(self.steps) if list_wrong(step))
        return next(wrong, None)

    def make_result(self, *, has_exact: bool) -> ParityResult:
        """The result of all steps, with details of the first that differs."""
        index = self.index or 0
        return ParityResult(
            self.steps[index],
            self.references[index],
            has_exact,
            index=index,
            ranks=self.ranks[index],
            steps=self.steps,
            is_training=True,
            previous=self.references[index - 1] if index else None,
        )


def list_wrong(comparisons: Sequence[TensorComparison]) -> list[TensorComparison]:
    """The tensors that differ."""
    return [result for result in comparisons if result.verdict.agreement not in TOLERABLE]


def find_next_use(
    ranks: Sequence[CapturedTraining], plan: ReplayPlan, replays: Replays
) -> DataUse | None:
    """How a single process should get the data of the ranks, if not as it did; None if so.

    Programs that accumulate gradients up to a number of samples call the model once for each batch
    that any rank has. Some fail on batches that are larger than their own.
    """
    single, num_groups = replays.trainings[0], plan.data.num_groups
    if plan.data.use is DataUse.OWN or not ranks[0].inputs:
        return None
    if single is None or not single.results:
        return DataUse.OWN
    is_longer = len(single.inputs[0]) == num_groups * len(ranks[0].inputs[0])
    if plan.data.use is DataUse.JOINED and num_groups > 1 and is_longer:
        return DataUse.SEQUENCE
    return None


def depends_on_order(replays: Replays, reordered: CapturedTraining | None) -> bool:
    """Whether the order in which samples of the ranks make one batch changes the first step.

    `reordered` is the single process with another order. It does change where a program pairs
    samples by their positions, and then no order is the right one.
    """
    if reordered is None or not reordered.results:
        return False
    first, *others = (
        _flatten(single.results[0])
        for single in (*replays.trainings, reordered)
        if single is not None and single.results
    )
    distances = [float((row - first).norm()) for row in others if row.shape == first.shape]
    noise = max(distances[:-1], default=0.0)
    return bool(distances) and distances[-1] > max(_MARGIN * noise, _SAME * float(first.norm()))


def _flatten(result: StepResult) -> torch.Tensor:
    """The losses and gradients of a step in one row."""
    gradients = [result.gradients[name] for name in sorted(result.gradients)]
    tensors = [*result.training.scalars.get(_LOSS, ()), *gradients]
    return torch.cat([torch.zeros(0), *(to_fp64_on_cpu(tensor).flatten() for tensor in tensors)])


def compare_training(
    ranks: Sequence[CapturedTraining],
    plan: ReplayPlan,
    replays: Replays,
    *,
    is_order_unknown: bool = False,
) -> TrainingComparison | None:
    """Compare the steps that all ranks and the single process have taken; None if there is none.

    With `is_order_unknown`, what follows from the joined samples of the ranks is left out.
    """
    reference, perturbed, fp64, perturbed_fp64 = replays.trainings
    if reference is None or perturbed is None:
        return None
    num_steps = min(len(run.results) for run in (reference, perturbed, *ranks))
    if not num_steps:
        return None
    is_exact = all(
        run is not None and len(run.results) >= num_steps for run in (fp64, perturbed_fp64)
    )
    gaps = list(_find_data_gaps(ranks, plan, reference, num_steps))
    if is_order_unknown:
        gaps = [Gap(place="data", fact=_UNORDERED)]
    mesh = _find_mesh(ranks, plan)
    steps: list[list[TensorComparison]] = []
    references: list[StepResult] = []
    of_ranks: list[Sequence[StepResult]] = []
    for index in range(num_steps):
        exact = fp64.results[index] if fp64 is not None and is_exact else None
        moved = perturbed_fp64.results[index] if perturbed_fp64 is not None and is_exact else None
        runs = Runs(reference.results[index], exact, ((perturbed.results[index], moved),))
        results = [rank.results[index] for rank in ranks]
        step = _compare_step(runs, results, mesh)
        steps.append([r for r in step.comparisons if not gaps or r.case.kind not in _OF_DATA])
        references.append(step.reference)
        of_ranks.append(step.ranks)
    stages = find_stages(references[0].gradients, of_ranks[0])
    accepted = accept_own_values(
        steps, stages, plan.axes, [single.training for single in references]
    )
    if ranks[0].has_accelerate_scheduler:
        accepted = [list(map(_accept_setting, step)) for step in accepted]
    accepted = [
        [_accept_own_loss(result, results) for result in step]
        for step, results in zip(accepted, of_ranks, strict=True)
    ]
    return TrainingComparison(
        accepted, references, of_ranks, gaps, has_data=not gaps, single=reference
    )


class _Step(NamedTuple):
    """A step of the single process and of the ranks, with the comparisons of its tensors."""

    comparisons: list[TensorComparison]
    reference: StepResult
    ranks: Sequence[StepResult]


def _compare_step(runs: Runs, ranks: Sequence[StepResult], mesh: Mesh) -> _Step:
    """The comparisons of a step; of gradients at the moment that shows a cause best."""

    def compare(single: Runs, results: Sequence[StepResult]) -> _Step:
        cases = make_cases(
            single, results, mesh.sizes, batch_axes=mesh.batch_axes, batch_dim=mesh.batch_dim
        )
        return _Step([compare_case(case) for case in cases], single.reference, results)

    first = compare(runs, ranks)
    if not count_wrong_gradients(first.comparisons):
        return first
    # Programs that reduce or clip gradients by hand do so before the optimizer gets them.
    others = [compare(*moment) for moment in list_moments(runs, ranks)]
    steps = [first, *others]
    return steps[choose_moment([step.comparisons for step in steps])]


def _accept_setting(result: TensorComparison) -> TensorComparison:
    """Accept a setting that depends on the number of ranks because Accelerate wants it to."""
    if result.case.kind is not TensorKind.SETTING or result.verdict.agreement in TOLERABLE:
        return result
    return call_close(result, "Accelerate steps a scheduler once for each rank")


def _accept_own_loss(result: TensorComparison, ranks: Sequence[StepResult]) -> TensorComparison:
    """Accept a number that a rank reads if it is the loss of its own samples."""
    key = (result.case.kind, result.case.name)
    if result.case.kind is not TensorKind.REPORTED or result.verdict.agreement in TOLERABLE:
        return result
    for rank in ranks:
        losses = [float(loss) for loss in rank.training.scalars.get(_LOSS, ())]
        own = [*losses, sum(losses), sum(losses) / max(len(losses), 1)]
        for value in rank.training.scalars.get(key, ()):
            if not any(math.isclose(float(value), loss, rel_tol=1e-4) for loss in own):
                return result
    return call_close(result, "the loss of a rank's own samples")


def _find_mesh(ranks: Sequence[CapturedTraining], plan: ReplayPlan) -> Mesh:
    """The mesh, with the axes along which ranks have other samples."""
    sizes = tuple(plan.axes.values())
    groups = group_by_data([rank.data for rank in ranks])
    group_of = {rank: index for index, group in enumerate(groups) for rank in group}
    axes = []
    for axis, size in enumerate(sizes):
        stride = math.prod(sizes[axis + 1 :])
        starts = (rank for rank in range(len(ranks)) if (rank // stride) % size == 0)
        if any(
            group_of[start] != group_of[start + step * stride]
            for start in starts
            for step in range(1, size)
        ):
            axes.append(axis)
    return Mesh(sizes, tuple(axes), plan.data.dim)


def _find_data_gaps(
    ranks: Sequence[CapturedTraining],
    plan: ReplayPlan,
    single: CapturedTraining,
    num_steps: int,
) -> list[Gap]:
    """Why the single process was not trained on the samples of all ranks; empty if it was."""
    if ranks[0].has_batch_norm and plan.data.num_groups > 1:
        fact = (
            "a BatchNorm normalizes with the statistics of each rank's own samples, so that the "
            "loss and the gradients of all samples in one batch are others; compared were the "
            "gradients of each rank's own samples. SyncBatchNorm reduces the statistics"
        )
        return [Gap(place="data", fact=fact)]
    if all(_has_same_samples(ranks, plan, single.inputs[step], step) for step in range(num_steps)):
        return []
    fact = (
        "the single process could not be given the samples of all ranks, so that the loss and what "
        "depends on it were not compared, but the gradients of each rank's own samples"
    )
    if single.problems:
        fact += f": {'; '.join(single.problems)}"
    return [Gap(place="data", fact=f"{fact:.600}")]


def _has_same_samples(
    ranks: Sequence[CapturedTraining],
    plan: ReplayPlan,
    calls: Sequence[Sequence[torch.Tensor]],
    step: int,
) -> bool:
    """Whether the model of the single process is called with the samples of all ranks, once."""
    groups = group_by_data([rank.data for rank in ranks])
    of_groups = [call for group in groups for call in ranks[group[0]].inputs[step]]
    if len({len(call) for call in (*of_groups, *calls)}) != 1:
        return False
    return all(
        _has_same_rows([call[index] for call in of_groups], [call[index] for call in calls], plan)
        for index in range(len(calls[0]))
    )


def _has_same_rows(
    of_ranks: Sequence[torch.Tensor], of_single: Sequence[torch.Tensor], plan: ReplayPlan
) -> bool:
    first = of_ranks[0]
    if all(
        tensor.shape == first.shape and torch.equal(tensor, first)
        for tensor in (*of_ranks, *of_single)
    ):
        return True
    wanted, own = sort_rows(of_ranks, plan.data.dim), sort_rows(of_single, plan.data.dim)
    if wanted is not None and own is not None and is_equal(wanted, own):
        return True
    # Parts of a sequence are not rows, and together have the same elements.
    elements = [torch.cat([t.flatten() for t in each]) for each in (of_ranks, of_single)]
    return is_equal(*(tensor.double().sort().values for tensor in elements))
