"""The result of comparing a parallel version with the original, and where the two diverge.

An `Origin` is the first code whose result differs although its inputs agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import final

import torch

from shardscope.parallel.equivalence import Layout, StepResult, TensorComparison
from shardscope.parallel.parity.collectives import Collectives, find_line
from shardscope.parallel.parity.first_op import WrongOp
from shardscope.record import Phase, Source, TensorKind

OF_MODEL = (TensorKind.OUTPUT, TensorKind.GRADIENT)
"""The kinds of tensors that forward and backward of the model compute."""


class OriginKind(StrEnum):
    """The kind of tensor that differs first."""

    OUTPUT = "output"  # of a module
    INPUT = "input"  # of a module; computed by its caller
    GRADIENT_OF_INPUT = "gradient of input"  # of a module; returned by its backward
    GRADIENT_OF_OUTPUT = "gradient of output"  # of a module; from the code of its caller
    GRADIENT_OF_PARAMETER = "gradient of parameter"  # the gradient of its module's output agrees
    LOSS = "loss"  # the gradient of the model's own output
    BUFFER = "buffer"  # all other tensors agree


@final
@dataclass(frozen=True, eq=False)
class Origin:
    """Where the versions diverge: code whose inputs agree and whose result differs.

    `module` is the module whose code it is, None outside the model; `named_module` is the
    module whose input, output or parameter differs. `is_first` means that all tensors it is
    computed from agree.
    """

    kind: OriginKind
    module: str | None
    comparison: TensorComparison
    named_module: str = ""
    path: str = ""
    is_first: bool = True
    inputs: tuple[
        torch.Tensor, ...
    ] = ()  # of the module on the single device, if its output differs
    compared_inputs: Mapping[str, TensorComparison] = field(default_factory=dict)  # by their paths
    outer: Origin | None = None  # the output of its caller, if that differs too
    own_shard: Layout | None = None  # shard of the module's output that the gradient is limited to
    attached_factor: float | None = None  # of the gradient of a loss that starts in the module
    terms: Mapping[str, torch.Tensor] = field(default_factory=dict)  # what modules inside return
    is_of_stage: bool = False  # some ranks do not run the named module: it is of a pipeline stage
    exchanged: tuple[str, str] | None = None  # a module, and whose input it takes on the ranks

    @property
    def phase(self) -> Phase:
        """Forward or backward."""
        is_forward = self.kind in (OriginKind.OUTPUT, OriginKind.INPUT)
        return Phase.FORWARD if is_forward else Phase.BACKWARD


@final
@dataclass(frozen=True)
class BrokenTie:
    """Parameters of the parallel model that are one parameter in the original.

    `names` has all names of the original's parameter, `copies` one name for each parameter that
    it became. The copies are on one rank, or, with `is_across_ranks`, on different ranks, such
    as those of different pipeline stages.
    """

    names: tuple[str, ...]
    copies: tuple[str, ...]
    frozen: tuple[str, ...] = ()  # copies that require no gradient
    is_across_ranks: bool = False


@final
@dataclass(frozen=True, eq=False)
class ParityResult:
    """The comparisons of all tensors, and where the versions diverge."""

    comparisons: list[TensorComparison]
    reference: StepResult  # of the single device
    has_exact: bool = True  # the noise floor comes from double precision
    origins: list[Origin] = field(default_factory=list)
    types: Mapping[str, str] = field(default_factory=dict)  # classes of modules
    op: WrongOp | None = None  # at the first origin
    missing_elements: Mapping[str, str] = field(default_factory=dict)  # weights without a rank
    num_calls: int = 1  # of the model, on a rank
    num_cleared: int = 0  # times that a rank cleared gradients before another backward
    broken_ties: Sequence[BrokenTie] = ()
    index: int = 0  # of the first step that differs, which all other fields are of
    ranks: Sequence[StepResult] = ()
    steps: Sequence[list[TensorComparison]] = ()  # the comparisons of each step
    is_training: bool = False  # the steps are training steps
    previous: StepResult | None = None  # the single device's step before that
    # What each backward pass adds to the gradients, of the single device or of all ranks together.
    contributions: Sequence[Mapping[str, torch.Tensor]] = ()
    collectives: Collectives = ()  # of ranks that are threads

    def find_source(self, kind: TensorKind, name: str) -> Source | None:
        """The line of the ranks that computes or reads a number; None if it is not known."""
        sources = (rank.training.sources.get((kind, name)) for rank in self.ranks)
        return next((source for source in sources if source is not None), None)

    def find_collective(
        self, comparison: TensorComparison, phase: Phase | None = None
    ) -> Source | None:
        """The line of the collective that computed what ranks have of a tensor, if there is one."""
        return find_line(comparison.case.ranks, self.collectives, phase)


def is_within(module: str, outer: str) -> bool:
    """Whether a module, or a name in it, is `outer` or inside it."""
    return not outer or module == outer or module.startswith(f"{outer}.")
