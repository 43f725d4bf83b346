"""Findings where an inferred type contradicts how the tensor is used.

Tensors that some layouts do not explain are common in correct programs, such as tokens in the order
of their experts. So a tensor inside the model is blamed only if an output or a gradient of the
model is wrong, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import final

from shardscope.record import (
    AxisTypes,
    Finding,
    InferredTypes,
    Severity,
    TensorRole,
    TensorTypes,
)

_PARTIAL = ("P", "P(avg)")
_MAX_NAMES = 3


def find_contradictions(
    types: InferredTypes, batch_axes: Sequence[str], *, is_loss_default: bool
) -> list[Finding]:
    """The findings of all rules.

    With `is_loss_default` nothing but an elementwise loss takes what the model returns.
    """
    rules = _Rules(types, batch_axes, is_loss_default=is_loss_default)
    partial_values = list(rules.find_partial_values())
    varying_values = list(rules.find_varying_values())
    # The output follows from the partial value, and gradients from parameters that vary.
    causes = partial_values or varying_values
    return [
        *causes,
        *(finding for finding in rules.find_unreduced_gradients() if not varying_values),
        *rules.find_contradicted_declarations(),
    ]


@final
class _Rules:
    def __init__(
        self, types: InferredTypes, batch_axes: Sequence[str], *, is_loss_default: bool
    ) -> None:
        self._tensors = types.tensors
        self._axes = [axis.name for axis in types.axes if axis.size > 1]
        self._batch_axes = batch_axes
        self._is_loss_default = is_loss_default

    def _list_along(
        self, roles: Iterable[TensorRole]
    ) -> Iterator[tuple[str, TensorTypes, AxisTypes]]:
        """Each axis with each tensor of these roles that the single device has."""
        for name in self._axes:
            for tensor in self._tensors:
                if tensor.role in tuple(roles) and not tensor.is_added:
                    yield name, tensor, next(axis for axis in tensor.axes if axis.axis == name)

    def find_unreduced_gradients(self) -> Iterator[Finding]:
        """Parameters that are the same on all ranks, and their gradients are not."""
        groups: dict[tuple[str, bool], list[TensorTypes]] = {}
        for name, tensor, axis in self._list_along([TensorRole.PARAMETER]):
            is_replicated = axis.forward == "R" and tensor.is_matched
            # DTensor reduces a gradient that it knows to be partial when an op takes it.
            is_known = (axis.declared_gradient or "").startswith("P")
            if is_replicated and axis.gradient in (*_PARTIAL, "V") and not is_known:
                groups.setdefault((name, axis.gradient != "V"), []).append(tensor)
        for (name, is_partial), tensors in groups.items():
            kinds = "partial: their sum or mean is the gradient" if is_partial else "varying"
            yield Finding(
                rule="types-unreduced-gradient",
                severity=Severity.ERROR,
                subject=_list_subject(tensors),
                fact=(
                    f"The parameters are replicated over {name}, and their gradients are {kinds}. "
                    "Each rank would train weights of its own."
                ),
                remedy=f"Reduce the gradients over {name} before the optimizer's step.",
            )

    def find_partial_values(self) -> Iterator[Finding]:
        """Partial values that are used as if they were complete."""
        if not self._is_wrong():
            return
        for name, tensor, axis in self._list_along([TensorRole.OUTPUT]):
            if axis.forward != "P" or _is_declared_partial(axis):
                continue
            is_returned = not tensor.name and self._is_loss_default
            if is_returned or tensor.is_gradient_matched is False or self._is_misused(tensor, name):
                taker = "returned by the model" if is_returned else "used"
                yield Finding(
                    rule="types-partial-as-complete",
                    severity=Severity.ERROR,
                    subject=_list_subject([tensor]),
                    fact=(
                        f"The output is partial over {name}: only the sum over its ranks is the "
                        f"single device's. It is {taker} as if it were complete, for what is "
                        "computed from it is wrong."
                    ),
                    remedy=f"Sum it over {name} first, with an all-reduce or a reduce-scatter.",
                )

    def _is_misused(self, tensor: TensorTypes, name: str) -> bool:
        """Whether a module takes the tensor as it is, and returns what no layout explains."""
        takers = [
            candidate.name
            for _, candidate, axis in self._list_along([TensorRole.INPUT])
            if _is_partial_like(candidate, tensor, axis, name)
        ]
        return any(
            candidate.role is TensorRole.OUTPUT
            and candidate.name in takers
            and not candidate.is_matched
            and not candidate.is_added
            for candidate in self._tensors
        )

    def _is_wrong(self) -> bool:
        """Whether an output of the model, or the gradient of a parameter, is wrong."""
        return any(
            (tensor.role is TensorRole.OUTPUT and not tensor.name and not self._is_fine(tensor))
            or (tensor.role is TensorRole.PARAMETER and tensor.is_gradient_matched is False)
            for tensor in self._tensors
            if not tensor.is_added
        )

    def _is_fine(self, tensor: TensorTypes) -> bool:
        is_partial = any(
            axis.forward == "P" and not _is_declared_partial(axis) for axis in tensor.axes
        )
        return tensor.is_matched and not (is_partial and self._is_loss_default)

    def find_varying_values(self) -> Iterator[Finding]:
        """Outputs of the model, and parameters, of which each rank has a full one of its own."""
        roles = (TensorRole.OUTPUT, TensorRole.PARAMETER)
        groups: dict[tuple[str, TensorRole], list[TensorTypes]] = {}
        for name, tensor, axis in self._list_along(roles):
            is_output = tensor.role is TensorRole.OUTPUT
            is_of_ranks = is_output and (
                name in self._batch_axes or not tensor.shape or tensor.name
            )
            is_full = tensor.shape == tensor.local_shape
            if axis.forward == "V" and is_full and not tensor.is_matched and not is_of_ranks:
                groups.setdefault((name, tensor.role), []).append(tensor)
        for (name, role), tensors in groups.items():
            is_output = role is TensorRole.OUTPUT
            yield Finding(
                rule="types-varying-as-replicated",
                severity=Severity.ERROR,
                subject=_list_subject(tensors),
                fact=(
                    f"Each rank of {name} has "
                    + ("an output" if is_output else "parameters")
                    + " of the full shape, with values of its own."
                ),
                remedy=(
                    f"Reduce or gather it over {name}."
                    if is_output
                    else "Initialize or broadcast the parameters so that all ranks of "
                    f"{name} start with the same values."
                ),
            )

    def find_contradicted_declarations(self) -> Iterator[Finding]:
        """Placements and annotations that the values contradict."""
        groups: dict[tuple[str, str, str], list[TensorTypes]] = {}
        for name in self._axes:
            for tensor in self._tensors:
                axis = next(axis for axis in tensor.axes if axis.axis == name)
                is_wrong = axis.agrees is False and (axis.declared, axis.forward) != ("P", "V")
                if axis.declared is not None and is_wrong:
                    groups.setdefault((name, axis.declared, axis.forward), []).append(tensor)
        for (name, declared, inferred), tensors in groups.items():
            yield Finding(
                rule="types-declared",
                severity=Severity.ERROR,
                subject=_list_subject(tensors),
                fact=f"The tensor declares {declared} along {name}, and its values are {inferred}.",
                remedy="Declare what the values are, or reduce, gather or shard them as declared.",
            )


def _is_declared_partial(axis: AxisTypes) -> bool:
    return (axis.declared or "").startswith("P")


def _is_partial_like(
    candidate: TensorTypes, tensor: TensorTypes, axis: AxisTypes, name: str
) -> bool:
    is_same_shape = candidate.shape == tensor.shape and candidate.local_shape == tensor.local_shape
    return axis.axis == name and axis.forward == "P" and is_same_shape


def _list_subject(tensors: Sequence[TensorTypes]) -> str:
    """The names, with `*` for layer numbers: `layers.*.wq.weight, norm.weight (×9)`."""
    named = (tensor.describe(is_folded=True) for tensor in tensors)
    names = list(dict.fromkeys(name.replace("·", "the model") for name in named))
    listed = ", ".join(names[:_MAX_NAMES])
    return f"{listed} (×{len(tensors):,})" if len(tensors) > len(names[:_MAX_NAMES]) else listed
