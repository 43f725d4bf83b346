"""Tests an op call with each sharding of its inputs, and gives the call a verdict."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, final

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from shardscope._torch.dtensor import Decision, MeshPlacements
from shardscope._torch.mesh import describe_placements
from shardscope.record import Move, OpVerdict
from shardscope.shard.coverage.dispatch import MAX_TRIED, Dispatcher, DispatchResult
from shardscope.shard.coverage.numeric_check import Answer, Checker, Numbers
from shardscope.shard.coverage.op_calls import Signature
from shardscope.shard.coverage.small_mesh import can_be_sharded

PlacementsByArgument = Mapping[tuple[int, ...], MeshPlacements]


class ShardingAttempt(NamedTuple):
    """The result of testing one sharding of a call's inputs.

    `unchecked` says why the values were not compared. `num_tried` is how many placements of the
    op's decomposition DTensor tried first. `is_unknown` means that DTensor does not know the op, or
    `failed_op`, an op of its decomposition, however it is sharded. `is_stopped` means that it tried
    too many: then the verdict means nothing.
    """

    call: Signature
    verdict: OpVerdict
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
        """Inputs that are not replicated, with their placements: `mat2: Shard(0)`."""
        return tuple(
            f"{self.call.name_argument(index)}: {', '.join(_describe(spec.placements))}"
            for index, spec in self.call.tensors()
            if spec.placements
            and not all(isinstance(placement, Replicate) for placement in spec.placements)
        )

    def name_inputs(self) -> str:
        """Inputs that are not replicated, as part of a sentence: `mat2 as Shard(0)`."""
        return " and ".join(text.replace(": ", " as ") for text in self.inputs()) or "its inputs"


def possible_shardings(call: Signature, mesh: DeviceMesh) -> Iterator[Signature]:
    """The call with each dim of each input sharded over each axis, all other inputs replicated.

    Of axes of the same size only the first is tried. Dims smaller than the axis are not sharded.
    """
    axes = mesh.shape
    replicated = tuple(Replicate() for _ in axes)
    for axis in sorted({size: index for index, size in reversed(list(enumerate(axes)))}.values()):
        for sharded, spec in call.tensors():
            for dim, size in enumerate(spec.shape):
                if size >= max(2, axes[axis]):
                    placements = (*replicated[:axis], Shard(dim), *replicated[axis + 1 :])
                    yield lay_out(call, mesh, {sharded: placements})


def lay_out(
    call: Signature, mesh: DeviceMesh, placements: PlacementsByArgument = MappingProxyType({})
) -> Signature:
    """The call with its tensors on `mesh`, with the given placements or else replicated."""
    replicated = tuple(Replicate() for _ in mesh.shape)
    return call.change(
        lambda index, spec: spec._replace(placements=placements.get(index, replicated), mesh=mesh)
    )


@final
class ShardingTester:
    """Tests calls whose tensors have placements."""

    def __init__(self, dispatcher: Dispatcher, checker: Checker) -> None:
        self._dispatcher = dispatcher
        self._checker = checker

    def test(self, call: Signature) -> ShardingAttempt:
        """Dispatch the call and, if that succeeds, compute it and compare the values."""
        result = self._dispatcher.dispatch(call)
        if result.error:
            return ShardingAttempt(
                call,
                OpVerdict.MISSING,
                detail=result.error,
                is_unknown=result.is_unknown,
                failed_op=result.failed_op,
                num_tried=result.num_tried,
                is_stopped=result.is_stopped,
            )
        outputs = tuple(", ".join(_describe(placements)) for placements in result.outputs)
        moves = tuple(_read_moves(call, result))
        if result.invalid_placement:
            return ShardingAttempt(call, OpVerdict.WRONG, moves, outputs, result.invalid_placement)
        numeric_result = self._check(call, result)
        if numeric_result.answer is Answer.WRONG:
            return ShardingAttempt(
                call, OpVerdict.WRONG, moves, outputs, numeric_result.detail, result.num_bytes
            )
        verdict, detail = _judge(call, result)
        if result.is_unfinished:
            detail = detail or "this was decided without running it; what it sends is not known"
        unchecked = numeric_result.detail if numeric_result.answer is Answer.UNKNOWN else ""
        num_bytes = None if result.is_unfinished else result.num_bytes
        attempt = ShardingAttempt(call, verdict, moves, outputs, detail, num_bytes, unchecked)
        return attempt._replace(num_tried=result.num_tried)

    def _check(self, call: Signature, result: DispatchResult) -> Numbers:
        if result.is_handled:
            return Numbers(Answer.UNKNOWN, "a context such as loss_parallel() replaces it")
        if result.is_unfinished:
            return Numbers(Answer.UNKNOWN, "it reads values, and was tested without data")
        ops = [decision.op for decision in result.decisions]
        return self._checker.check(_as_moved(call, result), result.outputs, ops)


def _judge(call: Signature, result: DispatchResult) -> tuple[OpVerdict, str]:
    own = [decision for decision in result.decisions if decision.op == call.op]
    if result.num_bytes:
        placements_after = _after(call, own[0]) if own else {}
        is_replicated = bool(placements_after) and all(
            isinstance(decision, Replicate)
            for placements in placements_after.values()
            for decision in placements
        )
        detail = (
            ""
            if any(decision.moves for decision in result.decisions)
            else "it communicates by itself"
        )
        return (OpVerdict.REPLICATED if is_replicated else OpVerdict.REDISTRIBUTED), detail
    if own and own[0].num_tried:
        return OpVerdict.DECOMPOSED, "its rule follows from the ops it decomposes into"
    if own or not result.decisions:
        return OpVerdict.SHARDED, ""
    parts = dict.fromkeys(str(decision.op) for decision in result.decisions)
    return OpVerdict.DECOMPOSED, "runs as " + ", ".join(parts)


def _after(call: Signature, decision: Decision) -> dict[tuple[int, ...], MeshPlacements]:
    """The placements of each input when the op runs, after redistribution."""
    moves = decision.moves if decision.is_moved else {}
    return {
        index: moves[index][1] if index in moves else spec.placements
        for index, spec in call.tensors()
        if spec.placements is not None
    }


def _as_moved(call: Signature, result: DispatchResult) -> Signature:
    """The call with the placements that its inputs have after redistribution.

    With smaller inputs DTensor might redistribute differently, and this strategy is to be checked.
    """
    if len(result.decisions) != 1 or result.decisions[0].op != call.op:
        return call
    after = _after(call, result.decisions[0])
    if not all(
        can_be_sharded(placement) for placements in after.values() for placement in placements
    ):
        return call
    return call.change(lambda placements, spec: spec._replace(placements=after.get(placements)))


def _read_moves(call: Signature, result: DispatchResult) -> Iterator[Move]:
    moves = [
        (decision.op, index, *ends)
        for decision in result.decisions
        for index, ends in decision.moves.items()
        if decision.is_moved
    ]
    num_same = Counter((before, after) for _, _, before, after in moves)
    sent: dict[tuple[MeshPlacements | None, MeshPlacements | None], list[int]] = defaultdict(list)
    for before, after, size in result.sent:
        sent[before, after].append(size)
    for op, index, before, after in moves:
        # Inputs with the same reshard are redistributed one after the other.
        sizes = sent[before, after]
        share = len(sizes) // num_same[before, after]
        own, sent[before, after] = sizes[:share], sizes[share:]
        num_same[before, after] -= 1
        argument = call._replace(op=op).name_argument(index)
        yield Move(
            argument=argument if op == call.op else f"{op} {argument}",
            before=_describe(before),
            after=_describe(after),
            num_bytes=sum(own),
        )


def _describe(placements: MeshPlacements | None) -> tuple[str, ...]:
    return () if placements is None else describe_placements(placements)


# From the best to the worst.
BADNESS = {
    verdict: rank
    for rank, verdict in enumerate(
        (
            OpVerdict.LOCAL,
            OpVerdict.SHARDED,
            OpVerdict.DECOMPOSED,
            OpVerdict.REDISTRIBUTED,
            OpVerdict.REPLICATED,
            OpVerdict.MISSING,
            OpVerdict.WRONG,
        )
    )
}


class CallVerdict(NamedTuple):
    """The verdict on a call, the attempts it rests on, and how many shardings were not tested."""

    verdict: OpVerdict
    detail: str
    attempts: tuple[ShardingAttempt, ...]
    num_skipped: int = 0


@final
class Judge:
    """Gives each distinct call its verdict, once."""

    def __init__(self, tester: ShardingTester, mesh: DeviceMesh, *, has_plan: bool) -> None:
        self._tester = tester
        self._mesh = mesh
        self._judge: Callable[[Signature], CallVerdict] = (
            self._judge_as_placed if has_plan else self._judge_every_sharding
        )
        self._known: dict[Signature, CallVerdict] = {}

    def judge(self, call: Signature) -> CallVerdict:
        """The verdict on this call."""
        if call not in self._known:
            self._known[call] = self._judge(call)
        return self._known[call]

    def _judge_as_placed(self, call: Signature) -> CallVerdict:
        if all(spec.placements is None for _, spec in call.tensors()):
            return CallVerdict(OpVerdict.LOCAL, "its inputs are plain tensors, each rank's own", ())
        attempt = self._tester.test(call)
        if attempt.is_stopped:
            return _judge_without_sharding(self._test_replicated(call), [], num_skipped=1)
        if attempt.verdict in (OpVerdict.SHARDED, OpVerdict.DECOMPOSED) and not attempt.inputs():
            return CallVerdict(OpVerdict.LOCAL, "its inputs are replicated", (attempt,))
        return CallVerdict(attempt.verdict, attempt.detail, (attempt,))

    def _judge_every_sharding(self, call: Signature) -> CallVerdict:
        if not any(True for _ in call.tensors()):
            return CallVerdict(OpVerdict.LOCAL, "takes no tensors", ())
        attempts: list[ShardingAttempt] = []
        replicated_attempt: ShardingAttempt | None = None
        possible = list(possible_shardings(call, self._mesh))
        for sharded in possible:
            if sum(attempt.num_tried for attempt in attempts) > MAX_TRIED:
                break
            attempt = self._tester.test(sharded)
            if attempt.is_stopped:
                break
            attempts.append(attempt)
            if attempts[-1].is_unknown and replicated_attempt is None:
                replicated_attempt = self._test_replicated(call)
                if replicated_attempt.is_unknown:  # then no placement is known
                    break
        num_skipped = len(possible) - len(attempts)
        if all(attempt.verdict is OpVerdict.MISSING for attempt in attempts):
            if replicated_attempt is not None and replicated_attempt.is_unknown:
                num_skipped = 0
            return _judge_without_sharding(
                replicated_attempt or self._test_replicated(call), attempts, num_skipped
            )
        worst = max(attempts, key=lambda attempt: BADNESS[attempt.verdict])
        best = min(attempts, key=lambda attempt: BADNESS[attempt.verdict])
        chosen = worst if worst.verdict is OpVerdict.WRONG else best
        return CallVerdict(chosen.verdict, chosen.detail, tuple(attempts), num_skipped)

    def _test_replicated(self, call: Signature) -> ShardingAttempt:
        return self._tester.test(lay_out(call, self._mesh))


def _judge_without_sharding(
    replicated: ShardingAttempt, attempts: list[ShardingAttempt], num_skipped: int
) -> CallVerdict:
    """The verdict where no sharding works: by whether the op works on replicated inputs."""
    all_attempts = (*attempts, replicated)
    if replicated.verdict in (OpVerdict.MISSING, OpVerdict.WRONG):
        return CallVerdict(replicated.verdict, replicated.detail, all_attempts, num_skipped)
    if num_skipped:
        detail = f"DTensor finds no other placements among {MAX_TRIED:,} layouts of its parts"
        return CallVerdict(OpVerdict.REPLICATED, detail, all_attempts, num_skipped)
    if attempts:
        return CallVerdict(OpVerdict.REPLICATED, attempts[0].detail, all_attempts)
    return CallVerdict(OpVerdict.LOCAL, "no input has a dim to shard", all_attempts)
