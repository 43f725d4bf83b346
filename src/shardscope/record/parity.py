"""Whether a parallel version of a model computes what the single device does, tensor by tensor."""

from __future__ import annotations

from enum import StrEnum

from shardscope.record.base import Record
from shardscope.record.ranks import Natural, RankSpan
from shardscope.record.source import Axis, Phase, Source


class TensorKind(StrEnum):
    """What a compared tensor is to the model."""

    OUTPUT = "output"
    GRADIENT = "gradient"  # of a parameter, or of an input that asks for one
    BUFFER = "buffer"  # that the run changed
    PARAMETER = "parameter"  # before the run; listed where it is not the single device's


class Agreement(StrEnum):
    """How a tensor of the parallel version compares with the single device's."""

    EQUAL = "equal"  # bit for bit
    CLOSE = "close"  # as near to the exact result as the single device is
    ROUNDED = "rounded"  # further off, by the rounding of a lower precision alone
    RANDOM = "random"  # it agrees once nothing is drawn at random
    DIFFERS = "differs"
    RANKS_DISAGREE = "ranks_disagree"  # on a replicated tensor
    NONFINITE = "nonfinite"  # NaN or infinity in other places
    RESHAPED = "reshaped"  # another shape
    MISSING = "missing"  # only the single device has it
    EXTRA = "extra"  # only the parallel version has it


FINE = frozenset({Agreement.EQUAL, Agreement.CLOSE})
"""The agreements of tensors that are the same but for noise."""
TOLERABLE = FINE | {Agreement.ROUNDED, Agreement.RANDOM}
"""The agreements of tensors that differ by noise, rounding or chance alone."""


class Suspect(StrEnum):
    """What probably made a tensor differ."""

    MISSING_REDUCTION = "missing_reduction"  # each rank has a partial sum, or sees its shard only
    DOUBLE_REDUCTION = "double_reduction"  # summed once too often
    SCALED = "scaled"  # by a constant other than a number of ranks, or one for each rank
    WRONG_SLICE = "wrong_slice"  # another rank's shard
    PERMUTED = "permuted"  # transposed, or its dims or shards in another order
    WRONG_GROUP = "wrong_group"  # reduced or gathered over other ranks than it should be
    WRONG_DIM = "wrong_dim"  # sharded or gathered along another dim than it should be
    BROKEN_TIE = "broken_tie"  # a tied parameter became several, without a common gradient
    RANDOMNESS = "randomness"  # drawn anew on each rank, or the same where it should differ
    ROUNDING = "rounding"  # a lower precision
    STALE = "stale"  # zero, cleared, unchanged, or without a gradient
    UNKNOWN = "unknown"


class TensorVerdict(Record, frozen=True, kw_only=True, gc=False):
    """The comparison of a tensor; errors are those of the rank with the largest error.

    `error` is the root mean square of the difference from the result in double precision, `noise`
    that of the single device, both relative to the root mean square of the result; None where
    numbers cannot be compared. `ratio` is the divisor of the tensor that fits best.
    """

    name: str
    kind: TensorKind
    agreement: Agreement
    shape: tuple[Natural, ...] = ()
    dtype: str = ""
    error: float | None = None
    noise: float | None = None
    max_error: float | None = None  # of any element, absolute
    worst_index: tuple[Natural, ...] | None = None
    ratio: float | None = None
    ranks: tuple[RankSpan, ...] = ()  # that differ
    suspect: Suspect | None = None
    detail: str = ""


class Divergence(Record, frozen=True, kw_only=True, gc=False):
    """The module in whose code the two versions diverge: its inputs agree, a result differs."""

    module: str
    phase: Phase
    suspect: Suspect
    detail: str
    type: str = ""  # the module's class
    op: str = ""  # the first op in it whose result differs, if one was found
    source: Source | None = None
    remedy: str = ""


class Parity(Record, frozen=True, kw_only=True, gc=False):
    """The comparison of all tensors of a model.

    `has_exact` says that the noise was measured with double precision; without it, the noise is the
    change of the single device's result when its weights are changed in the last place.
    """

    axes: tuple[Axis, ...]
    tensors: tuple[TensorVerdict, ...] = ()
    divergences: tuple[Divergence, ...] = ()
    num_compared_modules: Natural = 0
    is_in_processes: bool = False
    has_exact: bool = True
    has_backward: bool = True
