"""Compares what probes record at each point: a tensor that a module takes or returns in a call."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch

from shardscope.parallel.equivalence import (
    Case,
    Layout,
    Mesh,
    Runs,
    StepResult,
    TensorComparison,
    compare_case,
    drop_extra_calls,
    find_stages,
    make_cases,
    ranks_by_distance,
)
from shardscope.parallel.parity.probe import ProbePoint, Role
from shardscope.record import TOLERABLE, Phase


def are_calls_aligned(runs: Runs, ranks: Sequence[StepResult], mesh: Mesh) -> bool:
    """Whether ranks divide the samples of each call, and not those of the step, into micro-batches.

    Judged by the first module whose outputs agree over all calls; true if there is none.
    """
    calls: dict[ProbePoint, list[ProbePoint]] = {}
    for point in map(ProbePoint.decode, runs.reference.snapshots):
        if point.phase is Phase.FORWARD and point.role is Role.OUTPUT:
            calls.setdefault(point._replace(call=0), []).append(point)
    several = {first for first, points in calls.items() if len(points) > 1}
    for first, merged in compare_points(runs, ranks, mesh, 1.0, several, is_merged=True):
        if merged.verdict.agreement in TOLERABLE:
            each = compare_points(runs, ranks, mesh, 1.0, set(calls[first]), is_merged=False)
            return all(comparison.verdict.agreement in TOLERABLE for _, comparison in each)
    return True


def match_calls(
    rank: StepResult, reference: StepResult, num_shards: Collection[int] = (1,)
) -> StepResult:
    """A rank's result with the single device's call numbers, without extra calls.

    `num_shards` are the numbers of shards of which a rank may have the samples of one.
    """
    calls: dict[ProbePoint, list[ProbePoint]] = {}
    own_calls: dict[ProbePoint, list[ProbePoint]] = {}
    for snapshots, table in ((reference.snapshots, calls), (rank.snapshots, own_calls)):
        for point in map(ProbePoint.decode, snapshots):
            table.setdefault(point._replace(call=0), []).append(point)
    matched: dict[str, torch.Tensor] = {}
    for key, points in own_calls.items():
        tensors = [rank.snapshots[point.encode()] for point in points]
        wanted = [reference.snapshots[point.encode()] for point in calls.get(key, ())]
        chosen = drop_extra_calls(tensors, wanted, num_shards=num_shards)
        names = calls[key] if len(chosen) == len(wanted) else points[-len(chosen) :]
        matched |= {point.encode(): tensor for point, tensor in zip(names, chosen, strict=True)}
    return replace(rank, snapshots=matched)


def find_output_layout(
    runs: Runs, ranks: Sequence[StepResult], mesh: Mesh, module: str
) -> Layout | None:
    """How the ranks shard what a module returns in its first call.

    None if it is not a single tensor, or no layout of the shards makes up the single device's.
    """
    point = ProbePoint(Phase.FORWARD, Role.OUTPUT, module, 0, "")
    for _, comparison in compare_points(runs, ranks, mesh, 1.0, {point}, is_merged=False):
        if comparison.verdict.agreement in TOLERABLE:
            return comparison.layout
    return None


def compare_points(
    runs: Runs,
    ranks: Sequence[StepResult],
    mesh: Mesh,
    factor: float,
    wanted: set[ProbePoint],
    *,
    is_merged: bool,
) -> Iterator[tuple[ProbePoint, TensorComparison]]:
    """The comparison at each wanted point; with `is_merged`, all calls together as call 0."""
    modules = [{ProbePoint.decode(name).module for name in rank.snapshots} for rank in ranks]
    stages = find_stages(runs.reference.parameters, ranks)
    for point, case in make_point_cases(runs, ranks, mesh, factor, wanted, is_merged=is_merged):
        # Each rank may have its own value of a scalar such as a loss; it is not compared.
        if case.reference is None or case.reference.ndim == 0:
            continue
        case = _fill_absent(case, [point.module not in rank_modules for rank_modules in modules])
        is_missing = point.phase is Phase.BACKWARD and all(tensor is None for tensor in case.ranks)
        forward = point._replace(phase=Phase.FORWARD).encode()
        if None not in case.ranks or (
            is_missing and all(forward in rank.snapshots for rank in ranks)
        ):
            yield point, _compare_stages(case, stages)


def make_point_cases(
    runs: Runs,
    ranks: Sequence[StepResult],
    mesh: Mesh,
    factor: float,
    wanted: Collection[ProbePoint],
    *,
    is_merged: bool,
) -> Iterator[tuple[ProbePoint, Case]]:
    """The tensors of the single device and of all ranks at each wanted point.

    Those of the ranks are divided by the factor; with `is_merged`, all calls are call 0.
    """

    def choose(step_result: StepResult, divisor: float = 1.0) -> StepResult:
        outputs = []
        for name, tensor in step_result.snapshots.items():
            point = ProbePoint.decode(name)
            point = point._replace(call=0) if is_merged else point
            if point in wanted:
                outputs.append((point.encode(), tensor if divisor == 1.0 else tensor / divisor))
        return StepResult(outputs, {}, {})

    singles = Runs(
        choose(runs.reference),
        None if runs.fp64 is None else choose(runs.fp64),
        tuple(
            (choose(rounded), None if fp64 is None else choose(fp64))
            for rounded, fp64 in runs.perturbed_runs
        ),
        runs.precision,
    )
    chosen = [choose(rank, factor) for rank in ranks]
    for case in make_cases(singles, chosen, mesh.sizes, batch_dim=mesh.batch_dim):
        yield ProbePoint.decode(case.name), case


def _compare_stages(case: Case, stages: Sequence[Sequence[int]]) -> TensorComparison:
    """Compare a case on all ranks, or, where that differs, on one pipeline stage."""
    comparison = compare_case(case)
    if comparison.verdict.agreement in TOLERABLE or len(stages) < 2 or None in case.ranks:
        return comparison
    by_stage = (compare_case(case.choose_ranks(stage)) for stage in stages)
    return next(
        (
            stage_comparison
            for stage_comparison in by_stage
            if stage_comparison.verdict.agreement in TOLERABLE
        ),
        comparison,
    )


def _fill_absent(case: Case, is_absent: Sequence[bool]) -> Case:
    """Give ranks that do not run a module, such as other ranks' experts, a neighbour's tensor."""
    if not any(is_absent) or all(is_absent):
        return case
    suggestions = [
        next(
            neighbour
            for neighbour in ranks_by_distance(case.sizes, rank)
            if not is_absent[neighbour]
        )
        for rank in range(len(case.ranks))
    ]
    return replace(case, ranks=tuple(case.ranks[neighbour] for neighbour in suggestions), calls=())
