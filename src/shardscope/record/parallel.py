"""Records of `parallelize`: inserted collectives, fallbacks, placements and memory of each rank."""

from __future__ import annotations

from enum import StrEnum

from shardscope.record.base import Record
from shardscope.record.kinds import CollectiveKind
from shardscope.record.parity import TensorVerdict
from shardscope.record.ranks import Natural, RankSpan
from shardscope.record.source import Axis, Phase, Source


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
