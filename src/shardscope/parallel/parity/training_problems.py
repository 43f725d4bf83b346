"""Explains differences after backward: the gradient norm, clipping, the optimizer, counters.

The gradients of both versions agree here, so that the code behind these differences is no module's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch

from shardscope.numerics import to_fp64_on_cpu
from shardscope.parallel.equivalence import StepResult, TensorComparison
from shardscope.parallel.parity.causes import explain
from shardscope.parallel.parity.evidence import list_sizes
from shardscope.parallel.parity.explanation import (
    OWN_VALUES,
    Explanation,
    list_by_rank,
    list_names,
    make_sentence,
    suggest_remedy,
)
from shardscope.parallel.parity.locations import list_modules
from shardscope.parallel.parity.norm_causes import explain_largest, explain_norm
from shardscope.parallel.parity.optimizer_causes import explain_optimizer
from shardscope.parallel.parity.problem import Problem
from shardscope.parallel.parity.result import OriginKind, ParityResult
from shardscope.record import Agreement, Phase, Source, Suspect, TensorKind

_RTOL = 1e-5  # of squared norms, which are sums of compared gradients


@final
class TrainingProblems:
    """The problems of a training step whose model computes the right outputs and gradients."""

    def __init__(
        self,
        parity_result: ParityResult,
        axes: Mapping[str, int],
        wrong: Sequence[TensorComparison],
    ) -> None:
        self._result = parity_result
        self._axes = axes
        self._wrong = wrong

    def find(self) -> Iterator[Problem]:
        """The first of these that differs: the norm, clipping, settings, the optimizer, numbers."""
        counts = {rank.training.num_optimizer_steps for rank in self._result.ranks}
        updated = self._list(TensorKind.UPDATED)
        finders = (
            (TensorKind.NORM, self._describe_norm),
            (TensorKind.CLIPPED, self._describe_clipping),
            (TensorKind.SETTING, self._describe_settings),
            (TensorKind.STATE, self._describe_optimizer),
            (TensorKind.UPDATED, self._describe_optimizer),
        )
        for kind, describe in finders:
            wrong = self._list(kind)
            if wrong and kind is TensorKind.CLIPPED and len(counts) > 1 and updated:
                describe = self._describe_optimizer  # some ranks skip it, and what precedes it
            if wrong:
                yield describe(wrong)
                return
        known: set[object] = set()  # a number that is read, and then returned, is one
        for kind in (TensorKind.COUNTER, TensorKind.REPORTED):
            for result in self._list(kind):
                values = (float(_target(result).reshape(-1)[0]), *_values_of(result))
                key = tuple(f"{value:.5g}" for value in values)
                if key not in known:
                    yield self._describe_number(result)
                known.add(key)

    def _list(self, kind: TensorKind) -> list[TensorComparison]:
        return [result for result in self._wrong if result.case.kind is kind]

    def _find_source(self, kind: TensorKind, name: str) -> Source | None:
        """The line behind a number: of the ranks, or of the first op that differs."""
        source = self._result.find_source(kind, name)
        if source is None and self._result.op is not None:
            return self._result.op.source
        return source

    def _describe_norm(self, wrong: Sequence[TensorComparison]) -> Problem:
        comparison = wrong[0]
        index = _find_first_wrong(comparison)
        values, target = _values_of(comparison, index), _target(comparison).reshape(-1)[index]
        single = float(target)
        cause = explain_norm(values, target, self._result, self._axes)
        cause = cause or explain(comparison, self._axes)
        if cause.suspect is Suspect.SCALED:  # as any number is
            clause = f"its square is {(values[0] / single) ** 2:.6g} times what it should be: some "
            clause += "gradients are left out, or counted several times"
            cause = Explanation(Suspect.NORM, clause, ratio=cause.ratio)
        fact = (
            f"Gradients agree, but the norm that they are clipped with is {_list_values(values)} "
            f"on the ranks and {single:.6g} on the single device. {cause.to_sentence()}"
        )
        return Problem(
            cause,
            "the gradient norm",
            fact.strip(),
            cause.remedy
            or "Sum the squared norms of shards over the axes that shard them, and count a "
            "gradient that ranks hold as copies once.",
            phase=Phase.BACKWARD,
            names=(comparison.case.name,),
            source=self._result.find_collective(comparison)
            or self._find_source(TensorKind.NORM, comparison.case.name),
        )

    def _describe_clipping(self, wrong: Sequence[TensorComparison]) -> Problem:
        names = [result.case.name for result in wrong]
        has_norm = any(c.case.kind is TensorKind.NORM for c in self._result.comparisons)
        if not has_norm and not self._is_clipped():
            return self._describe_changed(wrong)
        cause = self._explain_clipping()
        what = "Gradients and their norm agree" if has_norm else "Gradients agree"
        fact = (
            f"{what} before clipping; after it {list_names(names)} "
            f"{'differs' if len(names) == 1 else 'differ'}. {cause.to_sentence()}"
        )
        return Problem(
            cause,
            "gradient clipping",
            fact.strip(),
            cause.remedy,
            phase=Phase.BACKWARD,
            names=tuple(names),
            source=self._find_source(TensorKind.NORM, "gradient norm"),
        )

    def _is_clipped(self) -> bool:
        """Whether the single device, or a rank, multiplies all its gradients by one factor."""
        factors = map(_find_factor, (self._result.reference, *self._result.ranks))
        return any(
            factor is not None and not math.isclose(factor, 1, rel_tol=_RTOL) for factor in factors
        )

    def _describe_changed(self, wrong: Sequence[TensorComparison]) -> Problem:
        """The problem of some gradients that the ranks change between backward and optimizer."""
        causes = {result.case.name: explain(result, self._axes) for result in wrong}
        keys = [cause.group_key for cause in causes.values()]
        key = max(keys, key=keys.count)
        names = [name for name, cause in causes.items() if cause.group_key == key]
        chosen = [result for result in wrong if result.case.name in names]
        cause = causes[names[0]]
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        lines = (self._result.find_collective(result) for result in chosen)
        source = next((line for line in lines if line is not None), None)
        fact = (
            f"Gradients agree after backward; when the optimizer takes them, {list_names(names)} "
            f"{'differs' if len(names) == 1 else 'differ'}. {cause.to_sentence('each')}"
        )
        return Problem(
            cause,
            list_modules(modules, self._result.reference.parameters) or "the model itself",
            fact.strip(),
            suggest_remedy(cause, OriginKind.GRADIENT_OF_PARAMETER),
            phase=Phase.BACKWARD,
            names=tuple(names),
            source=source or self._find_source(TensorKind.NORM, "gradient norm"),
        )

    def _explain_clipping(self) -> Explanation:
        """Why gradients agree before they are clipped, and not after it."""
        single = _find_factor(self._result.reference)
        factors = [_find_factor(rank) for rank in self._result.ranks]
        known = [factor for factor in factors if factor is not None]
        remedy = "Clip with one norm and one limit on all ranks."
        if single is None or len(known) < len(factors):
            clause = "" if single is None else self._list_unclipped(single)
            if clause:
                remedy = (
                    "Clip all gradients on every rank, also those that others count in the norm."
                )
            return Explanation(Suspect.CLIPPING, clause, remedy=remedy)
        unclipped = [
            rank for rank, factor in enumerate(known) if math.isclose(factor, 1, rel_tol=1e-6)
        ]
        if len(unclipped) == len(known):
            return Explanation(
                Suspect.CLIPPING,
                "the ranks do not clip them",
                remedy="Clip the gradients of the parameters that the optimizer holds. A generator "
                "of parameters can be iterated only once: pass a list.",
            )
        clause = f"the ranks multiply them by {_list_values(known)}, the single device by "
        clause += f"{single:.6g}"
        # The norms that the ranks have, if they clip to the limit of the single device.
        reference = math.sqrt(sum(self._result.reference.local_squares.values()))
        norm = explain_norm(
            [reference * single / factor for factor in known],
            torch.tensor(reference, dtype=torch.float64),
            self._result,
            self._axes,
        )
        norm = norm or explain_largest(
            [single / factor for factor in known if factor], self._result
        )
        if norm is not None and not math.isclose(single, 1, rel_tol=1e-6):
            return replace(norm, clause=f"{clause}: the norm is wrong, as {norm.clause}")
        if unclipped:
            listed = ", ".join(map(str, unclipped))
            clause = f"rank {listed} does not clip them, and the others do"
            remedy = "Decide whether to clip on all ranks alike, from a norm that all ranks share."
        return Explanation(Suspect.CLIPPING, clause, remedy=remedy)

    def _list_unclipped(self, single: float) -> str:
        """A clause that names the gradients that ranks do not clip, and where; empty if none."""
        ranks_of: dict[tuple[str, ...], list[int]] = {}
        for rank, result in enumerate(self._result.ranks):
            names = tuple(
                name
                for name, square in result.local_squares.items()
                if square and math.isclose(result.clipped_squares.get(name, 0.0), square)
            )
            if names and not math.isclose(single, 1, rel_tol=1e-6):
                ranks_of.setdefault(names, []).append(rank)
        return "; ".join(
            f"rank {', '.join(map(str, ranks))} does not clip {list_names(names)}"
            for names, ranks in ranks_of.items()
        )

    def _describe_settings(self, wrong: Sequence[TensorComparison]) -> Problem:
        clauses = []
        ratio = None
        is_common = True
        for result in wrong:
            single = _target(result).reshape(-1).tolist()
            ranks = [full.reshape(-1).tolist() for full in result.full] or [single]
            index = next(i for i in range(len(single)) if any(r[i] != single[i] for r in ranks))
            values = [rank[index] for rank in ranks]
            is_common = is_common and len(set(values)) == 1
            clauses.append(
                f"{result.case.name} is {list_by_rank(values)} and {single[index]:.6g} on the "
                "single device"
            )
            ratio = values[0] / single[index] if single[index] else ratio
        clause = "; ".join(clauses)
        sizes = [
            " and ".join(names)
            for names, size in list_sizes(self._axes)
            if ratio in (size, 1 / size) and is_common
        ]
        if sizes:
            clause += f", a factor of the size of {sizes[0]}"
        cause = Explanation(Suspect.SCALED, clause, ratio=ratio)
        if not is_common:
            cause = Explanation(Suspect.OUT_OF_SYNC, clause)
        return Problem(
            cause,
            "the optimizer's settings",
            f"Gradients agree. In the optimizer {clause}.",
            "Make the optimizer, and step its scheduler, with the same settings and equally often "
            "on every rank.",
            phase=Phase.OPTIMIZER,
            names=tuple(result.case.name for result in wrong),
        )

    def _describe_optimizer(self, _: Sequence[TensorComparison]) -> Problem:
        wrong = [
            result
            for result in self._wrong
            if result.case.kind in (TensorKind.STATE, TensorKind.UPDATED)
        ]
        updated = [result for result in wrong if result.case.kind is TensorKind.UPDATED] or wrong
        names = list(dict.fromkeys(result.case.name.partition(" ")[0] for result in updated))
        cause = explain_optimizer(updated, names, self._result, self._axes)
        what = "the updated " if updated[0].case.kind is TensorKind.UPDATED else "the state of "
        verb = "differs" if len(names) == 1 else "differ"
        fact = f"All gradients agree; {what}{list_names(names)} {verb}. {cause.to_sentence()}"
        return Problem(
            cause,
            list_names(names),
            make_sentence(fact.strip()).removesuffix("."),
            cause.remedy
            or "Compare the optimizer's parameters and state on the ranks with the model's: it "
            "should be made after sharding, from the parameters of the sharded model.",
            phase=Phase.OPTIMIZER,
            names=tuple(result.case.name for result in wrong),
            source=cause_source(self._result),
        )

    def _describe_number(self, result: TensorComparison) -> Problem:
        cause = explain(result, self._axes)
        name = result.case.name
        values, single = _values_of(result), float(_target(result).reshape(-1)[0])
        what = (
            "a counter" if result.case.kind is TensorKind.COUNTER else "a number that is reported"
        )
        disagrees = result.verdict.agreement is Agreement.RANKS_DISAGREE
        if cause.suspect is Suspect.UNKNOWN and disagrees:
            cause = OWN_VALUES
        source = self._result.find_collective(result)
        source = source or self._find_source(result.case.kind, name) or self._find_reading(values)
        fact = (
            f"The model is trained as on the single device; {what}, {name}, is "
            f"{_list_values(values)} on the ranks and {single:.6g} on the single device. "
            f"{cause.to_sentence()}"
        )
        return Problem(
            cause,
            name,
            fact.strip(),
            cause.remedy
            or "Reduce it over the ranks that compute different parts of it, once, and count what "
            "ranks hold as copies once.",
            names=(name,),
            source=source,
        )

    def _find_reading(self, values: Sequence[float]) -> Source | None:
        """The line that reads on the first rank what the step returns there."""
        for rank in self._result.ranks[:1]:
            for key, numbers in rank.training.scalars.items():
                is_read = key in rank.training.sources and bool(numbers)
                if is_read and math.isclose(float(numbers[-1]), values[0], rel_tol=1e-6):
                    return rank.training.sources[key]
        return None


def cause_source(parity_result: ParityResult) -> Source | None:
    """The line of the first op outside the modules that differs, if one was found."""
    return None if parity_result.op is None else parity_result.op.source


def _find_factor(result: StepResult) -> float | None:
    """By what clipping has multiplied all gradients that are stored here; None if it varies."""
    after = result.clipped_squares
    if not after.keys() >= result.local_squares.keys():
        return None
    factors = [
        math.sqrt(after[name] / square)
        for name, square in result.local_squares.items()
        if square > 0
    ]
    factor = statistics.median(factors) if factors else 1.0
    is_common = all(math.isclose(other, factor, rel_tol=_RTOL) for other in factors)
    return factor if is_common else None


def _target(comparison: TensorComparison) -> torch.Tensor:
    assert comparison.case.target is not None
    return comparison.case.target


def _find_first_wrong(comparison: TensorComparison) -> int:
    """Which number of several, such as norms of groups of parameters, differs first."""
    target = to_fp64_on_cpu(_target(comparison)).reshape(-1)
    for index, single in enumerate(target.tolist()):
        if any(
            not math.isclose(value, single, rel_tol=_RTOL)
            for value in _values_of(comparison, index)
        ):
            return index
    return 0


def _values_of(comparison: TensorComparison, index: int = 0) -> list[float]:
    """A number of a tensor, by default the first, on each rank."""
    tensors = (tensor for tensor in comparison.case.ranks if tensor is not None)
    return [float(tensor.detach().double().reshape(-1)[index]) for tensor in tensors]


def _list_values(values: Sequence[float]) -> str:
    texts = list(dict.fromkeys(f"{value:.6g}" for value in values))
    shown = ", ".join(texts[:4])
    return f"{shown}, …" if len(texts) > 4 else shown
