"""Records of `parallelize` and `parity`: a parallel program, and how its results compare with
those of a single device.
"""

from __future__ import annotations

from enum import StrEnum

from shardscope.record.base import Axis, CollectiveKind, Phase, Record, Source
from shardscope.record.ranks import Natural, RankSpan


class TensorKind(StrEnum):
    """What a compared tensor is to the model."""

    OUTPUT = "output"
    LOSS = "loss"  # that backward starts at, of all micro-batches
    GRADIENT = "gradient"  # of a parameter, or of an input that asks for one; before clipping
    NORM = "norm"  # that gradients are clipped with
    CLIPPED = "clipped"  # gradient, as the optimizer gets it
    SETTING = "setting"  # of the optimizer, such as the learning rate
    STATE = "state"  # of the optimizer, after its step
    UPDATED = "updated"  # parameter, after the step
    BUFFER = "buffer"  # that the run changed
    MODE = "mode"  # whether a module trains or evaluates; listed where ranks are not in one mode
    REDRAWN = "redrawn"  # whether a module draws other numbers when backward calls it again
    COUNTER = "counter"  # a number among the attributes of a module, that the run changed
    REPORTED = "reported"  # a number that the step returns, or that the program reads
    PARAMETER = "parameter"  # before the run; listed where it is not the single device's


_OF_NO_MODULE = (
    TensorKind.OUTPUT,
    TensorKind.LOSS,
    TensorKind.NORM,
    TensorKind.SETTING,
    TensorKind.REPORTED,
)


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
    NORM = "norm"  # of gradients: shards not summed, or copies counted several times
    CLIPPING = "clipping"  # of gradients: on some ranks only, or by another factor
    OVERWRITTEN = "overwritten"  # by a reduction in place, and used afterwards
    LOST_HOOK = "lost_hook"  # of a parameter, which would have reduced its gradient
    OUT_OF_SYNC = "out_of_sync"  # a buffer or counter of which each rank has its own
    ROUNDING = "rounding"  # a lower precision
    STALE = "stale"  # zero, cleared, unchanged, or without a gradient
    UNKNOWN = "unknown"


class TensorVerdict(Record, frozen=True, kw_only=True, gc=False):
    """The comparison of a tensor; errors are those of the rank with the largest error.

    `error` is the root mean square of the difference from the result in double precision, `noise`
    that of the single device, both relative to the root mean square of the result; None where
    numbers cannot be compared. `ratio` is the divisor of the tensor that fits best. `step` is the
    training step, from 1; None if no training steps were run.
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
    step: Natural | None = None

    @property
    def module(self) -> str | None:
        """The module that the tensor belongs to; None for what a step computes outside them."""
        if self.kind in _OF_NO_MODULE:
            return None
        parameter = self.name.partition(" ")[0]  # optimizer state: `0.weight exp_avg`
        return parameter.rpartition(".")[0]


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


class FallbackKind(StrEnum):
    """What was done with an op that cannot run on its sharded inputs."""

    DECOMPOSITION = "decomposition"  # it was decomposed into ops that can
    REPLICATE = "replicate"  # its inputs were gathered, and every rank computes all of it


class PlacedKind(StrEnum):
    """What a tensor is to the program."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    OUTPUT = "output"
    MUTATION = "mutation"  # the new value of a buffer or an input


class Inserted(Record, frozen=True, kw_only=True, gc=False):
    """One collective that was inserted into a rank's program.

    `node` is its name there; in backward, the name of the value whose gradient it moves. `module`
    and `source` are where the value is used or, if the plan gives its placement, produced.
    """

    kind: CollectiveKind
    axis: str
    num_ranks: Natural
    size_bytes: Natural  # of this rank's input
    phase: Phase
    node: str
    module: str
    cause: str
    source: Source | None = None


class Fallback(Record, frozen=True, kw_only=True, gc=False):
    """An op that cannot run on inputs with these placements."""

    axis: str
    kind: FallbackKind
    op: str
    node: str
    module: str
    placements: tuple[str, ...]  # of its tensor arguments
    size_bytes: Natural  # moved because of it
    remedy: str
    source: Source | None = None


class Placed(Record, frozen=True, kw_only=True, gc=False):
    """The placements of a parameter, buffer, input or output; `local_shape` is the first rank's.

    Where sizes are symbolic (`is_open`), they are those that the program was exported with. `rules`
    are the patterns of the plan that match it, empty if none does.
    """

    name: str
    kind: PlacedKind
    shape: tuple[Natural, ...]
    local_shape: tuple[Natural, ...]
    dtype: str
    placements: tuple[str, ...]  # one for each axis: R, S(dim), P
    local_bytes: Natural
    rules: tuple[str, ...] = ()
    is_open: bool = False


class RankMemory(Record, frozen=True, kw_only=True, gc=False):
    """The memory of each of these ranks, in bytes of tensors; each storage counts once.

    `intermediate_bytes` is the peak of all other tensors, outputs included, and `peak_bytes` the
    peak of all tensors together, which may be less than the sum: gradients are computed one after
    the other.
    """

    ranks: tuple[RankSpan, ...]
    parameter_bytes: Natural
    buffer_bytes: Natural  # and constants
    input_bytes: Natural
    gradient_bytes: Natural
    intermediate_bytes: Natural
    peak_bytes: Natural
    peak_node: str = ""
    peak_module: str = ""


class Parallelization(Record, frozen=True, kw_only=True, gc=False):
    """A program that was partitioned for a mesh.

    `verdicts` compare all ranks with the single device; if that was not done, `unverified` has the
    reason. `inserted` has the collectives of one rank, in order; they are the same on all ranks.
    """

    program: str  # the class that it was exported from
    axes: tuple[Axis, ...]
    is_training: bool
    num_ops: Natural  # of the original
    inserted: tuple[Inserted, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    placed: tuple[Placed, ...] = ()
    rank_memory: tuple[RankMemory, ...] = ()
    verdicts: tuple[TensorVerdict, ...] = ()
    unverified: str = ""
