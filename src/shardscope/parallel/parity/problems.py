"""Turns the result of a comparison into problems: a cause, where it is, and how to fix it.

Differences with one cause are one problem, such as gradients that all have the same factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import final

from shardscope.parallel.equivalence import EVALUATION, TensorComparison
from shardscope.parallel.parity.call_problems import find_call_problem
from shardscope.parallel.parity.evidence import is_noise
from shardscope.parallel.parity.explanation import (
    OWN_VALUES,
    UNKNOWN,
    Explanation,
    describe_location,
    list_names,
    make_sentence,
    name_location,
    suggest_remedy,
)
from shardscope.parallel.parity.first_op import WrongOp
from shardscope.parallel.parity.input_causes import is_passed
from shardscope.parallel.parity.origin_causes import OriginExplainer
from shardscope.parallel.parity.problem import Problem
from shardscope.parallel.parity.result import (
    OF_MODEL,
    BrokenTie,
    Origin,
    OriginKind,
    ParityResult,
    is_within,
)
from shardscope.parallel.parity.scale_causes import (
    explain_clipping_by_hand,
    explain_contributions,
    explain_leftovers,
)
from shardscope.parallel.parity.ties import explain_tie
from shardscope.parallel.parity.training_problems import TrainingProblems
from shardscope.record import (
    TOLERABLE,
    Agreement,
    Phase,
    Source,
    Suspect,
    TensorKind,
)
from shardscope.record.layer_names import fold_layers
from shardscope.record.patterns import matches_name

SELF_EXPLANATORY = (Agreement.MISSING, Agreement.EXTRA, Agreement.RESHAPED, Agreement.NONFINITE)
"""Verdicts whose detail is enough where no cause is known."""
# Causes that apply to reduced partial sums, but not to the partial sums themselves.
_REDUCED = (Suspect.WRONG_GROUP, Suspect.DOUBLE_REDUCTION, Suspect.SCALED)
_DIVIDE_LOSS = "divide the loss of each micro-batch by their number, once"
MAX_TRIED = 3
"""Gradients of one problem for which the collective that computed them is looked for."""
_MAX_NAMED = 3  # modules that are listed without folding layers into a pattern


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
    of_calls = find_call_problem(wrong)
    if of_calls is not None:
        return [of_calls]
    # An evaluation after the optimizer's step follows from what is wrong before it.
    before = [result for result in wrong if not _is_evaluation(result)]
    wrong = before or wrong
    of_model = [result for result in wrong if result.case.kind in OF_MODEL]
    buffers = [result for result in wrong if result.case.kind is TensorKind.BUFFER]
    found: list[Problem] = []
    if not of_model:
        found += TrainingProblems(parity_result, axes, wrong).find()
    if of_model or buffers:
        problems = _Problems(parity_result, axes, [*of_model, *buffers])
        found += list(problems.find())
    # Where no module is the cause, report the tensors, so that every difference has a finding.
    return found or list(_Problems(parity_result, axes, of_model or wrong).describe_tensors())


@final
class _Problems:
    """The tensors that differ, and the problems behind them."""

    def __init__(
        self,
        parity_result: ParityResult,
        axes: Mapping[str, int],
        wrong: Sequence[TensorComparison],
    ) -> None:
        self._result = parity_result
        self._wrong = wrong
        self._outputs_agree = all(result.case.kind is TensorKind.GRADIENT for result in wrong)
        batch_axes = next((r.case.batch_axes for r in wrong if r.case.batch_axes), ())
        self._causes = OriginExplainer(parity_result, axes, batch_axes)

    def find(self) -> Iterator[Problem]:
        """The problems in forward, or those in backward, in the order of backward."""
        explained: set[str] = set()  # modules whose copy of a tied parameter has different values
        is_called_again = self._result.reference.num_calls > 1  # perhaps after an update
        for tie in self._result.broken_ties:
            problem = self._describe_tie(tie)
            if problem is not None:
                yield problem
                self._wrong = [r for r in self._wrong if not _is_gradient_of(r, tie.names)]
                names = tie.names if is_called_again else self._find_changed(tie.copies)
                explained |= {name.rpartition(".")[0] for name in names}
        origins = self._result.origins
        is_forward = bool(origins) and origins[0].phase is Phase.FORWARD
        if not self._wrong or (is_forward and origins[0].module in explained):
            return
        if self._outputs_agree:
            self._causes.find_mixed_gradients(self._wrong)
        common = self._find_common_cause()
        if common is not None:
            yield common
            return
        if all(result.case.kind is TensorKind.BUFFER for result in self._wrong):
            yield from self._describe_buffers()
            return
        parameter_origins = [
            origin for origin in origins if origin.kind is OriginKind.GRADIENT_OF_PARAMETER
        ]
        yield from self._group_parameters(
            [origin for origin in parameter_origins if origin.comparison in self._wrong]
        )
        for origin in origins:
            if origin.kind is not OriginKind.GRADIENT_OF_PARAMETER:
                yield self._describe(origin)

    def _describe_tie(self, tie: BrokenTie) -> Problem | None:
        """The problem of a broken tie; None if the parallel model gives all copies one gradient."""
        compared = [r for r in self._result.comparisons if _is_gradient_of(r, tie.names)]
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
            self._after_outputs(cause.to_sentence()),
            cause.remedy,
            module=module,
            phase=Phase.BACKWARD,
            names=tie.names,
        )

    def _find_changed(self, names: Sequence[str]) -> list[str]:
        """The parameters of these names whose values differ before the step."""
        comparisons = (r for r in self._result.comparisons if r.case.kind is TensorKind.PARAMETER)
        return [result.case.name for result in comparisons if result.case.name in names]

    def _find_common_cause(self) -> Problem | None:
        """A cause of all gradients outside the modules: one factor, or an axis not reduced over."""
        gradients = [
            result
            for result in self._result.comparisons
            if result.case.kind is TensorKind.GRADIENT and not result.case.name.startswith("inputs")
        ]
        wrong = [result for result in gradients if result in self._wrong]
        right = [
            result
            for result in gradients
            if result.verdict.agreement in TOLERABLE and not is_noise(result.verdict)
        ]
        modules = {result.case.name.rpartition(".")[0] for result in wrong}
        if not self._outputs_agree or not wrong:
            return None
        if self._result.num_cleared > self._result.reference.num_cleared:
            return self._describe_cleared()
        if right or len(modules) < 2:
            return None
        clipping = explain_clipping_by_hand(
            self._result, [result for result in gradients if not is_noise(result.verdict)]
        )
        if clipping is not None:
            return self._describe_common(clipping, len(wrong), wrong, "gradient clipping")
        mixed = explain_contributions(self._result, gradients) or explain_leftovers(
            self._result, gradients
        )
        if mixed is not None:
            return self._describe_common(mixed, len(wrong), wrong)
        causes = [self._causes.explain(result) for result in wrong]
        known = [cause for cause in causes if cause.suspect is not Suspect.UNKNOWN]
        if 2 * len(known) < len(causes) or len({cause.group_key for cause in known}) != 1:
            return self._find_late_cause(wrong)
        return self._describe_common(known[0], len(known), wrong)

    def _describe_common(
        self,
        cause: Explanation,
        num_known: int,
        wrong: Sequence[TensorComparison],
        subject: str = "all gradients",
    ) -> Problem:
        """The problem that `num_known` of the wrong gradients have in common."""
        facts = ["Outputs agree."]
        is_missing = cause.suspect is Suspect.MISSING_REDUCTION
        names = [result.case.name for result in wrong]
        cause = self._find_lost_hook(cause, names)
        is_all = num_known == len(wrong)
        count = f"{num_known} of {len(wrong)} gradients"
        if is_missing and cause.axes:
            which = "No gradient is" if is_all else f"{count} are not"
            facts += [f"{which} reduced over {' and '.join(cause.axes)}.", cause.to_sentence()]
        elif cause.predicate and is_all:
            facts.append(cause.to_sentence("every gradient"))
        else:
            which = "All gradients" if is_all else count
            facts += [f"{which} differ in the same way.", cause.to_sentence("each")]
        remedies = [suggest_remedy(cause, OriginKind.LOSS)]
        num_calls = self._find_num_calls(cause)
        if num_calls is not None and cause.suspect is Suspect.DOUBLE_REDUCTION:
            facts.append(f"{num_calls} is also the number of micro-batches.")
            remedies.append(f"Or {_DIVIDE_LOSS}.")
        elif num_calls is not None:
            facts.append(f"{num_calls} is the number of micro-batches.")
            remedies = [make_sentence(_DIVIDE_LOSS)]
        if not is_all:
            facts.append("The others differ in other ways.")
        fact = " ".join([*facts, self._name_op()]).strip()
        return Problem(
            cause,
            subject,
            fact,
            " ".join(remedies),
            phase=Phase.BACKWARD,
            op=self._op_outside.name if self._op_outside else "",
            source=self._find_reduction(wrong if subject == "all gradients" else []),
        )

    def _find_lost_hook(self, cause: Explanation, names: Sequence[str]) -> Explanation:
        """The cause of gradients of these names; one that says more if DDP has lost its hooks."""
        if cause.suspect is not Suspect.MISSING_REDUCTION:
            return cause
        unhooked = frozenset().union(*(rank.unhooked for rank in self._result.ranks))
        if any(rank.is_bypassed for rank in self._result.ranks):
            clause = "the step calls the module inside DistributedDataParallel, and not the "
            clause += "wrapper, so that the hooks that reduce gradients do not run"
            remedy = "Call the wrapped model: ddp(batch), not ddp.module(batch)."
        elif unhooked.issuperset(names):
            clause = "DistributedDataParallel has no hooks that reduce them: these parameters "
            clause += "have replaced others since the model was wrapped, or were frozen then"
            remedy = "Wrap the model after its parameters have been loaded, moved or unfrozen."
        else:
            return cause
        return dataclasses.replace(
            cause, suspect=Suspect.LOST_HOOK, clause=clause, predicate="", remedy=remedy
        )

    @property
    def _op_outside(self) -> WrongOp | None:
        """The first op outside the modules that differs, if the ops there were compared."""
        origins = self._result.origins
        is_outside = not origins or origins[0].phase is Phase.BACKWARD
        return self._result.op if is_outside else None

    @property
    def _source_outside(self) -> Source | None:
        """The line of that op, or else the line of the ranks that starts backward."""
        if self._op_outside is not None and self._op_outside.source is not None:
            return self._op_outside.source
        return self._result.find_source(TensorKind.LOSS, "loss")

    def _name_op(self) -> str:
        """A sentence that names the first op outside the modules that differs; else empty."""
        if self._op_outside is None:
            return ""
        return f"Outside the modules, the first op to differ is {self._op_outside.name}."

    def _describe_cleared(self) -> Problem:
        """The problem that the ranks clear gradients between micro-batches."""
        times = {0: "never", 1: "once"}
        num_on_ranks, num_on_single = (
            self._result.num_cleared,
            self._result.reference.num_cleared,
        )
        cause = Explanation(
            Suspect.STALE,
            "gradients are cleared between two backward passes of the step "
            f"{times.get(num_on_ranks, f'{num_on_ranks} times')} on the ranks and "
            f"{times.get(num_on_single, f'{num_on_single} times')} on the single device, so "
            "gradients of earlier micro-batches are lost",
            remedy="Call zero_grad() once before the first micro-batch, not before each of them.",
        )
        fact = f"Outputs agree. {cause.to_sentence()}"
        return Problem(
            cause,
            "all gradients",
            fact,
            cause.remedy,
            phase=Phase.BACKWARD,
            source=self._source_outside,
        )

    def _find_num_calls(self, cause: Explanation) -> int | None:
        """The number of calls of the model in a step, if it is the factor between gradients."""
        ratio = cause.ratio or 1.0
        counts = {self._result.num_calls, self._result.reference.num_calls} - {1}
        factor = max(ratio, 1 / ratio)
        return next((n for n in counts if math.isclose(factor, n, rel_tol=1e-2)), None)

    def _find_late_cause(self, wrong: Sequence[TensorComparison]) -> Problem | None:
        """The problem that all parameter gradients differ, though those of module outputs agree."""
        parameter_names = {
            origin.comparison.case.name
            for origin in self._result.origins
            if origin.kind is OriginKind.GRADIENT_OF_PARAMETER and origin.is_first
        }
        if len(parameter_names) < len(self._result.origins) or any(
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
            f"Outputs agree. {cause.to_sentence()} {self._name_op()}".strip(),
            cause.remedy,
            phase=Phase.BACKWARD,
            op=self._op_outside.name if self._op_outside else "",
            source=self._find_reduction(wrong),
        )

    def _group_parameters(self, origins: Sequence[Origin]) -> Iterator[Problem]:
        """One problem for the parameters whose gradients differ for the same reason."""
        groups: dict[object, list[Origin]] = {}
        # Sums and means of noise are zero, so noise joins the cause of the other gradients.
        for origin in sorted(origins, key=lambda origin: is_noise(origin.comparison.verdict)):
            cause = self._causes.explain(origin.comparison)
            agreement = origin.comparison.verdict.agreement
            same = (
                key
                for key, group in groups.items()
                if is_noise(origin.comparison.verdict)
                and self._causes.explain(group[0].comparison).suspect is cause.suspect
                and self._causes.explain(group[0].comparison).axes == cause.axes
            )
            new_key = (cause.group_key, agreement if agreement in SELF_EXPLANATORY else None)
            groups.setdefault(next(same, new_key), []).append(origin)
        for group in groups.values():
            yield self._describe_parameters(group)

    def _describe_parameters(self, origins: Sequence[Origin]) -> Problem:
        first = origins[0]
        cause, verdict = self._causes.explain(first.comparison), first.comparison.verdict
        names = [origin.comparison.case.name for origin in origins]
        cause = self._find_lost_hook(cause, names)
        modules = list(dict.fromkeys(origin.module or "" for origin in origins))
        module = _find_common_module(modules)
        if module is None or self._is_partly_wrong(module, names):
            location = self._list_modules(modules)
        else:
            location = module
        if len(names) > 1:
            clause = f"the gradients of {list_names(names)} differ"
            agree = "those of their modules' outputs agree"
        else:
            clause = f"the gradient of {names[0]} differs"
            agree = "that of its module's output agrees"
        if all(origin.is_first for origin in origins):
            clause += f", although {agree}"
        is_plain = cause.suspect is Suspect.UNKNOWN and verdict.agreement in SELF_EXPLANATORY
        why = cause.to_sentence("each" if len(names) > 1 else "it")
        why = make_sentence(verdict.detail) if is_plain else why
        return Problem(
            cause,
            location or "the model itself",
            self._after_outputs(f"{make_sentence(clause)} {why} {self._name_op()}".strip()),
            suggest_remedy(cause, first.kind),
            module=module,
            phase=Phase.BACKWARD,
            names=tuple(names),
            rule=f"parity-{verdict.agreement}" if is_plain else "",
            op=self._op_outside.name if self._op_outside else "",
            source=self._find_reduction([origin.comparison for origin in origins]),
        )

    def _find_reduction(self, gradients: Sequence[TensorComparison]) -> Source | None:
        """The line of the last collective that computed one of these gradients.

        Otherwise that of an op outside the modules that differs, or that which starts backward.
        """
        lines = (self._result.find_collective(result) for result in gradients[:MAX_TRIED])
        return next((line for line in lines if line is not None), self._source_outside)

    def _is_partly_wrong(self, module: str, names: Sequence[str]) -> bool:
        """Whether a module is a container without code and also holds parameters that are right."""
        if self._result.types.get(module) not in ("ModuleDict", "ModuleList"):
            return False
        inner = {n for n in self._result.reference.gradients if is_within(n, module)}
        return not inner <= set(names)

    def _list_modules(self, modules: Sequence[str]) -> str:
        """The names as text; modules that differ in all layers are shown as one pattern."""
        owners = {name.rpartition(".")[0] for name in self._result.reference.parameters}
        locations: dict[str, None] = {}
        for module in modules:
            pattern = fold_layers(module)
            matching = {owner for owner in owners if matches_name(pattern, owner)}
            is_folded = len(modules) > _MAX_NAMED and matching <= set(modules)
            locations.setdefault(pattern if is_folded else module)
        return ", ".join(locations)

    def _describe(self, origin: Origin) -> Problem:
        is_first = bool(self._result.origins) and origin is self._result.origins[0]
        op = self._result.op if is_first else None
        if is_passed(origin, self._result):
            origin, op = dataclasses.replace(origin, module=None, path=""), None
        cause = self._causes.explain_origin(origin, op, self._wrong)
        # A caller may reduce the partial sums. If another cause explains its output, then it
        # does reduce them.
        outer = origin.outer if cause.suspect is Suspect.MISSING_REDUCTION else None
        while outer is not None:
            reduced = self._causes.explain(
                outer.comparison, outer.module, outer.inputs, is_forward=True
            )
            if reduced.suspect in _REDUCED:
                clause = reduced.describe(f"the output of `{outer.module}`")
                cause = dataclasses.replace(reduced, clause=clause, predicate="")
                origin = dataclasses.replace(origin, module=outer.module)
                break
            outer = outer.outer
        agreement = origin.comparison.verdict.agreement
        is_plain = cause.suspect is Suspect.UNKNOWN and agreement in SELF_EXPLANATORY
        if is_plain:
            cause = Explanation(Suspect.UNKNOWN, origin.comparison.verdict.detail)
        outside = "Outside the modules, the" if origin.kind is OriginKind.LOSS else "The"
        named = "" if op is None else f" {outside} first op to differ is {op.name}."
        fact = f"{describe_location(origin)}{named} {cause.to_sentence()}".strip()
        return Problem(
            cause,
            name_location(origin),
            fact if origin.phase is Phase.FORWARD else self._after_outputs(fact),
            suggest_remedy(cause, origin.kind),
            module=origin.module,
            phase=origin.phase,
            rule=f"parity-{agreement}" if is_plain else "",
            op="" if op is None else op.name,
            source=self._find_source(origin, op, cause),
        )

    def _find_source(self, origin: Origin, op: WrongOp | None, cause: Explanation) -> Source | None:
        """The line of the op, or of a collective; for a loss that which starts backward."""
        source = None if op is None else op.source
        is_of_collective = cause.suspect in _REDUCED
        if source is None or is_of_collective:
            source = self._result.find_collective(origin.comparison, origin.phase) or source
        if source is not None:
            return source
        if origin.kind is OriginKind.INPUT and origin.module is None:
            sources = (rank.input_source for rank in self._result.ranks)
            return next((source for source in sources if source is not None), None)
        is_loss = origin.kind is OriginKind.LOSS
        return self._result.find_source(TensorKind.LOSS, "loss") if is_loss else None

    def _describe_buffers(self) -> Iterator[Problem]:
        """Buffers that differ although all other tensors agree; one problem per module."""
        groups: dict[str, list[TensorComparison]] = {}
        for result in self._wrong:
            groups.setdefault(result.case.name.rpartition(".")[0], []).append(result)
        for module, group in groups.items():
            causes = [self._causes.explain(result) for result in group]
            known = (cause for cause in causes if cause.suspect is not Suspect.UNKNOWN)
            disagree = any(r.verdict.agreement is Agreement.RANKS_DISAGREE for r in group)
            cause = next(known, OWN_VALUES if disagree else UNKNOWN)
            names = list_names([result.case.name for result in group])
            differ = "differs" if len(group) == 1 else "differ"
            yield Problem(
                cause,
                module or "the model itself",
                f"Outputs and gradients agree; after the step {names} {differ}. "
                f"{cause.to_sentence()}",
                suggest_remedy(cause, OriginKind.BUFFER),
                module=module,
                names=tuple(result.case.name for result in group),
            )

    def describe_tensors(self) -> Iterator[Problem]:
        """Problems without a module: tensors that differ in the same way, together."""
        groups: dict[object, list[TensorComparison]] = {}
        for result in self._wrong:
            cause = self._causes.explain(result)
            groups.setdefault(
                (result.case.kind, result.verdict.agreement, cause.group_key), []
            ).append(result)
        for group in groups.values():
            first = group[0]
            cause, verdict = self._causes.explain(first), first.verdict
            names = [result.case.name or "the output" for result in group]
            what = "" if verdict.kind is TensorKind.OUTPUT else f"{verdict.kind} of "
            is_plain = cause.suspect is Suspect.UNKNOWN
            detail = make_sentence(verdict.detail) if is_plain else cause.to_sentence()
            agreement = verdict.agreement.replace("_", " ")
            is_gradient = verdict.kind is TensorKind.GRADIENT and len(names) > 1
            modules = [name.rpartition(".")[0] for name in names] if is_gradient else [""]
            yield Problem(
                cause,
                _find_common_module(modules) or names[0],
                f"{what}{list_names(names)}: {agreement}. {detail}".strip(),
                suggest_remedy(cause, OriginKind.LOSS),
                names=tuple(result.case.name for result in group),
                rule=f"parity-{verdict.agreement.replace('_', '-')}" if is_plain else "",
                source=self._source_outside if verdict.kind is TensorKind.GRADIENT else None,
            )

    def _after_outputs(self, fact: str) -> str:
        return f"Outputs agree. {fact}".strip() if self._outputs_agree else fact.strip()


def _is_evaluation(result: TensorComparison) -> bool:
    return result.case.kind is TensorKind.OUTPUT and result.case.name.startswith(EVALUATION)


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
