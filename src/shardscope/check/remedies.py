"""What to do about ranks that diverge, in torch's terms."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.check.variations import PlannedVariation
from shardscope.launch.decisions import ChangeKind, SiteKind
from shardscope.record import BucketReduce, Call, Collective, CollectiveKind, FullyShard

_K, _S = ChangeKind, SiteKind
_P2P = (CollectiveKind.SEND, CollectiveKind.RECV)
_AGREE = (
    "Let all ranks decide the same: all_reduce the flag with ReduceOp.MAX, or broadcast it from "
    "rank 0, before the branch."
)
_JOIN = (
    "Give every rank an equal number of batches (drop_last=True, DistributedSampler), run the loop "
    "in `with Join([model])`, or stop all ranks when one has no more (all_reduce of a flag)."
)
_EVERY_RANK = (
    "Call it on every rank of the group, outside of the branch, or use a group of the ranks that "
    "do call it."
)
_SIZE = (
    "Pad to a common size, or exchange the sizes first (all_gather of the lengths), so that every "
    "rank passes tensors of the same shape and dtype."
)
_PAIR = (
    "Give each send one receive in the same order, and issue those that cross with "
    "batch_isend_irecv, or isend and irecv before waiting."
)
_ORDER = "Issue the collectives of these groups in the same order on every rank."
_FAILURE = (
    "Let the exception end the rank (re-raise it), or all_reduce a flag of failure before any rank "
    "goes on."
)
_UNUSED = (
    "Run the module on every rank, with a dummy input whose result is multiplied by zero where "
    "there is nothing to compute; "
)


def suggest_remedy(
    calls: Sequence[Collective], variation: PlannedVariation | None, *, has_ended: bool
) -> str:
    """The remedy for ranks that are in these calls, some at their end, under a variation."""
    kind = None if variation is None else variation.kind
    site = None if variation is None else variation.site.kind
    if kind is _K.RAISED or site is _S.FILE:
        return _FAILURE
    if site in (_S.CLOCK, _S.SIGNAL, _S.EXISTS, _S.OVERFLOW):
        return _AGREE
    if any(call.kind in _P2P for call in calls):
        return _PAIR
    if kind is _K.END:
        return _JOIN
    module = _find_module(calls)
    if module is not None and not has_ended:
        return module
    if len(calls) > 1 and _differ_in_size_only(calls):
        return _SIZE
    if variation is not None:
        return _AGREE
    if has_ended:
        return _JOIN
    if len({call.group for call in calls}) > 1 and len(calls) > 1:
        return _ORDER
    return _EVERY_RANK


def _find_module(calls: Sequence[Collective]) -> str | None:
    """The remedy for a module that runs on some ranks only; None if there is none."""
    for call in calls:
        owner = call.owner or "the module"
        if isinstance(call.cause, FullyShard):
            return (
                f"{_UNUSED}if only its gradients are missing, call "
                f"set_reduce_scatter_unused_params(True) of the sharded {owner} (torch 2.13)."
            )
        if isinstance(call.cause, BucketReduce):
            return (
                "Pass find_unused_parameters=True to DistributedDataParallel, or use all of the "
                "parameters on every rank."
            )
    return None


def _differ_in_size_only(calls: Sequence[Collective]) -> bool:
    first = calls[0]
    return all(
        (call.kind, call.group) == (first.kind, first.group) and isinstance(call.cause, Call)
        for call in calls
    )
