"""Records of inferred SPMD types: how every tensor is distributed along each mesh axis.

A type is `R` (replicated), `S(d)` (sharded along dim d), `P` (partial: the ranks' values add up to
it; `P(avg)`: their mean is it), `V` (varying: each rank has a value of its own, and no layout of
these is the single device's tensor), `some ranks` (of the axis do not have the tensor) or `?` (the
values do not decide).
"""

from __future__ import annotations

from enum import StrEnum

from shardscope.record.base import Axis, Record
from shardscope.record.layer_names import fold_layers
from shardscope.record.ranks import Natural

UNDECIDED = "?"
"""The type of a tensor whose values do not decide, such as zeros."""
ABSENT = "some ranks"
"""The type along an axis of which some ranks do not have the tensor."""


class TensorRole(StrEnum):
    """What a tensor is to the module that it belongs to."""

    INPUT = "input"
    OUTPUT = "output"
    PARAMETER = "parameter"
    BUFFER = "buffer"


class AxisTypes(Record, frozen=True, kw_only=True, gc=False):
    """The types of a tensor and of its gradient along one mesh axis.

    `gradient` is None if there is none. `declared` is the type that a placement of DTensor or an
    annotation of spmd_types gives the tensor, `declared_gradient` that of its gradient; None
    without.
    """

    axis: str
    forward: str
    gradient: str | None = None
    declared: str | None = None
    declared_gradient: str | None = None

    def describe(self) -> str:
        """The types of the tensor and of its gradient: `S(2) / S(2)`; `S(2)` without a gradient."""
        return self.forward if self.gradient is None else f"{self.forward} / {self.gradient}"

    @property
    def agrees(self) -> bool | None:
        """Whether the inferred type is the declared one; None if either is not known.

        A declared `I` is `R`, and `S(d)` is also varying: where no layout makes up the single
        device's tensor, its dim cannot be checked.
        """
        if self.declared is None or self.forward in (UNDECIDED, ABSENT):
            return None
        if self.declared in ("R", "I"):
            return self.forward == "R"
        if self.declared == "V":
            return self.forward == "V" or self.forward.startswith("S(")
        if self.declared.startswith("P"):
            return self.forward.startswith("P")
        return self.forward in (self.declared, "V")


class TensorTypes(Record, frozen=True, kw_only=True, gc=False):
    """The types of one tensor along all mesh axes.

    `name` is that of the module whose input or output it is, or of the parameter or buffer; `path`
    leads to it in what the module takes or returns, such as `[0].logits`. `call` is set where the
    types of several calls of the module differ. `shape` is that of the full tensor, `local_shape`
    that of the first rank that has it. `is_added` means that only the parallel model has the
    tensor: then `R` and `V` only say whether all ranks have the same values. `is_matched` says that
    the ranks' values, put together as the types say, are the single device's; `is_gradient_matched`
    the same of the gradient, None if there is none. `order` is how chunks are distributed where
    that is not the order of the ranks: zigzag, striped, strided or rows.
    """

    name: str
    role: TensorRole
    axes: tuple[AxisTypes, ...]
    path: str = ""
    call: Natural | None = None
    shape: tuple[Natural, ...] = ()
    local_shape: tuple[Natural, ...] = ()
    is_added: bool = False
    dtype: str = ""
    is_matched: bool = True
    is_gradient_matched: bool | None = None
    order: str = ""

    @property
    def module(self) -> str:
        """The module that the tensor belongs to."""
        is_boundary = self.role in (TensorRole.INPUT, TensorRole.OUTPUT)
        return self.name if is_boundary else self.name.rpartition(".")[0]

    def describe(self, *, is_folded: bool = False) -> str:
        """The name and the path: `layers.0.mlp[0]`; with `*` for layer numbers if it is folded."""
        name = fold_layers(self.name) if is_folded else self.name
        return (name or "·") + self.path


class InferredTypes(Record, frozen=True, kw_only=True, gc=False):
    """The types of all tensors of a model on one mesh.

    They hold in each of `num_runs` runs with different values of weights and inputs. `is_exact`
    says that these were in double precision. `gradient_factor` is the factor of the gradients of
    activations on the ranks: a mean over a rank's own shard of the batch makes them larger.
    """

    axes: tuple[Axis, ...]
    tensors: tuple[TensorTypes, ...] = ()
    num_runs: Natural = 0
    is_exact: bool = True
    gradient_factor: float = 1.0

    def count_declared(self) -> tuple[int, int]:
        """How many declared types could be checked, and how many of these the values have."""
        verdicts = [axis.agrees for tensor in self.tensors for axis in tensor.axes]
        known = [verdict for verdict in verdicts if verdict is not None]
        return len(known), sum(known)
