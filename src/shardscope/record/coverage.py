"""Records of `coverage`: which ops of a model can run sharded, what each costs, and remedies."""

from __future__ import annotations

from enum import StrEnum

from shardscope.record.base import Record
from shardscope.record.ranks import Natural, Rank
from shardscope.record.source import Axis, Source


class Level(StrEnum):
    """How far ops are decomposed: as torch.export returns them, or further.

    For backward, which torch.export does not return, `exported` has the ops that autograd calls.
    """

    EXPORTED = "exported"
    CORE_ATEN = "core_aten"
    INDUCTOR = "inductor"


class Verdict(StrEnum):
    """What happens to an op when its inputs are sharded."""

    LOCAL = "local"  # on each rank by itself: none of its inputs is sharded
    SHARDED = "sharded"  # by a rule, without communication
    REDISTRIBUTED = "redistributed"  # by a rule, after an input was redistributed
    DECOMPOSED = "decomposed"  # by the rules of the ops that it decomposes into
    REPLICATED = "replicated"  # only with every input replicated
    MISSING = "missing"  # it raises
    WRONG = "wrong"  # it runs and gives another result


class Move(Record, frozen=True, kw_only=True, gc=False):
    """An input that is redistributed before the op runs."""

    argument: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    num_bytes: Natural  # that this rank sends


class Sharding(Record, frozen=True, kw_only=True, gc=False):
    """One layout of an op's inputs, and its verdict.

    `inputs` has the placements, such as `mat2: Shard(0)`; without a plan only those of sharded
    inputs. `outputs` has those of the results, empty for a plain tensor.
    """

    inputs: tuple[str, ...]
    verdict: Verdict
    outputs: tuple[str, ...] = ()
    num_bytes: Natural | None = None  # that this rank sends, at the most; None if it is not known
    detail: str = ""


class OpCoverage(Record, frozen=True, kw_only=True, gc=False):
    """One op of a model, with the worst verdict of its calls."""

    op: str
    schema: str
    verdict: Verdict
    num_forward: Natural = 0
    num_backward: Natural = 0
    flops: Natural | None = None  # of all its calls; None where torch has no formula for it
    detail: str = ""
    remedy: str = ""
    moves: tuple[Move, ...] = ()
    shardings: tuple[Sharding, ...] = ()
    modules: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()


class Coverage(Record, frozen=True, kw_only=True, gc=False):
    """All ops of a model at one level, on one mesh.

    `has_plan` means that placements were given by the model or a plan; otherwise every sharding of
    one input at a time was tried.
    """

    rank: Rank
    level: Level
    axes: tuple[Axis, ...]
    has_plan: bool
    ops: tuple[OpCoverage, ...] = ()
