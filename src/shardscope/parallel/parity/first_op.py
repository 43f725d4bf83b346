"""Finds the first op in a module whose result differs, of the ops that both versions call."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import final

import torch

from shardscope.parallel.equivalence import (
    Mesh,
    Runs,
    StepResult,
    TensorComparison,
    compare_case,
    make_cases,
)
from shardscope.parallel.parity.probe import ProbePoint, Role
from shardscope.record import TOLERABLE, Agreement, Source

# Ops that allocate or copy: that the ranks call them is no difference in what is computed.
_TRIVIAL = {
    "clone",
    "copy_",
    "detach",
    "empty",
    "empty_like",
    "full",
    "ones",
    "zeros",
    "zeros_like",
}
_WRONG = (Agreement.DIFFERS, Agreement.RANKS_DISAGREE, Agreement.NONFINITE)


@final
@dataclass(frozen=True, eq=False)
class WrongOp:
    """An op, the user's line that calls it on the ranks, and its compared inputs and outputs.

    `changed` lists arguments whose numbers differ: name, value on the single device, on the
    ranks. `communicated` is what a collective at `collective_source` makes of its output. `terms`
    are what this and later ops return on the single device, and `same_shaped` what ops take there
    of the shape of this op's input.
    """

    name: str
    source: Source | None
    inputs: tuple[TensorComparison, ...] = ()
    outputs: tuple[TensorComparison, ...] = ()
    changed: tuple[tuple[str, float, float], ...] = ()
    communicated: tuple[TensorComparison, ...] = ()
    collective_source: Source | None = None
    terms: tuple[Term, ...] = ()
    same_shaped: tuple[torch.Tensor, ...] = ()


@final
@dataclass(frozen=True, eq=False)
class Term:
    """What an op returns on the single device, and its arguments whose numbers differ on ranks."""

    name: str
    tensor: torch.Tensor
    changed: tuple[tuple[str, float, float], ...] = ()


def find_first_wrong_op(
    runs: Runs,
    ranks: Sequence[StepResult],
    mesh: Mesh,
    consumers: Mapping[int, set[int]],
) -> WrongOp | None:
    """The first op that both versions call and whose result differs on the ranks.

    A result may differ and be corrected later, such as a partial sum: then it agrees after a
    collective, or all its `consumers` agree. If no result differs, the first op that the ranks call
    in place of another.
    """
    single_ops, rank_ops = _names(runs.reference), _names(ranks[0])
    matcher = SequenceMatcher(
        None, [name for name, _ in single_ops], [name for name, _ in rank_ops], False
    )
    pairs = {
        rank_ops[block.b + step][1]: single_ops[block.a + step][1]
        for block in matcher.get_matching_blocks()
        for step in range(block.size)
    }
    comparisons = _compare_ops(runs, ranks, mesh, pairs)
    communicated = _compare_communicated(runs, ranks, mesh, pairs)
    single_op_number = _find_first_wrong(comparisons, consumers, communicated)
    if single_op_number is not None:
        rank_op_number = next(
            rank_number
            for rank_number, single_number in pairs.items()
            if single_number == single_op_number
        )
        inputs, outputs = comparisons[single_op_number]
        changed = _find_changed(runs.reference, ranks[0], single_op_number, rank_op_number)
        op = _make_op(ranks[0], rank_op_number, inputs=inputs, outputs=outputs, changed=changed)
        return replace(
            op,
            communicated=tuple(communicated.get(single_op_number, ())),
            terms=tuple(_list_terms(runs.reference, ranks[0], pairs, single_op_number)),
            same_shaped=tuple(_list_same_shaped(runs.reference, inputs)),
        )
    for tag, single_start, single_end, rank_start, rank_end in matcher.get_opcodes():
        if tag == "replace":
            constant = _find_lost_constant(
                runs.reference,
                ranks[0],
                {number for _, number in single_ops[single_start:single_end]},
                {number for _, number in rank_ops[rank_start:rank_end]},
            )
            if constant is not None:
                rank_op_number, changed_argument = constant
                return _make_op(ranks[0], rank_op_number, changed=[changed_argument])
            if not _TRIVIAL.isdisjoint(rank_ops[rank_start][0].split(".")):
                continue
            single_op_number, rank_op_number = single_ops[single_start][1], rank_ops[rank_start][1]
            _, outputs = _compare_ops(runs, ranks, mesh, {rank_op_number: single_op_number}).get(
                single_op_number, ([], [])
            )
            return _make_op(ranks[0], rank_op_number, outputs=outputs)
    for rank_op_number, single_op_number in pairs.items():
        changed = _find_changed(runs.reference, ranks[0], single_op_number, rank_op_number)
        if any("scale" in name for name, _, _ in changed):
            return _make_op(ranks[0], rank_op_number, changed=changed)
    return None


def _list_terms(
    single: StepResult, rank: StepResult, pairs: Mapping[int, int], first: int
) -> Iterator[Term]:
    """What the ops from `first` on return on the single device, in order."""
    numbers = {single_number: rank_number for rank_number, single_number in pairs.items()}
    for name, tensor in single.snapshots.items():
        point = ProbePoint.decode(name)
        if point.role is not Role.OUTPUT or point.call < first or point.path:
            continue
        own = numbers.get(point.call)
        changed = () if own is None else tuple(_find_changed(single, rank, point.call, own))
        yield Term(point.module, tensor, changed)


def _list_same_shaped(
    single: StepResult, inputs: Sequence[TensorComparison]
) -> Iterator[torch.Tensor]:
    """The floating-point tensors that ops take which have the shape of the first of `inputs`."""
    known = [result.case.reference for result in inputs[:1]]
    for name, tensor in single.snapshots.items():
        is_input = ProbePoint.decode(name).role is Role.INPUT and tensor.is_floating_point()
        if known and known[0] is not None and is_input and tensor.shape == known[0].shape:
            yield tensor


def _make_op(
    rank: StepResult,
    number: int,
    *,
    inputs: Sequence[TensorComparison] = (),
    outputs: Sequence[TensorComparison] = (),
    changed: Sequence[tuple[str, float, float]] = (),
) -> WrongOp:
    points = {
        name: point for name in rank.snapshots if (point := ProbePoint.decode(name)).call == number
    }
    name = next(iter(points))
    collectives = (n for n, point in points.items() if point.role is Role.COMMUNICATED)
    return WrongOp(
        points[name].module,
        rank.sources.get(name),
        tuple(inputs),
        tuple(outputs),
        tuple(changed),
        collective_source=rank.sources.get(next(collectives, "")),
    )


def _find_changed(
    single: StepResult, rank: StepResult, single_op_number: int, rank_op_number: int
) -> list[tuple[str, float, float]]:
    """The numbers that an op is called with, where ranks and single device differ."""

    def choose(step_result: StepResult, call: int) -> Mapping[str, float]:
        names = (name for name in step_result.numbers if ProbePoint.decode(name).call == call)
        return step_result.numbers.get(next(names, ""), {})

    rank_numbers, single_numbers = choose(rank, rank_op_number), choose(single, single_op_number)
    return [
        (name, single_numbers[name], value)
        for name, value in rank_numbers.items()
        if name in single_numbers and not _is_same_number(value, single_numbers[name])
    ]


def _find_lost_constant(
    single: StepResult, rank: StepResult, single_ops: Collection[int], rank_ops: Collection[int]
) -> tuple[int, tuple[str, float, float]] | None:
    """The rank's op that lacks a constant of the single device's ops that it replaces.

    Such as a fused kernel that is called without the scale that the ops it replaces multiply by.
    """

    def choose(step_result: StepResult, ops: Collection[int]) -> dict[tuple[int, str], float]:
        return {
            (number, name): value
            for key, named in step_result.numbers.items()
            if (number := ProbePoint.decode(key).call) in ops
            for name, value in named.items()
        }

    of_single, of_rank = choose(single, single_ops), choose(rank, rank_ops)
    missing = {
        value
        for value in of_single.values()
        if math.isfinite(value)
        and value not in (0.0, 1.0)
        and not any(_is_same_number(value, known) for known in of_rank.values())
    }
    scales = {key: value for key, value in of_rank.items() if "scale" in key[1]}
    if len(missing) != 1 or len(scales) != 1:
        return None
    [((number, name), value)] = scales.items()
    return number, (name, missing.pop(), value)


def _is_same_number(value: float, reference: float) -> bool:
    """Whether two arguments are equal; NaN stands for one that is not given."""
    both_missing = math.isnan(value) and math.isnan(reference)
    return both_missing or math.isclose(value, reference, rel_tol=1e-9)


def _names(step_result: StepResult) -> list[tuple[str, int]]:
    """The ops as pairs of name and number."""
    points = (ProbePoint.decode(name) for name in step_result.snapshots)
    return list(dict.fromkeys((point.module, point.call) for point in points))


def _compare_ops(
    runs: Runs, ranks: Sequence[StepResult], mesh: Mesh, pairs: Mapping[int, int]
) -> dict[int, tuple[list[TensorComparison], list[TensorComparison]]]:
    """The compared inputs and outputs of each op, by its number on the single device."""
    renumbered = [_renumber(rank, pairs) for rank in ranks]
    singles = Runs(
        _renumber(runs.reference),
        None if runs.fp64 is None else _renumber(runs.fp64),
        tuple((_renumber(a), None if b is None else _renumber(b)) for a, b in runs.perturbed_runs),
    )
    comparisons: dict[int, tuple[list[TensorComparison], list[TensorComparison]]] = {}
    for case in make_cases(
        singles, renumbered, mesh.sizes, batch_axes=mesh.batch_axes, batch_dim=mesh.batch_dim
    ):
        point = ProbePoint.decode(case.name)
        is_compared = case.reference is not None and None not in case.ranks
        if is_compared and point.role is not Role.COMMUNICATED:
            role = 0 if point.role is Role.INPUT else 1
            comparisons.setdefault(point.call, ([], []))[role].append(compare_case(case))
    return comparisons


def _compare_communicated(
    runs: Runs, ranks: Sequence[StepResult], mesh: Mesh, pairs: Mapping[int, int]
) -> dict[int, list[TensorComparison]]:
    """What collectives make of the outputs of ops, compared with those of the single device.

    Only of ops with one output, by their number on the single device.
    """
    chosen = []
    for rank in ranks:
        points = {name: ProbePoint.decode(name) for name in rank.snapshots}
        outputs = {p.call: p for p in points.values() if p.role is Role.OUTPUT}
        snapshots = {
            outputs[point.call].encode(): rank.snapshots[name]
            for name, point in points.items()
            if point.role is Role.COMMUNICATED and point.call in outputs
        }
        chosen.append(replace(rank, snapshots=snapshots))
    common = set.intersection(
        *({ProbePoint.decode(name).call for name in rank.snapshots} for rank in chosen)
    )
    wanted = {number: single for number, single in pairs.items() if number in common}
    compared = _compare_ops(runs, chosen, mesh, wanted) if wanted else {}
    return {number: outputs for number, (_, outputs) in compared.items() if len(outputs) == 1}


def _find_first_wrong(
    comparisons: Mapping[int, tuple[list[TensorComparison], list[TensorComparison]]],
    consumers: Mapping[int, set[int]],
    communicated: Mapping[int, Sequence[TensorComparison]],
) -> int | None:
    agreements = {
        number: {output.verdict.agreement for output in outputs}
        for number, (inputs, outputs) in comparisons.items()
        if _is_comparable(inputs, outputs)
    }
    is_right: dict[int, bool] = {}  # the result agrees, or is corrected by all consumers
    for number in sorted(agreements, reverse=True):
        are_consumers_right = [
            is_right[consumer] for consumer in consumers.get(number, ()) if consumer in is_right
        ]
        after = {output.verdict.agreement for output in communicated.get(number, ())}
        is_fine = any(kinds and kinds <= TOLERABLE for kinds in (agreements[number], after))
        is_right[number] = is_fine or (bool(are_consumers_right) and all(are_consumers_right))
    for number in sorted(agreements):
        if agreements[number].intersection(_WRONG) and not is_right[number]:
            return number
    return None


def _is_comparable(inputs: Sequence[TensorComparison], outputs: Sequence[TensorComparison]) -> bool:
    """Whether an op is the same in both versions, and its result can be wrong.

    Ops on tensors of unrelated shapes are not the same. Integers computed from a shard, such as
    those of nonzero or argsort, are relative to the shard, and so are those that are counted from
    no tensor at all, as arange does.
    """
    has_comparable_inputs = all(
        argument.verdict.agreement is not Agreement.RESHAPED for argument in inputs
    )
    has_shards = any(argument.layout is not None for argument in inputs)
    is_counted = all(
        output.case.reference is not None and output.case.floor is None for output in outputs
    )
    is_relative = is_counted and (has_shards or not inputs)
    return has_comparable_inputs and not is_relative


def _renumber(step_result: StepResult, pairs: Mapping[int, int] | None = None) -> StepResult:
    outputs = []
    for name, tensor in step_result.snapshots.items():
        point = ProbePoint.decode(name)
        number = point.call if pairs is None else pairs.get(point.call)
        if number is not None:
            outputs.append((point._replace(module="", call=number).encode(), tensor))
    return StepResult(outputs, {}, {})
