"""What probably made a tensor differ, told from the numbers that each rank has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from shardscope.numerics.noise import Distance, Floor, as_exact, find_rms, is_finite, measure
from shardscope.parallel.parity.judge import Judged
from shardscope.parallel.parity.pieces import lines_along
from shardscope.record import Suspect

__all__ = ["Explanation", "explain"]

_MAX_PERMUTED_DIMS = 5
_MAX_CHUNKS = 64
_MAX_ELEMENTS = 2**22  # of a tensor that is looked at in many orders
_REST = 0.1  # of an error, that an explanation may leave


@final
@dataclass(frozen=True)
class Explanation:
    """A suspect, with what was seen in words, and the ratio to the right values if there is one."""

    suspect: Suspect
    detail: str
    ratio: float | None = None


@final
class _Evidence:
    """One tensor as each rank has it, beside what it should be, and what counts as the same."""

    def __init__(self, target: torch.Tensor, floor: Floor, ranks: Sequence[torch.Tensor]) -> None:
        self.target = _finite(target)
        self.floor = floor
        self.ranks = [_finite(one) for one in ranks]
        self._off = max(measure(one, self.target).rms for one in self.ranks)

    def is_near(self, value: torch.Tensor, target: torch.Tensor, scale: float = 1.0) -> bool:
        """Whether two are the same but for noise, of numbers so many times as large.

        What is explained must leave far less unexplained than there was.
        """
        distance = measure(value, target)
        is_close = self.floor.at(max(scale, 1e-30) * 4).allows(distance)
        is_better = distance.rms <= _REST * self._off
        return is_close and is_better and not self._is_nothing(distance, target)

    def _is_nothing(self, distance: Distance, target: torch.Tensor) -> bool:
        """Zeros are like zeros, which tells nothing."""
        return not bool(target.any()) and distance.largest == 0

    @property
    def are_alike(self) -> bool:
        return all(self.floor.allows(measure(one, self.ranks[0])) for one in self.ranks[1:])


def explain(judged: Judged, axes: Mapping[str, int]) -> Explanation:
    """The likeliest cause."""
    case = judged.case
    if case.floor is None or case.target is None or not judged.wholes:
        return Explanation(Suspect.UNKNOWN, "")
    evidence = _Evidence(case.target, case.floor, [as_exact(one) for one in judged.wholes])
    found = next(_explanations(evidence, axes), None)
    return found or Explanation(Suspect.UNKNOWN, _describe_odd(evidence))


def _explanations(evidence: _Evidence, axes: Mapping[str, int]) -> Iterator[Explanation]:
    if not any(bool(one.any()) for one in evidence.ranks):
        yield Explanation(Suspect.STALE, "it is zero on every rank", 0.0)
    yield from _find_addends(evidence, axes)
    yield from _find_ratio(evidence, axes)
    yield from _find_bias(evidence)
    if evidence.target.numel() <= _MAX_ELEMENTS:
        yield from _find_slices(evidence, axes)
        yield from _find_permutation(evidence)


def _find_addends(evidence: _Evidence, axes: Mapping[str, int]) -> Iterator[Explanation]:
    """Ranks that have a term each: along an axis they add up to the right values."""
    if evidence.are_alike:
        return
    scale = max(
        1.0, max(find_rms(one) for one in evidence.ranks) / max(evidence.floor.scale, 1e-300)
    )
    for name, lines in _groups(axes):
        sums = [torch.stack([evidence.ranks[rank] for rank in line]).sum(0) for line in lines]
        means = [one / len(line) for one, line in zip(sums, lines, strict=True)]
        for values, verb in ((sums, "summed"), (means, "averaged")):
            if all(evidence.is_near(one, evidence.target, scale) for one in values):
                yield Explanation(
                    Suspect.MISSING_REDUCTION,
                    f"each rank holds only its partial sum; {verb} over {name} they match",
                )
        rests = [_find_constant_rest(evidence, one, scale) for one in sums]
        if all(rests):
            yield Explanation(
                Suspect.MISSING_REDUCTION,
                f"each rank holds only its partial sum; summed over {name} they match, except "
                "for a constant along the last dim, such as a bias that each rank adds",
            )


def _groups(axes: Mapping[str, int]) -> Iterator[tuple[str, list[list[int]]]]:
    """The ranks that go together, along each axis and in all."""
    sizes = tuple(axes.values())
    for index, name in enumerate(axes):
        if sizes[index] > 1:
            yield name, list(lines_along(sizes, index))
    if len(axes) > 1 and math.prod(sizes) > 1:
        yield " × ".join(axes), [list(range(math.prod(sizes)))]


def _find_constant_rest(evidence: _Evidence, value: torch.Tensor, scale: float = 1.0) -> bool:
    """Whether it is off by one row, the same everywhere."""
    rows = evidence.target.numel() // max(1, evidence.target.shape[-1] if value.ndim else 1)
    if value.ndim < 2 or rows < 2:
        return False
    rest = value - evidence.target
    mean = rest.mean(dim=tuple(range(value.ndim - 1)), keepdim=True)
    return evidence.is_near(value - mean, evidence.target, scale)


def _find_bias(evidence: _Evidence) -> Iterator[Explanation]:
    if evidence.are_alike and _find_constant_rest(evidence, evidence.ranks[0]):
        yield Explanation(
            Suspect.DOUBLE_REDUCTION,
            "it differs by a constant along the last dim, such as a bias that each rank adds "
            "before the sum",
        )


def _find_ratio(evidence: _Evidence, axes: Mapping[str, int]) -> Iterator[Explanation]:
    ratios = [_robust_ratio(one, evidence.target) for one in evidence.ranks]
    ratio = ratios[0]
    is_one = all(one is not None and math.isclose(one, ratio or 0, rel_tol=1e-6) for one in ratios)
    if ratio is None or not is_one or math.isclose(ratio, 1.0, rel_tol=1e-6):
        return
    if not all(
        evidence.is_near(one, evidence.target * ratio, abs(ratio)) for one in evidence.ranks
    ):
        return
    named = dict(axes) if len(axes) == 1 else {**axes, "all ranks": math.prod(axes.values())}
    times = [name for name, size in named.items() if _is_near_number(ratio, size) and size > 1]
    parts = [name for name, size in named.items() if _is_near_number(1 / ratio, size) and size > 1]
    if times:
        yield Explanation(
            Suspect.DOUBLE_REDUCTION,
            f"it is {round(ratio)} times too large, the size of {' or of '.join(times)}: it is "
            "summed once too often",
            ratio,
        )
    if parts:
        yield Explanation(
            Suspect.DOUBLE_REDUCTION,
            f"it is 1/{round(1 / ratio)} of what it should be, the size of "
            f"{' or of '.join(parts)}: it is averaged once too often, or should be summed where it "
            "is averaged",
            ratio,
        )
    yield Explanation(Suspect.SCALED, f"it is {ratio:.4g} times what it should be", ratio)


def _robust_ratio(value: torch.Tensor, target: torch.Tensor) -> float | None:
    """The median ratio, of elements that are not small."""
    size = target.abs()
    if not size.numel() or not bool(size.any()):
        return None
    large = size >= size[size > 0].median()
    return float((value[large] / target[large]).median())


def _is_near_number(ratio: float, number: int) -> bool:
    return math.isclose(ratio, number, rel_tol=1e-2)


def _find_slices(evidence: _Evidence, axes: Mapping[str, int]) -> Iterator[Explanation]:
    """Values that are right in another rank's place."""
    for (name, size), dim in itertools.product(axes.items(), range(evidence.target.ndim)):
        if not 1 < size <= min(_MAX_CHUNKS, evidence.target.shape[dim]):
            continue
        wanted = evidence.target.chunk(size, dim)
        for value in _distinct(evidence.ranks):
            order = _match_chunks(evidence, value.chunk(size, dim), wanted)
            moved = [(at, of) for at, of in enumerate(order) if of not in (None, at)]
            if moved and None not in order:
                at, of = moved[0]
                yield Explanation(
                    Suspect.WRONG_SLICE,
                    f"cut in {size} along dim {dim}, piece {at} is piece {of} of the right values: "
                    f"a rank of {name} has another's",
                )


def _match_chunks(
    evidence: _Evidence, values: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
) -> list[int | None]:
    order: list[int | None] = []
    for at, value in enumerate(values):
        places = sorted(range(len(wanted)), key=lambda place: place != at)
        order.append(
            next(
                (
                    place
                    for place in places
                    if wanted[place].shape == value.shape and evidence.is_near(value, wanted[place])
                ),
                None,
            )
        )
    return order


def _find_permutation(evidence: _Evidence) -> Iterator[Explanation]:
    value, target = evidence.ranks[0], evidence.target
    if not evidence.are_alike:
        return
    if 1 < target.ndim <= _MAX_PERMUTED_DIMS:
        for dims in itertools.permutations(range(target.ndim)):
            moved = target.permute(dims).reshape(target.shape)
            if list(dims) != sorted(dims) and evidence.is_near(value, moved):
                yield Explanation(
                    Suspect.PERMUTED, f"its dims are in the order {', '.join(map(str, dims))}"
                )
    if target.numel() > 1 and evidence.is_near(
        value.flatten().sort().values, target.flatten().sort().values
    ):
        yield Explanation(Suspect.PERMUTED, "it has the right values in a different order")


def _describe_odd(evidence: _Evidence) -> str:
    right = [evidence.is_near(one, evidence.target) for one in evidence.ranks]
    if any(right) and not all(right):
        good = ", ".join(str(rank) for rank, is_right in enumerate(right) if is_right)
        return f"it matches on rank {good} only"
    return ""


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if is_finite(tensor) else torch.where(torch.isfinite(tensor), tensor, 0.0)


def _distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for tensor in tensors:
        if not any(torch.equal(tensor, one) for one in found):
            found.append(tensor)
    return found
