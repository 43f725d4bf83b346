"""What differs, where and why: the record of what was examined, and its findings."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from msgspec.structs import replace

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
from shardscope.parallel.parity.examine import Examined
from shardscope.parallel.parity.judge import Judged, name_dtype
from shardscope.parallel.parity.locate import Kind, Origin, is_within
from shardscope.parallel.parity.opinions import AGREES_EXACTLY, CONFIRMED
from shardscope.parallel.parity.ops import WrongOp
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
from shardscope.record.patterns import matches_parts

__all__ = ["Problem", "find_problems", "list_findings", "make_parity"]

# Verdicts that say all there is to say where no cause is known.
_PLAIN = (Agreement.MISSING, Agreement.EXTRA, Agreement.RESHAPED, Agreement.NONFINITE)
# Causes that a weight can have, which is not computed.
_OF_WEIGHTS = (Suspect.STALE, Suspect.WRONG_SLICE, Suspect.WRONG_GROUP, Suspect.PERMUTED)
# Causes that a sum of partial sums can have, and partial sums themselves cannot.
_REDUCED = (Suspect.WRONG_GROUP, Suspect.DOUBLE_REDUCTION, Suspect.SCALED)
_NOISY = 0.1  # relative, of an output
_DIVIDE_LOSS = "divide the loss of each micro-batch by their number, once"
_NAMED = 3  # tensors that a finding names
_MAX_ELEMENTS = 2**14  # of a tensor that follows from another and is explained all the same


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """One cause and where it is; `module` is None where it is in no module's code."""

    cause: Explanation
    subject: str
    fact: str
    remedy: str
    module: str | None = None
    phase: Phase = Phase.FORWARD
    names: tuple[str, ...] = ()  # of the tensors that show it, where it is not in a module
    rule: str = ""  # if not the cause's
    op: str = ""
    source: Source | None = None


def make_parity(
    examined: Examined,
    axes: Mapping[str, int],
    problems: Sequence[Problem],
    *,
    is_in_processes: bool,
) -> Parity:
    """The record; every tensor that differs has the cause of a problem."""
    return Parity(
        axes=tuple(Axis(name=name, size=size) for name, size in axes.items()),
        tensors=tuple(_explain_verdict(result, axes, problems) for result in examined.judged),
        divergences=tuple(
            Divergence(
                module=problem.module,
                phase=problem.phase,
                suspect=problem.cause.suspect,
                detail=problem.fact,
                type=examined.types.get(problem.module, ""),
                op=problem.op,
                source=problem.source,
                remedy=problem.remedy,
            )
            for problem in problems
            if problem.module is not None
        ),
        num_compared_modules=len(examined.types),
        is_in_processes=is_in_processes,
        has_exact=examined.has_exact,
        has_backward=bool(examined.reference.gradients),
    )


def _explain_verdict(
    result: Judged, axes: Mapping[str, int], problems: Sequence[Problem]
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
    own = explain(result, axes, batch_axes=result.case.batch_axes)
    if own.suspect is not suspect and verdict.name not in problem.names:
        return replace(verdict, suspect=suspect)
    own = own if own.suspect is suspect else problem.cause
    clause = "" if verdict.agreement in _PLAIN else own.describe()
    detail = "; ".join(filter(None, (verdict.detail, clause)))
    return replace(verdict, suspect=suspect, ratio=own.ratio, detail=detail)


def find_problems(examined: Examined, axes: Mapping[str, int]) -> list[Problem]:
    """Why tensors differ, each cause once; none where all agree."""
    wrong = [
        result
        for result in examined.judged
        if result.case.kind is not TensorKind.PARAMETER
        and result.verdict.agreement not in TOLERABLE
    ]
    if not wrong:
        return []
    problems = _Problems(examined, axes, wrong)
    # Where no module is to blame, the tensors themselves are named: what differs has a finding.
    return list(problems.find()) or list(problems.describe_tensors())


@final
class _Problems:
    def __init__(
        self, examined: Examined, axes: Mapping[str, int], wrong: Sequence[Judged]
    ) -> None:
        self._examined = examined
        self._axes = axes
        self._wrong = wrong
        self._outputs_agree = all(result.case.kind is TensorKind.GRADIENT for result in wrong)
        self._batch_axes = next((r.case.batch_axes for r in wrong if r.case.batch_axes), ())
        self._causes: dict[int, Explanation] = {}

    def find(self) -> Iterator[Problem]:
        """The problems, those of backward in its order."""
        explained: set[str] = set()  # modules whose copy of a tied parameter has other values
        is_called_again = self._examined.reference.num_calls > 1  # perhaps after an update
        for tie in self._examined.broken_ties:
            problem = self._describe_tie(tie)
            if problem is not None:
                yield problem
                self._wrong = [r for r in self._wrong if not _is_gradient_of(r, tie.names)]
                names = tie.names if is_called_again else self._find_changed(tie.copies)
                explained |= {name.rpartition(".")[0] for name in names}
        origins = self._examined.origins
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
        own = [origin for origin in origins if origin.kind is Kind.GRADIENT_OF_PARAMETER]
        yield from self._group_parameters(
            [origin for origin in own if origin.judged in self._wrong]
        )
        for origin in origins:
            if origin.kind is not Kind.GRADIENT_OF_PARAMETER:
                yield self._describe(origin)

    def _find_mixed_gradients(self) -> None:
        """Explain gradients that no cause of their own explains by those of other parameters."""
        own = {origin.judged for origin in self._examined.origins}
        unknown = [
            result
            for result in self._wrong
            if result in own and self._explain(result).suspect is Suspect.UNKNOWN
        ]
        for result, cause in explain_mixed(unknown, self._axes):
            self._causes[id(result)] = cause

    def _describe_tie(self, tie: BrokenTie) -> Problem | None:
        """A tie that sharding broke, unless the parallel model gives all copies one gradient."""
        compared = [r for r in self._examined.judged if _is_gradient_of(r, tie.names)]
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
        """Those parameters whose values differ before the step."""
        judged = (r for r in self._examined.judged if r.case.kind is TensorKind.PARAMETER)
        return [result.case.name for result in judged if result.case.name in names]

    def _explain(
        self,
        judged: Judged,
        module: str | None = None,
        inputs: Sequence[torch.Tensor] = (),
        *,
        is_forward: bool = False,
    ) -> Explanation:
        if id(judged) not in self._causes:
            biases = [
                parameter
                for name, parameter in self._examined.reference.parameters.items()
                if parameter.ndim == 1 and name.rpartition(".")[0] == module
            ]
            self._causes[id(judged)] = explain(
                judged,
                self._axes,
                biases,
                inputs,
                is_forward=is_forward,
                batch_axes=self._batch_axes,
            )
        return self._causes[id(judged)]

    def _find_common_cause(self) -> Problem | None:
        """One factor on all gradients, or an axis over which none is reduced: no module's fault."""
        gradients = [
            result
            for result in self._examined.judged
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
        if self._examined.num_cleared > self._examined.reference.num_cleared:
            return self._describe_cleared()
        if right or len(modules) < 2:
            return None
        causes = [self._explain(result) for result in wrong]
        known = [cause for cause in causes if cause.suspect is not Suspect.UNKNOWN]
        if 2 * len(known) < len(causes) or len({cause.kind for cause in known}) != 1:
            return self._find_late_cause(wrong)
        return self._describe_common(known[0], len(known), len(causes))

    def _describe_common(self, cause: Explanation, num_known: int, num_wrong: int) -> Problem:
        """The cause that `num_known` of the gradients have; of the others none is known."""
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
        """Gradients that the ranks clear between micro-batches."""
        times = {0: "never", 1: "once"}
        own, single = self._examined.num_cleared, self._examined.reference.num_cleared
        cause = Explanation(
            Suspect.STALE,
            "gradients are cleared between two backward passes of the step "
            f"{times.get(own, f'{own} times')} on the ranks and "
            f"{times.get(single, f'{single} times')} on the single device, so gradients of earlier "
            "micro-batches are lost",
            remedy="Call zero_grad() once before the first micro-batch, not before each of them.",
        )
        fact = f"Outputs agree. {cause.state()}"
        return Problem(cause, "all gradients", fact, cause.remedy, phase=Phase.BACKWARD)

    def _find_num_calls(self, cause: Explanation) -> int | None:
        """The number of calls of the model in a step, if it is the factor between gradients."""
        ratio = cause.ratio or 1.0
        counts = {self._examined.num_calls, self._examined.reference.num_calls} - {1}
        factor = max(ratio, 1 / ratio)
        return next((n for n in counts if math.isclose(factor, n, rel_tol=1e-2)), None)

    def _find_late_cause(self, wrong: Sequence[Judged]) -> Problem | None:
        """All gradients of parameters, though none that backward passes on: no module's fault."""
        own = {
            origin.judged.case.name
            for origin in self._examined.origins
            if origin.kind is Kind.GRADIENT_OF_PARAMETER and origin.is_first
        }
        if len(own) < len(self._examined.origins) or any(r.case.name not in own for r in wrong):
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
        """Parameters whose gradient differs for the same reason, together."""
        groups: dict[object, list[Origin]] = {}
        # Noise sums up to zero and averages to zero: it follows what is known of the others.
        for origin in sorted(origins, key=lambda origin: _is_noise(origin.judged.verdict)):
            cause, agreement = self._explain(origin.judged), origin.judged.verdict.agreement
            same = (
                key
                for key, group in groups.items()
                if _is_noise(origin.judged.verdict)
                and self._explain(group[0].judged).suspect is cause.suspect
                and self._explain(group[0].judged).axes == cause.axes
            )
            own = (cause.kind, agreement if agreement in _PLAIN else None)
            groups.setdefault(next(same, own), []).append(origin)
        for group in groups.values():
            yield self._describe_parameters(group)

    def _describe_parameters(self, origins: Sequence[Origin]) -> Problem:
        first = origins[0]
        cause, verdict = self._explain(first.judged), first.judged.verdict
        names = [origin.judged.case.name for origin in origins]
        modules = list(dict.fromkeys(origin.module or "" for origin in origins))
        module = _find_common_module(modules)
        if module is None or self._is_partly_wrong(module, names):
            place = self._list_modules(modules)
        else:
            place = module
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
            place or "the model itself",
            self._after_outputs(f"{make_sentence(clause)} {why}"),
            suggest(cause, first.kind),
            module=module,
            phase=Phase.BACKWARD,
            names=tuple(names),
            rule=f"parity-{verdict.agreement}" if is_plain else "",
        )

    def _is_partly_wrong(self, module: str, names: Sequence[str]) -> bool:
        """Whether it is a container, without code of its own, of other parameters too."""
        if self._examined.types.get(module) not in ("ModuleDict", "ModuleList"):
            return False
        inner = {n for n in self._examined.reference.gradients if is_within(n, module)}
        return not inner <= set(names)

    def _list_modules(self, modules: Sequence[str]) -> str:
        """The names, those of the same module in all layers as one pattern."""
        owners = {name.rpartition(".")[0] for name in self._examined.reference.parameters}
        places: dict[str, None] = {}
        for module in modules:
            pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", module)
            alike = {owner for owner in owners if matches_parts(pattern, owner)}
            is_folded = len(modules) > _NAMED and alike <= set(modules)
            places.setdefault(pattern if is_folded else module)
        return ", ".join(places)

    def _describe(self, origin: Origin) -> Problem:
        is_first = bool(self._examined.origins) and origin is self._examined.origins[0]
        op = self._examined.op if is_first else None
        cause = self._explain_origin(origin, op)
        # Partial sums may be a caller's to reduce, and if what that returns is explained by
        # something else, then it does.
        outer = origin.outer if cause.suspect is Suspect.MISSING_REDUCTION else None
        while outer is not None:
            reduced = self._explain(outer.judged, outer.module, outer.inputs, is_forward=True)
            if reduced.suspect in _REDUCED:
                clause = reduced.describe(f"the output of `{outer.module}`")
                cause = dataclasses.replace(reduced, clause=clause, predicate="")
                origin = dataclasses.replace(origin, module=outer.module)
                break
            outer = outer.outer
        agreement = origin.judged.verdict.agreement
        is_plain = cause.suspect is Suspect.UNKNOWN and agreement in _PLAIN
        if is_plain:
            cause = Explanation(Suspect.UNKNOWN, origin.judged.verdict.detail)
        named = "" if op is None else f" The first op to differ is {op.name}."
        fact = f"{_say_place(origin)}{named} {cause.state()}".strip()
        return Problem(
            cause,
            _name_place(origin),
            fact if origin.phase is Phase.FORWARD else self._after_outputs(fact),
            suggest(cause, origin.kind),
            module=origin.module,
            phase=origin.phase,
            rule=f"parity-{agreement}" if is_plain else "",
            op="" if op is None else op.name,
            source=None if op is None else op.source,
        )

    def _explain_origin(self, origin: Origin, op: WrongOp | None) -> Explanation:
        """The cause: the weights', or from the values, the op, the layout, in this order."""
        if origin.judged.verdict.agreement is Agreement.NONFINITE:
            return UNKNOWN
        is_drawn = [result.verdict.suspect is Suspect.RANDOMNESS for result in self._wrong]
        clause = "the ranks drew different random numbers for a replicated tensor"
        draw = Explanation(Suspect.RANDOMNESS, clause)
        if all(is_drawn):  # values that were drawn may look like anything
            return draw
        is_forward = origin.phase is Phase.FORWARD and origin.module is not None
        weights = self._explain_weights(origin.module or "") if is_forward else UNKNOWN
        if weights.describe():
            return weights
        found = (
            self._explain_own_shard(origin),
            self._explain(origin.judged, origin.module, origin.inputs, is_forward=is_forward),
            UNKNOWN if op is None else self._explain_op(op, origin),
            self._explain_loss() if origin.kind is Kind.LOSS else UNKNOWN,
        )
        known = next((cause for cause in found if cause.suspect is not Suspect.UNKNOWN), None)
        known = known or next((cause for cause in found if cause.remedy), None)
        if known is None and any(is_drawn):
            return draw
        return known or next((cause for cause in found if cause.describe()), UNKNOWN)

    def _explain_own_shard(self, origin: Origin) -> Explanation:
        """A gradient that comes from each rank's own shard of the module's output only."""
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
        """Weights that were wrong before the step."""
        for name, places in self._examined.unheld.items():
            if name.rpartition(".")[0] == module:
                return Explanation(Suspect.WRONG_SLICE, f"no rank holds {name}{places}")
        for result in self._examined.judged:
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
        """From what the op takes, which differs already, or is only a shard of what it needs."""
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
            name, ours, theirs = op.changed[0]
            return Explanation(
                Suspect.SCALED if "scale" in name else Suspect.UNKNOWN,
                f"its argument {name} is {theirs:.6g} on the ranks and {ours:.6g} on the single "
                "device",
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
        """The cause of an op's result: whether its partial sums are reduced, if wrongly."""
        if cause.suspect is not Suspect.MISSING_REDUCTION or not cause.reduction:
            return cause
        if cause.reduction == "sum" and origin.kind is Kind.OUTPUT:
            reduced = explain_wrong_group(op.outputs[0], origin.judged, cause, self._axes)
            if reduced is not None:
                return reduced
        verb = "Sum" if cause.reduction == "sum" else "Average"
        over = " and ".join(cause.axes)
        remedy = f"{verb} the result of {op.name} over {over} with an all-reduce before it is used."
        return dataclasses.replace(cause, remedy=remedy)

    def _explain_loss(self) -> Explanation:
        """From the layout of the outputs that the loss is computed from."""
        outputs = [
            result for result in self._examined.judged if result.case.kind is TensorKind.OUTPUT
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
        """Buffers that differ although all else agrees, those of a module together."""
        groups: dict[str, list[Judged]] = {}
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
        """Without a place: tensors that differ in the same way, together."""
        groups: dict[object, list[Judged]] = {}
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


def _say_place(origin: Origin) -> str:
    """A sentence about where the versions diverge, which claims only what was compared."""
    at = f"`{origin.at}`" if origin.at else "the model"
    own = f"`{origin.module}`" if origin.module else "the model"
    which = f" ({origin.path})" if origin.path not in ("", "[0]") else ""
    match origin.kind:
        case Kind.OUTPUT if origin.at:
            agree = "; its inputs agree" if origin.is_first else ""
            return f"{at} is the first module whose output{which} differs{agree}."
        case Kind.OUTPUT:
            agree = "; what its modules return agrees" if origin.is_first else ""
            return f"The output of the model{which} is the first tensor that differs{agree}."
        case Kind.INPUT if origin.module is None:
            return f"The input of the model{which} differs already."
        case Kind.INPUT:
            agree = ", while what it is computed from agrees" if origin.is_first else ""
            return (
                f"The first tensor that differs is the input{which} of {at}{agree}: the two "
                f"versions diverge in the code of {own} itself."
            )
        case Kind.GRADIENT_OF_INPUT:
            fact = f"The first gradient that differs is that of the input{which} of {at}"
            return f"{fact}, which its backward returns."
        case Kind.LOSS:
            return (
                "The gradient of the model's output differs already, so the two versions diverge "
                "in the loss."
            )
        case _:
            return (
                f"The first gradient that differs is that of the output{which} of {at}: the two "
                f"versions diverge in the code of {own} itself."
            )


def _name_place(origin: Origin) -> str:
    if origin.module is None:
        return "the loss" if origin.kind is Kind.LOSS else "the inputs of the model"
    return origin.module or "the model itself"


def _is_gradient_of(result: Judged, names: Sequence[str]) -> bool:
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
    """Whether a gradient is zero but for noise, so that any factor of it would be right."""
    return verdict.noise is None or verdict.noise > _NOISY


def list_findings(
    examined: Examined, parity: Parity, problems: Sequence[Problem]
) -> Iterator[Finding]:
    """What a user should act on, and what is worth knowing though nothing is wrong."""
    for problem in problems:
        yield Finding(
            rule=problem.rule or f"parity-{problem.cause.suspect.replace('_', '-')}",
            severity=Severity.ERROR,
            subject=problem.subject,
            fact=problem.fact,
            remedy=problem.remedy,
            source=problem.source,
        )
    yield from _find_dtypes(examined)
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


def _find_dtypes(examined: Examined) -> Iterator[Finding]:
    """Tensors that the ranks have in another dtype, those of one kind together."""
    groups: dict[tuple[TensorKind, torch.dtype, str], list[str]] = {}
    for result in examined.judged:
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
    has_agreed = all(result.detail.endswith(AGREES_EXACTLY) for result in rounded)
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
    """Outputs that are so noisy that nearly anything would be called close."""
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
