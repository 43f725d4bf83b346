"""Turns the result of a comparison into problems with a cause, a record and findings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from msgspec.structs import replace

from shardscope.parallel.equivalence.compare import TensorComparison, name_dtype
from shardscope.parallel.parity.causes import (
    UNKNOWN,
    Explanation,
    explain,
    explain_fused,
    explain_mixed,
    explain_wrong_group,
    make_sentence,
    sharding_axes,
)
from shardscope.parallel.parity.first_op import WrongOp
from shardscope.parallel.parity.locate import Kind, Origin, is_within
from shardscope.parallel.parity.pipeline import ParityResult
from shardscope.parallel.parity.recheck import AGREES_IN_FP64, CONFIRMED
from shardscope.parallel.parity.remedies import suggest
from shardscope.parallel.parity.ties import BrokenTie, explain_tie
from shardscope.record import (
    TOLERABLE,
    Agreement,
    Axis,
    Divergence,
    Finding,
    Parity,
    Phase,
    Severity,
    Source,
    Suspect,
    TensorKind,
    TensorVerdict,
)
from shardscope.record.layer_names import fold_layers
from shardscope.record.patterns import matches_name

# Verdicts whose detail is enough where no cause is known.
_PLAIN = (Agreement.MISSING, Agreement.EXTRA, Agreement.RESHAPED, Agreement.NONFINITE)
# Causes that apply to weights, which are loaded and not computed.
_OF_WEIGHTS = (Suspect.STALE, Suspect.WRONG_SLICE, Suspect.WRONG_GROUP, Suspect.PERMUTED)
# Causes that apply to reduced partial sums, but not to the partial sums themselves.
_REDUCED = (Suspect.WRONG_GROUP, Suspect.DOUBLE_REDUCTION, Suspect.SCALED)
_NOISY = 0.1  # relative noise of an output
_DIVIDE_LOSS = "divide the loss of each micro-batch by their number, once"
_NAMED = 3  # tensors that a finding names
_MAX_ELEMENTS = 2**14  # the largest tensor that gets an explanation of its own


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """A cause and its location; `module` is None if it is not in the code of a module."""

    cause: Explanation
    subject: str
    fact: str
    remedy: str
    module: str | None = None
    phase: Phase = Phase.FORWARD
    names: tuple[str, ...] = ()  # tensors that show the problem, if it is not in a module
    rule: str = ""  # if it is not the rule of the cause
    op: str = ""
    source: Source | None = None


def make_parity(
    parity_result: ParityResult,
    axes: Mapping[str, int],
    problems: Sequence[Problem],
    *,
    is_in_processes: bool,
) -> Parity:
    """The record of the comparison; every tensor that differs gets the cause of a problem."""
    return Parity(
        axes=tuple(Axis(name=name, size=size) for name, size in axes.items()),
        tensors=tuple(
            _explain_verdict(result, axes, problems) for result in parity_result.comparisons
        ),
        divergences=tuple(
            Divergence(
                module=problem.module,
                phase=problem.phase,
                suspect=problem.cause.suspect,
                detail=problem.fact,
                type=parity_result.types.get(problem.module, ""),
                op=problem.op,
                source=problem.source,
                remedy=problem.remedy,
            )
            for problem in problems
            if problem.module is not None
        ),
        num_compared_modules=len(parity_result.types),
        is_in_processes=is_in_processes,
        has_exact=parity_result.has_exact,
        has_backward=bool(parity_result.reference.gradients),
    )


def _explain_verdict(
    result: TensorComparison, axes: Mapping[str, int], problems: Sequence[Problem]
) -> TensorVerdict:
    verdict = result.verdict
    if verdict.agreement in TOLERABLE or not problems:
        return verdict
    problem = next(
        (
            problem
            for problem in problems
            if verdict.name in problem.names
            or (problem.module and is_within(verdict.name, problem.module))
        ),
        problems[0],
    )
    suspect = problem.cause.suspect
    if verdict.name not in problem.names and math.prod(verdict.shape) > _MAX_ELEMENTS:
        return replace(verdict, suspect=suspect)
    explanation = explain(result, axes, batch_axes=result.case.batch_axes)
    if explanation.suspect is not suspect and verdict.name not in problem.names:
        return replace(verdict, suspect=suspect)
    explanation = explanation if explanation.suspect is suspect else problem.cause
    clause = "" if verdict.agreement in _PLAIN else explanation.describe()
    detail = "; ".join(filter(None, (verdict.detail, clause)))
    return replace(verdict, suspect=suspect, ratio=explanation.ratio, detail=detail)


def find_problems(parity_result: ParityResult, axes: Mapping[str, int]) -> list[Problem]:
    """Why tensors differ, each cause once; empty if all agree."""
    wrong = [
        result
        for result in parity_result.comparisons
        if result.case.kind is not TensorKind.PARAMETER
        and result.verdict.agreement not in TOLERABLE
    ]
    if not wrong:
        return []
    problems = _Problems(parity_result, axes, wrong)
    # Where no module is the cause, report the tensors, so that every difference has a finding.
    return list(problems.find()) or list(problems.describe_tensors())


@final
class _Problems:
    def __init__(
        self,
        parity_result: ParityResult,
        axes: Mapping[str, int],
        wrong: Sequence[TensorComparison],
    ) -> None:
        self._parity_result = parity_result
        self._axes = axes
        self._wrong = wrong
        self._outputs_agree = all(result.case.kind is TensorKind.GRADIENT for result in wrong)
        self._batch_axes = next((r.case.batch_axes for r in wrong if r.case.batch_axes), ())
        self._causes: dict[int, Explanation] = {}

    def find(self) -> Iterator[Problem]:
        """The problems in forward, or those in backward, in the order of backward."""
        explained: set[str] = set()  # modules whose copy of a tied parameter has different values
        is_called_again = self._parity_result.reference.num_calls > 1  # perhaps after an update
        for tie in self._parity_result.broken_ties:
            problem = self._describe_tie(tie)
            if problem is not None:
                yield problem
                self._wrong = [r for r in self._wrong if not _is_gradient_of(r, tie.names)]
                names = tie.names if is_called_again else self._find_changed(tie.copies)
                explained |= {name.rpartition(".")[0] for name in names}
        origins = self._parity_result.origins
        is_forward = bool(origins) and origins[0].phase is Phase.FORWARD
        if not self._wrong or (is_forward and origins[0].module in explained):
            return
        if self._outputs_agree:
            self._find_mixed_gradients()
        common = self._find_common_cause()
        if common is not None:
            yield common
            return
        if all(result.case.kind is TensorKind.BUFFER for result in self._wrong):
            yield from self._describe_buffers()
            return
        parameter_origins = [
            origin for origin in origins if origin.kind is Kind.GRADIENT_OF_PARAMETER
        ]
        yield from self._group_parameters(
            [origin for origin in parameter_origins if origin.comparison in self._wrong]
        )
        for origin in origins:
            if origin.kind is not Kind.GRADIENT_OF_PARAMETER:
                yield self._describe(origin)

    def _find_mixed_gradients(self) -> None:
        """Explain gradients without a known cause as sums over different parameters."""
        origin_comparisons = {origin.comparison for origin in self._parity_result.origins}
        unknown = [
            result
            for result in self._wrong
            if result in origin_comparisons and self._explain(result).suspect is Suspect.UNKNOWN
        ]
        for result, cause in explain_mixed(unknown, self._axes):
            self._causes[id(result)] = cause

    def _describe_tie(self, tie: BrokenTie) -> Problem | None:
        """The problem of a broken tie; None if the parallel model gives all copies one gradient."""
        compared = [r for r in self._parity_result.comparisons if _is_gradient_of(r, tie.names)]
        cause = explain_tie(
            tie,
            [result for result in compared if result in self._wrong],
            num_compared=len(compared),
            changed=self._find_changed(tie.copies),
        )
        if cause is None:
            return None
        module = tie.copies[0].rpartition(".")[0]
        return Problem(
            cause,
            module or "the model itself",
            self._after_outputs(cause.state()),
            cause.remedy,
            module=module,
            phase=Phase.BACKWARD,
            names=tie.names,
        )

    def _find_changed(self, names: Sequence[str]) -> list[str]:
        """The parameters of these names whose values differ before the step."""
        comparisons = (
            r for r in self._parity_result.comparisons if r.case.kind is TensorKind.PARAMETER
        )
        return [result.case.name for result in comparisons if result.case.name in names]

    def _explain(
        self,
        comparison: TensorComparison,
        module: str | None = None,
        inputs: Sequence[torch.Tensor] = (),
        *,
        is_forward: bool = False,
    ) -> Explanation:
        if id(comparison) not in self._causes:
            biases = [
                parameter
                for name, parameter in self._parity_result.reference.parameters.items()
                if parameter.ndim == 1 and name.rpartition(".")[0] == module
            ]
            self._causes[id(comparison)] = explain(
                comparison,
                self._axes,
                biases,
                inputs,
                is_forward=is_forward,
                batch_axes=self._batch_axes,
            )
        return self._causes[id(comparison)]

    def _find_common_cause(self) -> Problem | None:
        """A cause of all gradients outside the modules: one factor, or an axis not reduced over."""
        gradients = [
            result
            for result in self._parity_result.comparisons
            if result.case.kind is TensorKind.GRADIENT and not result.case.name.startswith("inputs")
        ]
        wrong = [result for result in gradients if result in self._wrong]
        right = [
            result
            for result in gradients
            if result.verdict.agreement in TOLERABLE and not _is_noise(result.verdict)
        ]
        modules = {result.case.name.rpartition(".")[0] for result in wrong}
        if not self._outputs_agree or not wrong:
            return None
        if self._parity_result.num_cleared > self._parity_result.reference.num_cleared:
            return self._describe_cleared()
        if right or len(modules) < 2:
            return None
        causes = [self._explain(result) for result in wrong]
        known = [cause for cause in causes if cause.suspect is not Suspect.UNKNOWN]
        if 2 * len(known) < len(causes) or len({cause.kind for cause in known}) != 1:
            return self._find_late_cause(wrong)
        return self._describe_common(known[0], len(known), len(causes))

    def _describe_common(self, cause: Explanation, num_known: int, num_wrong: int) -> Problem:
        """The problem that `num_known` of `num_wrong` gradients have in common."""
        facts = ["Outputs agree."]
        is_all = num_known == num_wrong
        count = f"{num_known} of {num_wrong} gradients"
        if cause.suspect is Suspect.MISSING_REDUCTION:
            subject = "No gradient is" if is_all else f"{count} are not"
            facts += [f"{subject} reduced over {' and '.join(cause.axes)}.", cause.state()]
        elif cause.predicate and is_all:
            facts.append(cause.state("every gradient"))
        else:
            subject = "All gradients" if is_all else count
            facts += [f"{subject} differ in the same way.", cause.state("each")]
        remedies = [suggest(cause, Kind.LOSS)]
        num_calls = self._find_num_calls(cause)
        if num_calls is not None and cause.axes:
            facts.append(f"{num_calls} is also the number of micro-batches.")
            remedies.append(f"Or {_DIVIDE_LOSS}.")
        elif num_calls is not None:
            facts.append(f"{num_calls} is the number of micro-batches.")
            remedies = [make_sentence(_DIVIDE_LOSS)]
        if not is_all:
            facts.append("The others differ in other ways.")
        fact = " ".join(facts)
        return Problem(cause, "all gradients", fact, " ".join(remedies), phase=Phase.BACKWARD)

    def _describe_cleared(self) -> Problem:
        """The problem that the ranks clear gradients between micro-batches."""
        times = {0: "never", 1: "once"}
        num_on_ranks, num_on_single = (
            self._parity_result.num_cleared,
            self._parity_result.reference.num_cleared,
        )
        cause = Explanation(
            Suspect.STALE,
            "gradients are cleared between two backward passes of the step "
            f"{times.get(num_on_ranks, f'{num_on_ranks} times')} on the ranks and "
            f"{times.get(num_on_single, f'{num_on_single} times')} on the single device, so "
            "gradients of earlier micro-batches are lost",
            remedy="Call zero_grad() once before the first micro-batch, not before each of them.",
        )
        fact = f"Outputs agree. {cause.state()}"
        return Problem(cause, "all gradients", fact, cause.remedy, phase=Phase.BACKWARD)

    def _find_num_calls(self, cause: Explanation) -> int | None:
        """The number of calls of the model in a step, if it is the factor between gradients."""
        ratio = cause.ratio or 1.0
        counts = {self._parity_result.num_calls, self._parity_result.reference.num_calls} - {1}
        factor = max(ratio, 1 / ratio)
        return next((n for n in counts if math.isclose(factor, n, rel_tol=1e-2)), None)

    def _find_late_cause(self, wrong: Sequence[TensorComparison]) -> Problem | None:
        """The problem that all parameter gradients differ, though those of module outputs agree."""
        parameter_names = {
            origin.comparison.case.name
            for origin in self._parity_result.origins
            if origin.kind is Kind.GRADIENT_OF_PARAMETER and origin.is_first
        }
        if len(parameter_names) < len(self._parity_result.origins) or any(
            r.case.name not in parameter_names for r in wrong
        ):
            return None
        agreements = {result.verdict.agreement for result in wrong}
        if not agreements <= {Agreement.DIFFERS, Agreement.RANKS_DISAGREE}:
            return None
        cause = Explanation(
            Suspect.UNKNOWN,
            "the gradient of every parameter differs, although those of all modules' outputs agree",
            remedy="Look at what changes gradients during and after backward: hooks, zero_grad() "
            "between micro-batches, clipping, and the reduction over ranks.",
        )
        return Problem(
            cause,
            "all gradients",
            f"Outputs agree. {cause.state()}",
            cause.remedy,
            phase=Phase.BACKWARD,
        )

    def _group_parameters(self, origins: Sequence[Origin]) -> Iterator[Problem]:
        """One problem for the parameters whose gradients differ for the same reason."""
        groups: dict[object, list[Origin]] = {}
        # Sums and means of noise are zero, so noise joins the cause of the other gradients.
        for origin in sorted(origins, key=lambda origin: _is_noise(origin.comparison.verdict)):
            cause, agreement = self._explain(origin.comparison), origin.comparison.verdict.agreement
            same = (
                key
                for key, group in groups.items()
                if _is_noise(origin.comparison.verdict)
                and self._explain(group[0].comparison).suspect is cause.suspect
                and self._explain(group[0].comparison).axes == cause.axes
            )
            new_key = (cause.kind, agreement if agreement in _PLAIN else None)
            groups.setdefault(next(same, new_key), []).append(origin)
        for group in groups.values():
            yield self._describe_parameters(group)

    def _describe_parameters(self, origins: Sequence[Origin]) -> Problem:
        first = origins[0]
        cause, verdict = self._explain(first.comparison), first.comparison.verdict
        names = [origin.comparison.case.name for origin in origins]
        modules = list(dict.fromkeys(origin.module or "" for origin in origins))
        module = _find_common_module(modules)
        if module is None or self._is_partly_wrong(module, names):
            location = self._list_modules(modules)
        else:
            location = module
        if len(names) > 1:
            clause = f"the gradients of {_list_names(names)} differ"
            agree = "those of their modules' outputs agree"
        else:
            clause = f"the gradient of {names[0]} differs"
            agree = "that of its module's output agrees"
        if all(origin.is_first for origin in origins):
            clause += f", although {agree}"
        is_plain = cause.suspect is Suspect.UNKNOWN and verdict.agreement in _PLAIN
        why = cause.state("each" if len(names) > 1 else "it")
        why = make_sentence(verdict.detail) if is_plain else why
        return Problem(
            cause,
            location or "the model itself",
            self._after_outputs(f"{make_sentence(clause)} {why}"),
            suggest(cause, first.kind),
            module=module,
            phase=Phase.BACKWARD,
            names=tuple(names),
            rule=f"parity-{verdict.agreement}" if is_plain else "",
        )

    def _is_partly_wrong(self, module: str, names: Sequence[str]) -> bool:
        """Whether a module is a container without code and also holds parameters that are right."""
        if self._parity_result.types.get(module) not in ("ModuleDict", "ModuleList"):
            return False
        inner = {n for n in self._parity_result.reference.gradients if is_within(n, module)}
        return not inner <= set(names)

    def _list_modules(self, modules: Sequence[str]) -> str:
        """The names as text; modules that differ in all layers are shown as one pattern."""
        owners = {name.rpartition(".")[0] for name in self._parity_result.reference.parameters}
        locations: dict[str, None] = {}
        for module in modules:
            pattern = fold_layers(module)
            matching = {owner for owner in owners if matches_name(pattern, owner)}
            is_folded = len(modules) > _NAMED and matching <= set(modules)
            locations.setdefault(pattern if is_folded else module)
        return ", ".join(locations)

    def _describe(self, origin: Origin) -> Problem:
        is_first = bool(self._parity_result.origins) and origin is self._parity_result.origins[0]
        op = self._parity_result.op if is_first else None
        cause = self._explain_origin(origin, op)
        # A caller may reduce the partial sums. If another cause explains its output, then it
        # does reduce them.
        outer = origin.outer if cause.suspect is Suspect.MISSING_REDUCTION else None
        while outer is not None:
            reduced = self._explain(outer.comparison, outer.module, outer.inputs, is_forward=True)
            if reduced.suspect in _REDUCED:
                clause = reduced.describe(f"the output of `{outer.module}`")
                cause = dataclasses.replace(reduced, clause=clause, predicate="")
                origin = dataclasses.replace(origin, module=outer.module)
                break
            outer = outer.outer
        agreement = origin.comparison.verdict.agreement
        is_plain = cause.suspect is Suspect.UNKNOWN and agreement in _PLAIN
        if is_plain:
            cause = Explanation(Suspect.UNKNOWN, origin.comparison.verdict.detail)
        named = "" if op is None else f" The first op to differ is {op.name}."
        fact = f"{_describe_location(origin)}{named} {cause.state()}".strip()
        return Problem(
            cause,
            _name_location(origin),
            fact if origin.phase is Phase.FORWARD else self._after_outputs(fact),
            suggest(cause, origin.kind),
            module=origin.module,
            phase=origin.phase,
            rule=f"parity-{agreement}" if is_plain else "",
            op="" if op is None else op.name,
            source=None if op is None else op.source,
        )

    def _explain_origin(self, origin: Origin, op: WrongOp | None) -> Explanation:
        """The cause of a divergence, from weights, values, the op or the layout, in this order."""
        if origin.comparison.verdict.agreement is Agreement.NONFINITE:
            return UNKNOWN
        is_drawn = [result.verdict.suspect is Suspect.RANDOMNESS for result in self._wrong]
        clause = "the ranks drew different random numbers for a replicated tensor"
        draw = Explanation(Suspect.RANDOMNESS, clause)
        if all(is_drawn):  # random values may resemble any cause
            return draw
        is_forward = origin.phase is Phase.FORWARD and origin.module is not None
        weights = self._explain_weights(origin.module or "") if is_forward else UNKNOWN
        if weights.describe():
            return weights
        causes = (
            self._explain_own_shard(origin),
            self._explain(origin.comparison, origin.module, origin.inputs, is_forward=is_forward),
            UNKNOWN if op is None else self._explain_op(op, origin),
            self._explain_loss() if origin.kind is Kind.LOSS else UNKNOWN,
        )
        known = next((cause for cause in causes if cause.suspect is not Suspect.UNKNOWN), None)
        known = known or next((cause for cause in causes if cause.remedy), None)
        if known is None and any(is_drawn):
            return draw
        return known or next((cause for cause in causes if cause.describe()), UNKNOWN)

    def _explain_own_shard(self, origin: Origin) -> Explanation:
        """The cause of a gradient that comes only from each rank's own shard of the output."""
        if origin.own_shard is None:
            return UNKNOWN
        axes = sharding_axes(origin.own_shard, self._axes)
        where, over = origin.own_shard.describe(list(self._axes)), " and ".join(axes)
        return Explanation(
            Suspect.MISSING_REDUCTION,
            f"each rank has only the part of it that comes from its own shard of the output of "
            f"`{origin.module}` ({where}); the parts from the other ranks are missing",
            axes,
            "sum",
            remedy=f"Sum it over {over} in backward: the backward of an all-gather is a "
            "reduce-scatter, and a ring has to pass gradients on as it passes values.",
        )

    def _explain_weights(self, module: str) -> Explanation:
        """The cause of weights that were wrong before the step."""
        for name, region in self._parity_result.missing_elements.items():
            if name.rpartition(".")[0] == module:
                return Explanation(Suspect.WRONG_SLICE, f"no rank holds {name}{region}")
        for result in self._parity_result.comparisons:
            is_own = result.case.name.rpartition(".")[0] == module
            if result.case.kind is TensorKind.PARAMETER and is_own:
                cause = self._explain(result)
                clause = f"its parameter {result.case.name} differs already before the step"
                if cause.suspect in _OF_WEIGHTS:
                    clause = f"{clause}: {cause.describe()}"
                    return dataclasses.replace(cause, clause=clause, predicate="")
                scale = "" if cause.ratio is None else f" by a factor of {cause.ratio:.4g}"
                return Explanation(
                    Suspect.UNKNOWN if cause.ratio is None else Suspect.SCALED,
                    f"{clause}{scale}",
                    ratio=cause.ratio,
                    remedy="Load or initialize it on the ranks as on the single device.",
                )
        return UNKNOWN

    def _explain_op(self, op: WrongOp, origin: Origin) -> Explanation:
        """The cause from an op's inputs: they differ, or are only shards of what it needs."""
        module = origin.module
        wrong = [result for result in op.inputs if result.full]
        for result in wrong:
            cause = self._explain(result, is_forward=True)
            if cause.suspect is not Suspect.UNKNOWN:
                clause = f"its input differs already: {cause.describe()}"
                return dataclasses.replace(cause, clause=clause, predicate="")
        fused = explain_fused(op.inputs, self._axes)
        if fused is not None:
            return fused
        if op.outputs and op.outputs[0].full:
            cause = self._explain(op.outputs[0], module, is_forward=True)
            if cause.suspect is not Suspect.UNKNOWN:
                return self._explain_result(op, cause, origin)
        if op.changed and not wrong:
            name, single_value, rank_value = op.changed[0]
            return Explanation(
                Suspect.SCALED if "scale" in name else Suspect.UNKNOWN,
                f"its argument {name} is {rank_value:.6g} on the ranks and {single_value:.6g} on "
                "the single device",
                remedy="Use the same value on the ranks; if it follows from a size, take that of "
                "the full model, not that of a shard.",
            )
        layouts = [result.layout for result in op.inputs if result.layout is not None]
        # An input that cannot be compared, such as tokens that were sent to experts, may be wrong.
        are_right = all(result.verdict.agreement in TOLERABLE for result in op.inputs)
        if not are_right or not layouts:
            return UNKNOWN
        if len({layout.orders for layout in layouts}) > 1:
            orders = " and ".join(
                dict.fromkeys(layout.describe(list(self._axes)) for layout in layouts)
            )
            axes = sharding_axes(layouts[0], self._axes)
            clause = f"its inputs are sharded in different orders: {orders}"
            return Explanation(Suspect.PERMUTED, clause, axes)
        where = layouts[0].describe(list(self._axes))
        return Explanation(
            Suspect.MISSING_REDUCTION,
            f"each rank runs it on its own shard of the input only ({where})",
            sharding_axes(layouts[0], self._axes),
        )

    def _explain_result(self, op: WrongOp, cause: Explanation, origin: Origin) -> Explanation:
        """The cause of an op's result: whether its partial sums are reduced over wrong axes."""
        if cause.suspect is not Suspect.MISSING_REDUCTION or not cause.reduction:
            return cause
        if cause.reduction == "sum" and origin.kind is Kind.OUTPUT:
            reduced = explain_wrong_group(op.outputs[0], origin.comparison, cause, self._axes)
            if reduced is not None:
                return reduced
        verb = "Sum" if cause.reduction == "sum" else "Average"
        over = " and ".join(cause.axes)
        remedy = f"{verb} the result of {op.name} over {over} with an all-reduce before it is used."
        return dataclasses.replace(cause, remedy=remedy)

    def _explain_loss(self) -> Explanation:
        """The cause from the layout of the outputs that the loss is computed from."""
        outputs = [
            result
            for result in self._parity_result.comparisons
            if result.case.kind is TensorKind.OUTPUT
        ]
        layout = next((result.layout for result in outputs if result.layout is not None), None)
        if layout is None:
            return UNKNOWN
        where, axes = layout.describe(list(self._axes)), sharding_axes(layout, self._axes)
        if not layout.is_contiguous:
            clause = f"the output is sharded along {where}; labels and masks must be in that order"
            return Explanation(Suspect.PERMUTED, clause, axes)
        clause = f"the loss is computed from each rank's own shard of the output only ({where})"
        return Explanation(Suspect.MISSING_REDUCTION, clause, axes)

    def _describe_buffers(self) -> Iterator[Problem]:
        """Buffers that differ although all other tensors agree; one problem per module."""
        groups: dict[str, list[TensorComparison]] = {}
        for result in self._wrong:
            groups.setdefault(result.case.name.rpartition(".")[0], []).append(result)
        for module, group in groups.items():
            causes = [self._explain(result) for result in group]
            known = (cause for cause in causes if cause.suspect is not Suspect.UNKNOWN)
            cause = next(known, UNKNOWN)
            names = _list_names([result.case.name for result in group])
            differ = "differs" if len(group) == 1 else "differ"
            yield Problem(
                cause,
                module or "the model itself",
                f"Outputs and gradients agree; after the step {names} {differ}. {cause.state()}",
                suggest(cause, Kind.BUFFER),
                module=module,
                names=tuple(result.case.name for result in group),
            )

    def describe_tensors(self) -> Iterator[Problem]:
        """Problems without a module: tensors that differ in the same way, together."""
        groups: dict[object, list[TensorComparison]] = {}
        for result in self._wrong:
            cause = self._explain(result)
            groups.setdefault((result.case.kind, result.verdict.agreement, cause.kind), []).append(
                result
            )
        for group in groups.values():
            first = group[0]
            cause, verdict = self._explain(first), first.verdict
            names = [result.case.name or "the output" for result in group]
            what = "" if verdict.kind is TensorKind.OUTPUT else f"{verdict.kind} of "
            is_plain = cause.suspect is Suspect.UNKNOWN
            detail = make_sentence(verdict.detail) if is_plain else cause.state()
            agreement = verdict.agreement.replace("_", " ")
            yield Problem(
                cause,
                names[0],
                f"{what}{_list_names(names)}: {agreement}. {detail}".strip(),
                suggest(cause, Kind.LOSS),
                names=tuple(result.case.name for result in group),
                rule=f"parity-{verdict.agreement.replace('_', '-')}" if is_plain else "",
            )

    def _after_outputs(self, fact: str) -> str:
        return f"Outputs agree. {fact}".strip() if self._outputs_agree else fact.strip()


def _describe_location(origin: Origin) -> str:
    """A sentence about where the versions diverge; it states only what was compared."""
    named_module = f"`{origin.named_module}`" if origin.named_module else "the model"
    code_module = f"`{origin.module}`" if origin.module else "the model"
    which = f" ({origin.path})" if origin.path not in ("", "[0]") else ""
    match origin.kind:
        case Kind.OUTPUT if origin.named_module:
            agree = "; its inputs agree" if origin.is_first else ""
            return f"{named_module} is the first module whose output{which} differs{agree}."
        case Kind.OUTPUT:
            agree = "; what its modules return agrees" if origin.is_first else ""
            return f"The output of the model{which} is the first tensor that differs{agree}."
        case Kind.INPUT if origin.module is None:
            return f"The input of the model{which} differs already."
        case Kind.INPUT:
            agree = ", while what it is computed from agrees" if origin.is_first else ""
            return (
                f"The first tensor that differs is the input{which} of {named_module}{agree}: the "
                f"two versions diverge in the code of {code_module} itself."
            )
        case Kind.GRADIENT_OF_INPUT:
            fact = f"The first gradient that differs is that of the input{which} of {named_module}"
            return f"{fact}, which its backward returns."
        case Kind.LOSS:
            return (
                "The gradient of the model's output differs already, so the two versions diverge "
                "in the loss."
            )
        case _:
            return (
                f"The first gradient that differs is that of the output{which} of {named_module}: "
                f"the two versions diverge in the code of {code_module} itself."
            )


def _name_location(origin: Origin) -> str:
    if origin.module is None:
        return "the loss" if origin.kind is Kind.LOSS else "the inputs of the model"
    return origin.module or "the model itself"


def _is_gradient_of(result: TensorComparison, names: Sequence[str]) -> bool:
    return result.case.kind is TensorKind.GRADIENT and result.case.name in names


def _find_common_module(modules: Sequence[str]) -> str | None:
    """The innermost module that contains all of these; None if that is the model itself."""
    common = modules[0].split(".")
    for module in modules[1:]:
        parts = module.split(".")
        while parts[: len(common)] != common:
            common.pop()
    return ".".join(common) or (modules[0] if len(modules) == 1 else None)


def _is_noise(verdict: TensorVerdict) -> bool:
    """Whether a gradient is zero up to noise, so that any factor would fit."""
    return verdict.noise is None or verdict.noise > _NOISY


def list_findings(
    parity_result: ParityResult, parity: Parity, problems: Sequence[Problem]
) -> Iterator[Finding]:
    """Findings for the problems, and for harmless differences worth knowing."""
    for problem in problems:
        yield Finding(
            rule=problem.rule or f"parity-{problem.cause.suspect.replace('_', '-')}",
            severity=Severity.ERROR,
            subject=problem.subject,
            fact=problem.fact,
            remedy=problem.remedy,
            source=problem.source,
        )
    yield from _find_dtypes(parity_result)
    if not problems:
        yield from _find_harmless(parity)
        yield from _find_noisy(parity)
    if not parity.tensors:
        yield Finding(
            rule="parity-nothing",
            severity=Severity.WARNING,
            subject="the step",
            fact="The step produced no outputs, gradients or changed buffers, so nothing was "
            "compared.",
            remedy="Return tensors from the model, or call the model in the step.",
        )


def _find_dtypes(parity_result: ParityResult) -> Iterator[Finding]:
    """Tensors that have another dtype on the ranks; one finding per kind."""
    groups: dict[tuple[TensorKind, torch.dtype, str], list[str]] = {}
    for result in parity_result.comparisons:
        if result.dtype is not None and result.case.kind is not TensorKind.PARAMETER:
            key = (result.case.kind, result.dtype, result.verdict.dtype)
            groups.setdefault(key, []).append(result.case.name or "the output")
    for (kind, dtype, wanted), names in groups.items():
        policy = f"set output_dtype=torch.{wanted} in FSDP's MixedPrecisionPolicy, or "
        what = "the gradient of " if kind is TensorKind.GRADIENT else ""
        remedy = {
            TensorKind.OUTPUT: f"{policy if dtype.is_floating_point else ''}convert the output to "
            f"{wanted}.",
            TensorKind.GRADIENT: f"keep the tensor that it is the gradient of in {wanted} on the "
            "ranks.",
        }.get(kind, f"keep the buffer in {wanted} on the ranks.")
        yield Finding(
            rule="parity-dtype",
            severity=Severity.INFO,
            subject=names[0],
            fact=f"The dtype of {what}{_list_names(names)} is {name_dtype(dtype)} "
            f"instead of {wanted}.",
            remedy=f"If {wanted} is needed, {remedy}",
        )


def _find_harmless(parity: Parity) -> Iterator[Finding]:
    rounded = [result for result in parity.tensors if result.agreement is Agreement.ROUNDED]
    has_agreed = all(result.detail.endswith(AGREES_IN_FP64) for result in rounded)
    confirmed = ": in double precision they agree" if has_agreed else ""
    for agreement, fact, remedy in (
        (
            Agreement.RANDOM,
            "differ only in the random numbers that were drawn: without dropout and the like they "
            "agree",
            "Nothing is wrong. Set dropout to 0 to compare without a second run.",
        ),
        (
            Agreement.ROUNDED,
            f"are less accurate than on the single device, by rounding only{confirmed}",
            "Nothing is wrong. If the accuracy matters, raise the precision where the ranks "
            "compute or reduce in less than float32 (in FSDP: param_dtype, reduce_dtype).",
        ),
    ):
        names = [
            result.name or "the output"
            for result in parity.tensors
            if result.agreement is agreement
        ]
        if names:
            yield Finding(
                rule=f"parity-{agreement}",
                severity=Severity.INFO,
                subject=names[0],
                fact=f"{_list_names(names)} {fact}.",
                remedy=remedy,
            )


def _find_noisy(parity: Parity) -> Iterator[Finding]:
    """Outputs so noisy that nearly any value would count as close."""
    for result in parity.tensors:
        is_output = result.kind is TensorKind.OUTPUT and result.agreement is Agreement.CLOSE
        if is_output and result.detail != CONFIRMED and (result.noise or 0.0) > _NOISY:
            yield Finding(
                rule="parity-noisy",
                severity=Severity.WARNING,
                subject=result.name or "the output",
                fact=f"It is close, but it changes by {result.noise:.0%} when weights change by "
                "one unit in the last place, and the ranks do not run in double precision: almost "
                "any result would count as close.",
                remedy="Compare fewer layers, or run both versions in float64.",
            )


def _list_names(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - _NAMED} more" if len(unique) > _NAMED else ""
    return ", ".join(unique[:_NAMED]) + more
