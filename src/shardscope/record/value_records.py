"""Records of sampled values, which `trace(values=…)` takes, and of the comparison of two runs."""

from __future__ import annotations

from enum import StrEnum

from shardscope.record.base import Record
from shardscope.record.ranks import Natural, NumRanks, Rank, RankSpan


class ValueKind(StrEnum):
    """What a sampled tensor is to the training step, in the order in which a step is compared."""

    SETTING = "setting"  # of an optimizer, or of torch: a number
    WEIGHT = "weight"  # parameter, before the step
    INPUT = "input"  # of the model
    OUTPUT = "output"  # of a module call
    LOSS = "loss"  # that backward starts at
    OUTPUT_GRADIENT = "output_gradient"  # of the loss, by the output of a module call
    GRADIENT = "gradient"  # of a parameter, after it is reduced and before it is clipped
    CLIPPED = "clipped"  # gradient, as the optimizer gets it
    BUFFER = "buffer"  # after the step
    UPDATED = "updated"  # parameter, after the step


class ValueSample(Record, frozen=True, kw_only=True, gc=False):
    """Statistics of one tensor on one rank, in one training step.

    They are of the rank's local tensor, of shape `local_shape`. Of a DTensor, `axes` are those of
    its mesh, whose lowest rank is `mesh_rank`, and `coordinate` is this rank's. `name` is that of
    the module or parameter, and `path` the position among its tensors, if there are several. `call`
    counts the calls of the module in this step, from 0. `order` is the position among all samples
    of this rank. `num_nonfinite` counts values that are NaN or infinite; on a GPU it is 1 if there
    are any. `hash` depends on each bit and its position; it is empty for a number that was not
    read from a tensor. Sums are None where they are not finite, or have no meaning.
    """

    rank: Rank
    step: Natural  # from 1
    order: Natural
    kind: ValueKind
    name: str
    path: str = ""
    call: Natural = 0
    dtype: str = ""
    shape: tuple[Natural, ...] = ()
    local_shape: tuple[Natural, ...] = ()
    axes: tuple[str, ...] = ()
    coordinate: tuple[Natural, ...] = ()
    placements: tuple[str, ...] = ()
    mesh_rank: Rank | None = None
    sum: float | None = None
    sum_squares: float | None = None
    max_abs: float | None = None
    num_nonfinite: Natural = 0
    hash: str = ""


class RunDeviation(Record, frozen=True, kw_only=True, gc=False):
    """A tensor that deviates between two runs, or ranks that hold different copies of it.

    `norm_a` and `norm_b` are the Euclidean norms of the full tensor in each run, `sum_a` and
    `sum_b` the sums of its elements; None where the layout does not tell. `deviation` is relative
    to the norm, and `limit` is what rounding explains. `ratio` is the tensor in run B divided by
    that in run A, if one factor explains both figures. `ranks` of the run `disagreeing_run`, A or
    B, have another copy than the other ranks. `suspect` is an earlier module whose output is what
    is wrong.
    """

    step: Natural
    kind: ValueKind
    name: str
    path: str = ""
    call: Natural = 0
    dtype: str = ""
    num_elements: Natural = 0
    norm_a: float | None = None
    norm_b: float | None = None
    sum_a: float | None = None
    sum_b: float | None = None
    deviation: float | None = None
    limit: float | None = None
    ratio: float | None = None
    detail: str = ""
    ranks: tuple[RankSpan, ...] = ()
    disagreeing_run: str = ""
    suspect: str = ""


class RunComparison(Record, frozen=True, kw_only=True, gc=False):
    """The comparison of two runs by the values that both sampled.

    `deviations` are in the order of execution; the first is where the runs diverge. `num_equal` of
    the `num_compared` tensors are equal bit for bit on all ranks, which only two runs of the same
    layout can show. `incomparable` is why the comparison stopped early; empty if it did not.
    """

    run_a: str
    run_b: str
    world_size_a: NumRanks
    world_size_b: NumRanks
    steps: tuple[Natural, ...] = ()
    num_compared: Natural = 0
    num_equal: Natural = 0
    num_deviating: Natural = 0
    deviations: tuple[RunDeviation, ...] = ()
    agreed: tuple[str, ...] = ()  # what agrees before the first deviation, a sentence each
    incomparable: str = ""
