"""Follows on which ranks a tensor has the same values, through ops and collectives.

A rank computes with data and random numbers of its own. What it computes from them may be different
on every rank, until a collective makes it equal on the ranks of its group: so a decision that
depends on an all-reduced value is the same on all of them. Followed by storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shardscope._torch.collectives.events import CollectiveEvent
from shardscope._torch.collectives.schema import OPS, tensors_in
from shardscope._torch.dispatch import READ_VALUE, TorchDispatchMode, disable_dispatch_modes
from shardscope._torch.process_groups.host_data import ValueObserver
from shardscope._torch.storage import is_wrapper_type, plain_tensors
from shardscope._torch.tree import leaves
from shardscope.record import CollectiveKind

DATA, RANDOM = "data", "random"
"""Where values come from that may be different on each rank: its data, its random numbers."""

_aten = torch.ops.aten
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}
_MAX_SOURCES = 8  # that are kept apart
_K = CollectiveKind
_EQUALIZING = (_K.ALL_REDUCE, _K.ALL_GATHER, _K.BROADCAST)
"""Collectives after which all ranks of the group have the same."""


class Sharing(NamedTuple):
    """The ranks that have the same values, as far as this rank's own `sources` are concerned.

    `ranks` is None if the values come from no source that differs from rank to rank. A source is
    `DATA`, `RANDOM`, or the label of a batch, which other ranks may have, too.
    """

    ranks: frozenset[int] | None = None
    sources: frozenset[str] = frozenset()

    def joined(self, other: Sharing) -> Sharing:
        """The sharing of what is computed from both."""
        if other.ranks is None or other is self:
            return self
        if self.ranks is None:
            return other
        if self.ranks < other.ranks or other.ranks < self.ranks:  # fewer ranks have both
            return self if self.ranks < other.ranks else other
        sources = self.sources | other.sources
        if len(sources) > _MAX_SOURCES:
            sources = frozenset((DATA, *sources & {RANDOM}))
        return Sharing(self.ranks & other.ranks, sources)


SAME = Sharing()
"""Of constants: the same values on all ranks."""


@final
class SharingTracker:
    """The sharing of the storages of one rank.

    Tensors that no op has made are data, if they have values; parameters without data are taken to
    be the same on all ranks. `note_source(kind, tensor)` is called for each tensor that is data or
    drawn at random, so that ranks that have the same data can be recognized.
    """

    def __init__(
        self, rank: int, note_source: Callable[[str, torch.Tensor], None] = lambda *_: None
    ) -> None:
        self._rank = rank
        self._note_source = note_source
        self._known: dict[int, tuple[StorageWeakRef, Sharing]] = {}

    def find(self, tensor: torch.Tensor) -> Sharing:
        """The sharing of a tensor's values."""
        sharing = SAME
        for plain in plain_tensors(tensor):
            sharing = sharing.joined(self._find_plain(plain))
        return sharing

    def note_op(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note the results of an op, and what it has overwritten."""
        inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        schema = op._schema
        is_mutable = schema.is_mutable
        namespace, _, name = schema.name.partition("::")
        if name in OPS.get(namespace, ()):
            return  # a collective, of which `note_collective` is called
        sources = inputs
        if is_mutable and name in _OVERWRITES:
            sources = _others(args, inputs)
        sharing = SAME
        for tensor in sources:
            sharing = sharing.joined(self.find(tensor))
        outputs = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in op.tags
        if is_random and not is_mutable:  # in place, weights are initialized
            sharing = Sharing(frozenset((self._rank,)), sharing.sources | {RANDOM})
            for tensor in outputs:
                self._note_source(RANDOM, tensor)
        if is_mutable:
            for tensor in _list_written(schema, args, kwargs):
                self._write(tensor, sharing, is_all=name in _OVERWRITES)
        for tensor in outputs:
            if not any(tensor is known for known in inputs):
                self._write(tensor, sharing, is_all=not schema.is_mutable and not _is_view(op))

    def note_data(self, tensor: torch.Tensor, label: str) -> None:
        """Note a tensor that holds data of this rank: its part of the batch with this label."""
        self._write(tensor, Sharing(frozenset((self._rank,)), frozenset((label,))), is_all=True)
        self._note_source(DATA, tensor)

    def note_collective(self, event: CollectiveEvent, result: Any) -> None:
        """Note what a collective has made equal, or different, on the ranks of its group."""
        call = event.read()
        outputs = call.outputs
        if outputs is None:
            outputs = call.inputs if event.op.startswith("c10d.") else tensors_in(result)
        members = frozenset(torch.distributed.get_process_group_ranks(call.group))
        for index, output in enumerate(outputs):
            source = call.inputs[index % len(call.inputs)] if call.inputs else None
            before = SAME if source is None else self.find(source)
            if call.kind in _EQUALIZING:
                after = self._spread(before, members)
            else:
                after = Sharing(frozenset((self._rank,)), before.sources | {DATA})
            self._write(output, after, is_all=True)

    def _spread(self, before: Sharing, members: frozenset[int]) -> Sharing:
        """The ranks that have the same after a collective: each member's as many as ours were."""
        if before.ranks is None:
            return before
        offsets = [rank - self._rank for rank in before.ranks]
        ranks = frozenset(member + offset for member in members for offset in offsets)
        return Sharing(ranks, before.sources)

    def _find_plain(self, tensor: torch.Tensor) -> Sharing:
        storage = _storage_of(tensor)
        if storage is None:
            return SAME
        known = self._known.get(storage._cdata)
        if known is not None and not known[0].expired():
            return known[1]
        sharing = SAME
        if type(tensor) is torch.Tensor and not tensor.is_meta:
            sharing = Sharing(frozenset((self._rank,)), frozenset((DATA,)))
            self._note_source(DATA, tensor)
        self._known[storage._cdata] = (StorageWeakRef(storage), sharing)
        return sharing

    def _write(self, tensor: torch.Tensor, sharing: Sharing, *, is_all: bool) -> None:
        for plain in plain_tensors(tensor):
            storage = _storage_of(plain)
            if storage is None:
                continue
            reference, before = self._known.get(storage._cdata, (None, SAME))
            if reference is None or reference.expired():
                reference, before = StorageWeakRef(storage), SAME
            covers = plain.numel() * plain.element_size() >= storage.nbytes()
            after = sharing if is_all and covers else before.joined(sharing)
            self._known[storage._cdata] = (reference, after)


def _storage_of(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a sparse tensor
        return None


def _is_view(op: Any) -> bool:
    return any(returned.alias_info is not None for returned in op._schema.returns)


def _others(args: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that an op reads which overwrites its first argument."""
    written = {id(leaf) for leaf in leaves(args[0])} if args else set()
    return [tensor for tensor in inputs if id(tensor) not in written]


def _list_written(schema: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        for leaf in leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf


_SELECTIONS = {
    "nonzero": "nonzero()",
    "masked_select": "masked_select()",
    "index": "indexing with a mask",
    "_unique": "unique()",
    "_unique2": "unique()",
    "unique_consecutive": "unique_consecutive()",
    "unique_dim": "unique()",
}
SOME = 0.5
"""What an observer is asked of an op that selects elements: as many as the values say."""


@final
class ValueMode(TorchDispatchMode):
    """Tells an observer of every op on tensors with data, and lets it decide what a program reads.

    Of an op that selects elements it gets the tensor that says which, and `SOME`: it returns that,
    0 for none or 1 for all.
    """

    def __init__(self, observer: ValueObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper_type, types)):
            return NotImplemented  # its ops on the tensors inside come here
        kwargs = kwargs or {}
        name = op._schema.name.partition("::")[2] if hasattr(op, "_schema") else ""
        selecting = _find_mask(name, args)
        share = SOME
        if selecting is not None:
            share = self._observer.choose(_SELECTIONS[name], selecting, SOME)
            if share != SOME and "unique" not in name:
                with disable_dispatch_modes():
                    selecting.fill_(share)
        result = op(*args, **kwargs)
        if op is READ_VALUE:
            return self._observer.choose("item()", args[0], result)
        if hasattr(op, "_schema"):
            with disable_dispatch_modes():
                if share != SOME and "unique" in name:
                    result = _select_values(result, args[0], share)
                self._observer.note_op(op, args, kwargs, result)
        return result


def _select_values(result: Any, tensor: torch.Tensor, share: float) -> Any:
    """The result of `unique` if all values of a tensor were the same, or all were different."""
    values = result[0] if isinstance(result, tuple) else result
    chosen = tensor.flatten().clone() if share else values[:1]
    return (chosen, *result[1:]) if isinstance(result, tuple) else chosen


def _find_mask(name: str, args: Any) -> torch.Tensor | None:
    """The tensor whose values decide how many rows the result of an op has."""
    if name in ("nonzero", "masked_select"):
        mask: torch.Tensor = args[name == "masked_select"]
        return mask
    if name == "index":
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        return masks[0] if masks else None
    if name in _SELECTIONS:
        tensor: torch.Tensor = args[0]
        return tensor
    return None
