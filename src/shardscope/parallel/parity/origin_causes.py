"""Infers the cause of a divergence: from weights, values, the first wrong op, or the layout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import final

import torch

from shardscope.parallel.equivalence import TensorComparison
from shardscope.parallel.parity.causes import explain
from shardscope.parallel.parity.evidence import list_sizes, sharding_axes
from shardscope.parallel.parity.explanation import UNKNOWN, Explanation
from shardscope.parallel.parity.first_op import WrongOp
from shardscope.parallel.parity.input_causes import explain_inputs
from shardscope.parallel.parity.reduction_causes import (
    explain_mixed,
    explain_parts,
    explain_wrong_group,
)
from shardscope.parallel.parity.result import Origin, OriginKind, ParityResult
from shardscope.parallel.parity.scale_causes import explain_terms
from shardscope.parallel.parity.slice_causes import (
    explain_added_rows,
    explain_fused,
    explain_gathered,
    explain_repeated_samples,
)
from shardscope.record import TOLERABLE, Agreement, Phase, Suspect, TensorKind

# Causes that apply to weights, which are loaded and not computed.
_OF_WEIGHTS = (Suspect.STALE, Suspect.WRONG_SLICE, Suspect.WRONG_GROUP, Suspect.PERMUTED)


@final
class OriginExplainer:
    """Explains tensors of a comparison, and the places where the versions diverge.

    `batch_axes` are the indices of the mesh axes along which the batch is sharded.
    """

    def __init__(
        self, parity_result: ParityResult, axes: Mapping[str, int], batch_axes: Sequence[int]
    ) -> None:
        self._result = parity_result
        self._axes = axes
        self._batch_axes = batch_axes
        self._causes: dict[int, Explanation] = {}  # by the id of a comparison

    def explain(
        self,
        comparison: TensorComparison,
        module: str | None = None,
        inputs: Sequence[torch.Tensor] = (),
        *,
        is_forward: bool = False,
    ) -> Explanation:
        """The cause of one tensor's difference, inferred once; see `explain` in `causes.py`.

        `module` is the module that computes the tensor and `inputs` what it takes.
        """
        if id(comparison) not in self._causes:
            biases = [
                parameter
                for name, parameter in self._result.reference.parameters.items()
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
            self._causes[id(comparison)] = self._refine(comparison)
        return self._causes[id(comparison)]

    def _refine(self, comparison: TensorComparison) -> Explanation:
        """The cause so far, or what else is known of the parameter that a gradient belongs to.

        It may be frozen on the ranks, or the gradient lack the parts of some of them.
        """
        known = self._causes[id(comparison)]
        is_missing = comparison.verdict.agreement is Agreement.MISSING
        ranks = self._result.ranks
        if is_missing and ranks and all(comparison.case.name in rank.frozen for rank in ranks):
            return Explanation(
                Suspect.STALE,
                predicate="is missing, as the parameter is frozen on the ranks",
                remedy="Set requires_grad=True on the ranks, or freeze it on the single device.",
            )
        if known.suspect is not Suspect.UNKNOWN or comparison.case.kind is not TensorKind.GRADIENT:
            return known
        raw = [rank.raw_gradients.get(comparison.case.name) for rank in self._result.ranks]
        return explain_parts(comparison, raw) or known

    def find_mixed_gradients(self, wrong: Sequence[TensorComparison]) -> None:
        """Explain those of the wrong gradients that are sums over different parameters.

        Only gradients without another cause, where the versions diverge.
        """
        origin_comparisons = {origin.comparison for origin in self._result.origins}
        unknown = [
            result
            for result in wrong
            if result in origin_comparisons and self.explain(result).suspect is Suspect.UNKNOWN
        ]
        for result, cause in explain_mixed(unknown, self._axes):
            self._causes[id(result)] = cause

    def explain_origin(
        self, origin: Origin, op: WrongOp | None, wrong: Sequence[TensorComparison]
    ) -> Explanation:
        """The cause of a divergence, from weights, values, the op or the layout, in this order.

        `op` is the first op of the module that differs, if known; `wrong` are all tensors that
        differ.
        """
        if origin.comparison.verdict.agreement is Agreement.NONFINITE:
            return UNKNOWN
        is_drawn = [result.verdict.suspect is Suspect.RANDOMNESS for result in wrong]
        clause = "the ranks drew different random numbers for a replicated tensor"
        draw = Explanation(Suspect.RANDOMNESS, clause)
        if all(is_drawn):  # random values may resemble any cause
            return draw
        is_forward = origin.phase is Phase.FORWARD and origin.module is not None
        is_of_model = origin.kind is OriginKind.INPUT and origin.module is None
        weights = self._explain_weights(origin.module or "") if is_forward else UNKNOWN
        if weights.describe():
            return weights
        causes = (
            self._explain_own_shard(origin),
            self._explain_attached_loss(origin),
            self.explain(origin.comparison, origin.module, origin.inputs, is_forward=is_forward),
            self._explain_inputs(origin),
            self._explain_gathered(origin),
            self._explain_rows(origin),
            explain_terms(origin, op, self._axes) or UNKNOWN,
            _explain_exchanged(origin),
            UNKNOWN if op is None else self._explain_op(op, origin),
            self._explain_loss() if origin.kind is OriginKind.LOSS else UNKNOWN,
            explain_inputs(origin.comparison, self._result) if is_of_model else UNKNOWN,
        )
        known = next((cause for cause in causes if cause.suspect is not Suspect.UNKNOWN), None)
        known = known or next((cause for cause in causes if cause.remedy), None)
        if known is None and any(is_drawn):
            return draw
        return known or next((cause for cause in causes if cause.describe()), UNKNOWN)

    @staticmethod
    def _explain_inputs(origin: Origin) -> Explanation:
        """The cause of wrong inputs of the model, which come from the program's data."""
        is_of_model = origin.kind is OriginKind.INPUT and origin.module is None
        return (explain_repeated_samples(origin.comparison) if is_of_model else None) or UNKNOWN

    def _explain_gathered(self, origin: Origin) -> Explanation:
        """The cause of a wrong output of a module whose inputs were gathered along another dim."""
        for path, comparison in origin.compared_inputs.items():
            cause = explain_gathered(comparison, self._axes)
            if cause is not None:
                clause = f"its input {path} {cause.predicate}"
                return dataclasses.replace(cause, clause=clause, predicate="")
        return UNKNOWN

    def _explain_rows(self, origin: Origin) -> Explanation:
        """The cause of a wrong output of an embedding: rows of its weight that are added."""
        if origin.kind is not OriginKind.OUTPUT:
            return UNKNOWN
        parameters = self._result.reference.parameters.items()
        own = [tensor for name, tensor in parameters if name.rpartition(".")[0] == origin.module]
        return explain_added_rows(origin.comparison, own) or UNKNOWN

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

    def _explain_attached_loss(self, origin: Origin) -> Explanation:
        """The cause of a gradient that contains too much, or too little, of an inner loss's."""
        factor = origin.attached_factor
        if factor is None:
            return UNKNOWN
        number = max(factor, 1 / factor) if factor else 0.0
        what = [
            f"the size of {' and '.join(names)}"
            for names, size in list_sizes(self._axes)
            if math.isclose(number, size, rel_tol=1e-2)
        ]
        if self._result.num_calls > 1 and math.isclose(
            number, self._result.num_calls, rel_tol=1e-2
        ):
            what.append("the number of micro-batches")
        also = f", and {number:.0f} is {' and '.join(what)}" if what else ""
        return Explanation(
            Suspect.SCALED,
            f"the gradient of a loss that starts inside `{origin.module}`, such as one that "
            f"balances experts, is {factor:.4g} times what it should be{also}",
            ratio=factor,
            remedy="Scale that loss as the loss of the model: by the number of micro-batches, by "
            "the tokens of a micro-batch and not of a sequence or a rank, and for each axis "
            "according to whether gradients are summed or averaged over it.",
        )

    def _explain_weights(self, module: str) -> Explanation:
        """The cause of weights that were wrong before the step."""
        for name, region in self._result.missing_elements.items():
            if name.rpartition(".")[0] == module:
                return Explanation(Suspect.WRONG_SLICE, f"no rank holds {name}{region}")
        for result in self._result.comparisons:
            is_own = result.case.name.rpartition(".")[0] == module
            if result.case.kind is TensorKind.PARAMETER and is_own:
                cause = self.explain(result)
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
            cause = self.explain(result, is_forward=True)
            if cause.suspect is not Suspect.UNKNOWN:
                clause = f"its input differs already: {cause.describe()}"
                return dataclasses.replace(cause, clause=clause, predicate="")
        fused = explain_fused(op.inputs, self._axes, op.same_shaped)
        if fused is not None:
            return fused
        if op.outputs and op.outputs[0].full:
            cause = self.explain(op.outputs[0], module, is_forward=True)
            if cause.suspect is not Suspect.UNKNOWN:
                return self._explain_result(op, cause, origin)
        if op.changed and not wrong:
            name, single_value, rank_value = op.changed[0]
            return Explanation(
                Suspect.SCALED if "scale" in name else Suspect.UNKNOWN,
                f"its argument {name} is {_format_argument(rank_value)} on the ranks and "
                f"{_format_argument(single_value)} on the single device",
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
        if cause.reduction == "sum" and origin.kind is OriginKind.OUTPUT:
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
            result for result in self._result.comparisons if result.case.kind is TensorKind.OUTPUT
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


def _explain_exchanged(origin: Origin) -> Explanation:
    """The cause of modules that run in another order on the ranks."""
    if origin.exchanged is None:
        return UNKNOWN
    module, wanted = origin.exchanged
    return Explanation(
        Suspect.PERMUTED,
        f"on the ranks `{module}` takes what `{wanted}` should take: modules run in another order",
        remedy="Give each rank, and each stage of a pipeline, the layers that the schedule runs "
        "there: stage s of n ranks is on rank s % n if stages are interleaved.",
    )


def _format_argument(value: float) -> str:
    return "not given" if math.isnan(value) else f"{value:.6g}"
