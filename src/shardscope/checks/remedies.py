"""What to do about ranks that diverge, in torch's terms."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.checks.variations import PlannedVariation
from shardscope.launch.calls import NEW_GROUP
from shardscope.launch.decisions import ChangeKind, SiteKind
from shardscope.record import BucketReduce, Collective, CollectiveKind, FullyShard, Phase

_K, _S = ChangeKind, SiteKind
_OUTSIDE = (_S.CLOCK, _S.SIGNAL, _S.EXISTS, _S.OVERFLOW)  # what is not data
_DATA = (_S.BATCH, _S.INPUT, _S.ROWS)
_P2P = (CollectiveKind.SEND, CollectiveKind.RECV)
_AGREE = (
    "Let all ranks decide the same: all_reduce the flag with ReduceOp.MAX, or broadcast it from "
    "rank 0, before the branch."
)
_JOIN = (
    "Give every rank an equal number of batches (drop_last=True, DistributedSampler), run the loop "
    "in `with Join([model])`, or stop all ranks when one has no more (all_reduce of a flag)."
)
_BRANCH = (
    "Let all ranks decide the same (all_reduce the flag with ReduceOp.MAX, or broadcast it from "
    "rank 0, before the branch), or issue the collective on every rank, outside of the branch."
)
_EVERY_RANK = (
    "Call it on every rank of the group, outside of the branch, or use a group of the ranks that "
    "do call it; if the branch depends on a value, all_reduce or broadcast that first."
)
_SIZE = (
    "Pad to a common size, or exchange the sizes first (all_gather of the lengths), so that every "
    "rank passes tensors of the same shape and dtype."
)
_PAIR = (
    "Give each send one receive in the same order, and issue those that cross with "
    "batch_isend_irecv, or isend and irecv before waiting."
)
_NEW_GROUP = (
    "Call new_group with the same members in the same order on every rank of the world, also where "
    "the rank is no member, or pass use_local_synchronization=True."
)
_ORDER = "Issue the collectives of these groups in the same order on every rank."
_FAILURE = (
    "Let the exception end the rank (re-raise it), or all_reduce a flag of failure before any rank "
    "goes on."
)
_UNUSED = (
    "Let each rank run the same modules in the same order, with a dummy input whose result is "
    "multiplied by zero where there is nothing to compute; "
)
_SORTED = (
    "Issue these in the same order on every rank: collect the tensors first and sort them by name, "
    "with zeros where a rank has none."
)
_EQUALLY_OFTEN = (
    "Let every rank call its model equally often: all_reduce the number of calls with "
    "ReduceOp.MAX, and fill up with dummy inputs whose loss is multiplied by zero."
)
_UNREACHED = (
    "Run {owner} on every rank, with a dummy input whose result is multiplied by zero and added to "
    "the loss where there is nothing to compute, so that backward reaches its collectives."
)


def suggest_remedy(
    calls: Sequence[Collective],
    variation: PlannedVariation | None,
    *,
    has_ended: bool,
    is_early: bool,
) -> str:
    """The remedy for ranks that are in these calls, some of them at their end, under a variation.

    `is_early` says that those have taken fewer steps than the others.
    """
    kind = None if variation is None else variation.kind
    site = None if variation is None else variation.site.kind
    if kind is _K.RAISED or site is _S.FILE:
        return _FAILURE
    if any(call.op == NEW_GROUP for call in calls):
        return _NEW_GROUP
    if calls and all(call.kind in _P2P for call in calls):
        return _PAIR
    if kind is _K.END or (variation is None and is_early):
        return _JOIN
    if site in _OUTSIDE or is_early:
        return _AGREE if all(map(_is_of_module, calls)) else _BRANCH
    is_decision = variation is not None and site is _S.VALUE and not variation.is_in_model
    if calls and has_ended and site in _DATA and all(map(_is_of_model, calls)):
        return _EQUALLY_OFTEN
    if calls and all(map(_is_of_module, calls)) and not is_decision:
        return _suggest_for_modules(calls)
    if not has_ended and _differ_in_owner_only(calls):
        return _SORTED
    skipped = next((call for call in calls if call.owner and call.phase is Phase.BACKWARD), None)
    if skipped is not None and site in _DATA:
        return _UNREACHED.format(owner=skipped.owner)
    if not has_ended and len({call.group for call in calls}) > 1:
        return _ORDER
    if len(calls) > 1 and _differ_in_size_only(calls):
        return _SIZE
    return _EVERY_RANK if variation is None else _BRANCH


def _is_of_module(call: Collective) -> bool:
    """Whether FSDP or DDP issues it because a module runs."""
    return isinstance(call.cause, FullyShard | BucketReduce)


def _is_of_model(call: Collective) -> bool:
    """Whether FSDP issues it because an entire model runs."""
    owner = call.owner
    is_root = owner == "" or (owner is not None and "." not in owner and owner[:1].isupper())
    return is_root and isinstance(call.cause, FullyShard)


def _suggest_for_modules(calls: Sequence[Collective]) -> str:
    """The remedy for modules that run on some ranks only."""
    if any(isinstance(call.cause, BucketReduce) for call in calls):
        return (
            "Pass find_unused_parameters=True to DistributedDataParallel, or use all of the "
            "parameters on every rank."
        )
    owners = [call.owner or "the module" for call in calls]
    return (
        f"{_UNUSED}if only its gradients are missing, call "
        f"set_reduce_scatter_unused_params(True) of the sharded {owners[0]} (torch 2.13)."
    )


def _differ_in_owner_only(calls: Sequence[Collective]) -> bool:
    """Whether ranks are at the same line, as a hook has, for different modules."""
    places = {(call.kind, call.group, call.source) for call in calls}
    return len(places) == 1 and len({call.owner for call in calls}) > 1


def _differ_in_size_only(calls: Sequence[Collective]) -> bool:
    first = calls[0]
    return all(
        (call.kind, call.group, call.source) == (first.kind, first.group, first.source)
        for call in calls
    )
