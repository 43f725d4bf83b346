"""One sharding of one call's inputs, dispatched and computed: what it comes to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, final

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from shardscope._torch.meshes import describe_placements
from shardscope._torch.propagation import Decision, Place
from shardscope.record import Move, Verdict
from shardscope.shard.dispatch import Dispatcher, Outcome
from shardscope.shard.numbers import Answer, Checker, Numbers
from shardscope.shard.pieces import is_cuttable
from shardscope.shard.signature import Signature

__all__ = ["Trial", "Tryer", "lay_out", "possible_shardings"]

Places = Mapping[tuple[int, ...], Place]


class Trial(NamedTuple):
    """What came of one sharding; `unchecked` says why the numbers were not compared.

    `num_tried` is how many layouts of its parts DTensor tried first.
    `is_unknown` says that DTensor does not know the op, or `failed_op`, a part of it, however it
    is sharded. `is_stopped` says that it tried too many: the verdict is none.
    """

    call: Signature
    verdict: Verdict
    moves: tuple[Move, ...] = ()
    outputs: tuple[str, ...] = ()
    detail: str = ""
    num_bytes: int | None = None  # that this rank sends, for its inputs or by itself, if known
    unchecked: str = ""
    is_unknown: bool = False
    failed_op: Any = None
    num_tried: int = 0
    is_stopped: bool = False

    def inputs(self) -> tuple[str, ...]:
        """Inputs that are not whole: `mat2: Shard(0)`."""
        return tuple(
            f"{self.call.name_argument(place)}: {', '.join(_describe(spec.placements))}"
            for place, spec in self.call.tensors()
            if spec.placements and not all(isinstance(one, Replicate) for one in spec.placements)
        )

    def name_inputs(self) -> str:
        """The same in words."""
        return " and ".join(one.replace(": ", " as ") for one in self.inputs()) or "its inputs"


def possible_shardings(call: Signature, mesh: DeviceMesh) -> Iterator[Signature]:
    """The call with each dim of each input sharded over each axis, all other inputs whole.

    Axes of the same size are one. A dim with fewer entries than ranks is not worth sharding.
    """
    axes = mesh.shape
    whole = tuple(Replicate() for _ in axes)
    for axis in sorted({size: index for index, size in reversed(list(enumerate(axes)))}.values()):
        for sharded, spec in call.tensors():
            for dim, size in enumerate(spec.shape):
                if size >= max(2, axes[axis]):
                    place = (*whole[:axis], Shard(dim), *whole[axis + 1 :])
                    yield lay_out(call, mesh, {sharded: place})


def lay_out(call: Signature, mesh: DeviceMesh, places: Places = MappingProxyType({})) -> Signature:
    """The call with its tensors on `mesh` as `places` say, or else whole on every rank."""
    whole = tuple(Replicate() for _ in mesh.shape)
    return call.change(
        lambda place, spec: spec._replace(placements=places.get(place, whole), mesh=mesh)
    )


@final
class Tryer:
    """Tries calls whose tensors have placements."""

    def __init__(self, dispatcher: Dispatcher, checker: Checker) -> None:
        self._dispatcher = dispatcher
        self._checker = checker

    def attempt(self, call: Signature) -> Trial:
        """Dispatch the call and, if that goes well, compute it."""
        outcome = self._dispatcher.dispatch(call)
        if outcome.error:
            return Trial(
                call,
                Verdict.MISSING,
                detail=outcome.error,
                is_unknown=outcome.is_unknown,
                failed_op=outcome.failed_op,
                num_tried=outcome.num_tried,
                is_stopped=outcome.is_stopped,
            )
        outputs = tuple(", ".join(_describe(place)) for place in outcome.outputs)
        moves = tuple(_read_moves(call, outcome))
        if outcome.absurdity:
            return Trial(call, Verdict.WRONG, moves, outputs, outcome.absurdity)
        numbers = self._check(call, outcome)
        if numbers.answer is Answer.WRONG:
            return Trial(call, Verdict.WRONG, moves, outputs, numbers.detail, outcome.num_bytes)
        verdict, detail = _judge(call, outcome)
        if outcome.is_unfinished:
            detail = detail or "this was decided without running it; what it sends is not known"
        unchecked = numbers.detail if numbers.answer is Answer.UNKNOWN else ""
        num_bytes = None if outcome.is_unfinished else outcome.num_bytes
        trial = Trial(call, verdict, moves, outputs, detail, num_bytes, unchecked)
        return trial._replace(num_tried=outcome.num_tried)

    def _check(self, call: Signature, outcome: Outcome) -> Numbers:
        if outcome.is_handled:
            return Numbers(Answer.UNKNOWN, "a context such as loss_parallel() replaces it")
        if outcome.is_unfinished:
            return Numbers(Answer.UNKNOWN, "it reads values, and was tested without data")
        return self._checker.check(_as_moved(call, outcome), outcome.outputs)


def _judge(call: Signature, outcome: Outcome) -> tuple[Verdict, str]:
    own = [one for one in outcome.decisions if one.op == call.op]
    if outcome.num_bytes:
        after = _after(call, own[0]) if own else {}
        is_whole = bool(after) and all(
            isinstance(one, Replicate) for place in after.values() for one in place
        )
        detail = "" if any(one.moves for one in outcome.decisions) else "it communicates by itself"
        return (Verdict.REPLICATED if is_whole else Verdict.REDISTRIBUTED), detail
    if own and own[0].num_tried:
        return Verdict.DECOMPOSED, "its rule follows from the ops it decomposes into"
    if own or not outcome.decisions:
        return Verdict.SHARDED, ""
    parts = dict.fromkeys(str(one.op) for one in outcome.decisions)
    return Verdict.DECOMPOSED, "runs as " + ", ".join(parts)


def _after(call: Signature, decision: Decision) -> dict[tuple[int, ...], Place]:
    """Where each input lies when the op runs."""
    moves = decision.moves if decision.is_moved else {}
    return {
        place: moves[place][1] if place in moves else spec.placements
        for place, spec in call.tensors()
        if spec.placements is not None
    }


def _as_moved(call: Signature, outcome: Outcome) -> Signature:
    """The call as it is made once its inputs have been moved.

    On smaller inputs DTensor might choose to move others, and this choice is to be checked.
    """
    if len(outcome.decisions) != 1 or outcome.decisions[0].op != call.op:
        return call
    after = _after(call, outcome.decisions[0])
    if not all(is_cuttable(one) for place in after.values() for one in place):
        return call
    return call.change(lambda place, spec: spec._replace(placements=after.get(place)))


def _read_moves(call: Signature, outcome: Outcome) -> Iterator[Move]:
    moves = [
        (one.op, place, *ends)
        for one in outcome.decisions
        for place, ends in one.moves.items()
        if one.is_moved
    ]
    alike = Counter((before, after) for _, _, before, after in moves)
    sent: dict[tuple[Place | None, Place | None], list[int]] = defaultdict(list)
    for before, after, size in outcome.sent:
        sent[before, after].append(size)
    for op, place, before, after in moves:
        # Inputs that make the same move do so one after the other.
        sizes = sent[before, after]
        share = len(sizes) // alike[before, after]
        own, sent[before, after] = sizes[:share], sizes[share:]
        alike[before, after] -= 1
        argument = call._replace(op=op).name_argument(place)
        yield Move(
            argument=argument if op == call.op else f"{op} {argument}",
            before=_describe(before),
            after=_describe(after),
            num_bytes=sum(own),
        )


def _describe(place: Place | None) -> tuple[str, ...]:
    return () if place is None else describe_placements(place)
