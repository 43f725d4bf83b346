"""The first op in a module whose result differs, of those that both versions call."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, final

import torch
from torch import nn

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.dispatch import TorchDispatchMode, is_overload, op_packet, op_schema
from shardscope.comm.stack import read_stack
from shardscope.numerics.noise import is_inexact
from shardscope.numerics.widen import name_arguments
from shardscope.parallel.parity.cases import Runs, cases
from shardscope.parallel.parity.judge import Judged, judge
from shardscope.parallel.parity.names import OriginalNames
from shardscope.parallel.parity.outcome import Outcome, named_tensors
from shardscope.parallel.parity.probe import Role, Spot, copy_full
from shardscope.record import TOLERABLE, Agreement, Phase, Source

__all__ = ["OpProbe", "WrongOp", "find_op"]

# Ops that move values without changing them are called more often, or less, on shards.
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_MOVES = _ALLOCATIONS | {
    *("_to_copy", "_unsafe_view", "alias", "as_strided", "chunk", "clone", "contiguous", "copy_"),
    *("detach", "expand", "lift_fresh", "permute", "reshape", "select", "slice", "split"),
    *("squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
}
_WRONG = (Agreement.DIFFERS, Agreement.RANKS_DISAGREE, Agreement.NONFINITE)


@final
@dataclass(frozen=True, eq=False)
class WrongOp:
    """An op, the user's line that calls it on the ranks, and what it takes and returns there.

    `changed` has its arguments that are other numbers than the single device's, with both.
    """

    name: str
    source: Source | None
    inputs: tuple[Judged, ...] = ()
    outputs: tuple[Judged, ...] = ()
    changed: tuple[tuple[str, float, float], ...] = ()


@final
class OpProbe:
    """Records the full tensors that ops take and return in the code of one module.

    That of the original's modules that it calls is left out. `consumers` has for each op, by its
    number, those that take what it returns.
    """

    def __init__(self, module: str) -> None:
        self.seen: dict[str, torch.Tensor] = {}
        self.sources: dict[str, Source] = {}
        self.numbers: dict[str, dict[str, float]] = {}
        self.consumers: dict[int, set[int]] = {}
        self.num_calls = 0
        self._module = module
        self._num_ops = 0
        self._running: list[str] = []
        self._makers: dict[int | None, frozenset[int]] = {}  # of what memory holds, by its address
        self._unwritten: set[int | None] = set()  # addresses of memory that holds no values yet
        self._alive: list[torch.UntypedStorage] = []  # so that an address is not used again

    @contextmanager
    def watching(self, model: nn.Module, names: OriginalNames) -> Iterator[None]:
        """Record until the context ends."""
        handles = []
        known: set[int] = set()
        for name, module in names.modules(model):
            if name in names.places and id(module) not in known:
                known.add(id(module))
                handles.append(module.register_forward_pre_hook(self._make_entry(name)))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with _Ops(self):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()
            self._makers.clear()
            self._unwritten.clear()

    def _make_entry(self, name: str) -> Any:
        def enter(*_: Any) -> None:
            is_wrapped = bool(self._running) and self._running[-1] == name
            self._running.append(name)
            is_call = name == self._module and not is_wrapped and not is_in_backward()
            self.num_calls += is_call

        return enter

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op and record it, if it is in the module's code."""
        is_there = bool(self._running) and self._running[-1] == self._module
        if not is_there or not is_overload(func) or is_in_backward():
            return func(*args, **kwargs)
        arguments = dict(named_tensors([*args, kwargs] if kwargs else list(args)))
        makers = frozenset().union(
            *(self._makers.get(_address(tensor), ()) for tensor in arguments.values())
        )
        if _is_move(func):
            result = func(*args, **kwargs)
            self._remember(result, makers)
            if op_packet(func).__name__ in _ALLOCATIONS:
                self._unwritten.update(_address(tensor) for _, tensor in named_tensors(result))
                self._unwritten.discard(None)
            elif op_schema(func).is_mutable:
                self._unwritten.difference_update(map(_address, arguments.values()))
            return result
        spot = Spot(Phase.FORWARD, Role.INPUT, str(func), self._num_ops, "")
        self._num_ops += 1
        source = read_stack(sys._getframe(2)).source
        named = name_arguments(func, args, kwargs)
        self.numbers[spot.encode()] = {k: v for k, v in named.items() if isinstance(v, float)}
        written = {
            path: tensor
            for path, tensor in arguments.items()
            if _address(tensor) not in self._unwritten
        }
        self._record(spot, written, source)  # before the op can change them
        self._unwritten.difference_update(map(_address, arguments.values()))
        result = func(*args, **kwargs)
        self._record(spot._replace(role=Role.OUTPUT), dict(named_tensors(result)), source)
        for maker in makers:
            self.consumers.setdefault(maker, set()).add(spot.call)
        self._remember(result, frozenset({spot.call}))
        return result

    def _record(
        self, spot: Spot, tensors: Mapping[str, torch.Tensor], source: Source | None
    ) -> None:
        for path, tensor in tensors.items():
            name = spot._replace(path=path).encode()
            self.seen[name] = copy_full(tensor)
            if source is not None:
                self.sources[name] = source

    def _remember(self, result: Any, makers: frozenset[int]) -> None:
        for _, tensor in named_tensors(result):
            address = _address(tensor)
            if address is not None:
                self._makers[address] = makers
                self._alive.append(tensor.untyped_storage())


@final
class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self, probe: OpProbe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._probe = probe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._probe.run(func, args, kwargs or {})


def _address(tensor: torch.Tensor) -> int | None:
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
        return None  # a subclass has no memory of its own
    return tensor.untyped_storage().data_ptr()


def _is_move(func: Any) -> bool:
    return "c10d" in func.namespace or op_packet(func).__name__ in _MOVES


def find_op(
    runs: Runs,
    ranks: Sequence[Outcome],
    sizes: Sequence[int],
    consumers: Mapping[int, set[int]],
) -> WrongOp | None:
    """The first op that both call and whose result differs on the ranks, for good.

    A result may differ that is made right later, such as a partial sum: all `consumers` of it
    agree. Where no op's result differs, the first that the ranks call in place of another.
    """
    ours, theirs = _names(runs.reference), _names(ranks[0])
    matcher = SequenceMatcher(None, [name for name, _ in ours], [name for name, _ in theirs], False)
    pairs = {
        theirs[block.b + step][1]: ours[block.a + step][1]
        for block in matcher.get_matching_blocks()
        for step in range(block.size)
    }
    judged = _judge_ops(runs, ranks, sizes, pairs)
    number = _find_first_wrong(judged, consumers)
    if number is not None:
        own = next(theirs for theirs, ours in pairs.items() if ours == number)
        inputs, outputs = judged[number]
        changed = _find_changed(runs.reference, ranks[0], number, own)
        return _make_op(ranks[0], own, inputs=inputs, outputs=outputs, changed=changed)
    for tag, ours_at, _, theirs_at, _ in matcher.get_opcodes():
        if tag == "replace":
            number, own = ours[ours_at][1], theirs[theirs_at][1]
            _, outputs = _judge_ops(runs, ranks, sizes, {own: number}).get(number, ([], []))
            return _make_op(ranks[0], own, outputs=outputs)
    return None


def _make_op(
    rank: Outcome,
    number: int,
    *,
    inputs: Sequence[Judged] = (),
    outputs: Sequence[Judged] = (),
    changed: Sequence[tuple[str, float, float]] = (),
) -> WrongOp:
    name = next(name for name in rank.seen if Spot.decode(name).call == number)
    source = rank.sources.get(name)
    return WrongOp(Spot.decode(name).module, source, tuple(inputs), tuple(outputs), tuple(changed))


def _find_changed(
    single: Outcome, rank: Outcome, number: int, own: int
) -> list[tuple[str, float, float]]:
    """The numbers that an op is called with on the ranks, where they are not the single's."""

    def choose(outcome: Outcome, call: int) -> Mapping[str, float]:
        names = (name for name in outcome.numbers if Spot.decode(name).call == call)
        return outcome.numbers.get(next(names, ""), {})

    theirs, ours = choose(rank, own), choose(single, number)
    return [
        (name, ours[name], value)
        for name, value in theirs.items()
        if name in ours and not math.isclose(value, ours[name], rel_tol=1e-9)
    ]


def _names(outcome: Outcome) -> list[tuple[str, int]]:
    """Ops with their numbers."""
    spots = (Spot.decode(name) for name in outcome.seen)
    return list(dict.fromkeys((spot.module, spot.call) for spot in spots))


def _judge_ops(
    runs: Runs, ranks: Sequence[Outcome], sizes: Sequence[int], pairs: Mapping[int, int]
) -> dict[int, tuple[list[Judged], list[Judged]]]:
    """The inputs and the outputs, judged, of each op by its number on the single device."""
    renumbered = [_renumber(rank, pairs) for rank in ranks]
    singles = Runs(
        _renumber(runs.reference),
        None if runs.exact is None else _renumber(runs.exact),
        tuple((_renumber(a), None if b is None else _renumber(b)) for a, b in runs.jittered),
    )
    judged: dict[int, tuple[list[Judged], list[Judged]]] = {}
    for case in cases(singles, renumbered, sizes):
        spot = Spot.decode(case.name)
        if case.reference is not None and None not in case.ranks:
            role = 0 if spot.role is Role.INPUT else 1
            judged.setdefault(spot.call, ([], []))[role].append(judge(case))
    return judged


def _find_first_wrong(
    judged: Mapping[int, tuple[list[Judged], list[Judged]]], consumers: Mapping[int, set[int]]
) -> int | None:
    agreements = {
        number: {output.verdict.agreement for output in outputs}
        for number, (inputs, outputs) in judged.items()
        if _is_comparable(inputs, outputs)
    }
    is_right: dict[int, bool] = {}  # or made right by all that take it
    for number in sorted(agreements, reverse=True):
        takers = [is_right[taker] for taker in consumers.get(number, ()) if taker in is_right]
        is_fine = bool(agreements[number]) and agreements[number] <= TOLERABLE
        is_right[number] = is_fine or (bool(takers) and all(takers))
    for number in sorted(agreements):
        if agreements[number].intersection(_WRONG) and not is_right[number]:
            return number
    return None


def _is_comparable(inputs: Sequence[Judged], outputs: Sequence[Judged]) -> bool:
    """Whether an op is the same in both versions, and its result may be wrong.

    Ops that take tensors of unrelated shapes are not the same. Integers that are computed from a
    shard, such as those of nonzero or argsort, count within it.
    """
    is_alike = all(taken.verdict.agreement is not Agreement.RESHAPED for taken in inputs)
    has_shards = any(taken.layout is not None for taken in inputs)
    is_counted = all(
        returned.case.reference is not None and not is_inexact(returned.case.reference)
        for returned in outputs
    )
    return is_alike and not (has_shards and is_counted)


def _renumber(outcome: Outcome, pairs: Mapping[int, int] | None = None) -> Outcome:
    outputs = []
    for name, tensor in outcome.seen.items():
        spot = Spot.decode(name)
        number = spot.call if pairs is None else pairs.get(spot.call)
        if number is not None:
            outputs.append((spot._replace(module="", call=number).encode(), tensor))
    return Outcome(outputs, {}, {})
