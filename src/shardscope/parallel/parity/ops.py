"""The first op in a module whose result differs, of those that both versions call."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, final

import torch
from torch import nn

from shardscope._torch.dispatch import TorchDispatchMode, is_overload, op_packet
from shardscope._torch.modules import named_places
from shardscope.comm.stack import read_stack
from shardscope.parallel.parity.cases import Runs, cases
from shardscope.parallel.parity.judge import judge
from shardscope.parallel.parity.outcome import Outcome, named_tensors
from shardscope.parallel.parity.probe import Spot, make_whole
from shardscope.record import FINE, Agreement, Phase, Source

__all__ = ["OpProbe", "WrongOp", "find_op"]

# What moves numbers without changing them is called more often, or less, on pieces.
# And memory that nobody has written yet holds anything.
_MOVES = {
    *("_to_copy", "_unsafe_view", "alias", "as_strided", "chunk", "clone", "contiguous", "copy_"),
    *("detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "new_empty"),
    *("new_empty_strided", "permute", "reshape", "select", "slice", "split", "squeeze", "t"),
    *("transpose", "unbind", "unsqueeze", "view"),
}
_WRONG = (Agreement.DIFFERS, Agreement.RANKS_DISAGREE, Agreement.NONFINITE)


@final
@dataclass(frozen=True)
class WrongOp:
    """An op, and the user's line that calls it on the ranks."""

    name: str
    source: Source | None


@final
class OpProbe:
    """Keeps what ops put out while one module runs, whole."""

    def __init__(self, module: str) -> None:
        self.seen: dict[str, torch.Tensor] = {}
        self.sources: dict[str, Source] = {}
        self._module = module
        self._num_ops = 0
        self._depth = 0

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Look, until the context ends."""
        module = next((one for name, one in named_places(model) if name == self._module), None)
        if module is None:
            yield
            return
        handles = (
            module.register_forward_pre_hook(lambda *_: self._step(1)),
            module.register_forward_hook(lambda *_: self._step(-1), always_call=True),
        )
        try:
            with _Ops(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _step(self, change: int) -> None:
        self._depth += change

    def look(self, func: Any, result: Any) -> None:
        """An op has put something out."""
        if not self._depth or not is_overload(func) or _is_move(func):
            return
        for path, tensor in named_tensors(result):
            name = Spot(Phase.FORWARD, str(func), self._num_ops, path).encode()
            self.seen[name] = make_whole(tensor)
            source = read_stack(sys._getframe(2)).source
            if source is not None:
                self.sources[name] = source
        self._num_ops += 1


@final
class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self, probe: OpProbe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._probe = probe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._probe.look(func, result)
        return result


def _is_move(func: Any) -> bool:
    return "c10d" in func.namespace or op_packet(func).__name__ in _MOVES


def find_op(runs: Runs, ranks: Sequence[Outcome], sizes: Sequence[int]) -> WrongOp | None:
    """The first op that both call and that gives something else on the ranks, for good.

    Where none of those does, the first that the ranks call in place of the single device's.
    """
    ours, theirs = _names(runs.reference), _names(ranks[0])
    matcher = SequenceMatcher(None, [one for one, _ in ours], [one for one, _ in theirs], False)
    pairs = {
        theirs[block.b + step][1]: ours[block.a + step][1]
        for block in matcher.get_matching_blocks()
        for step in range(block.size)
    }
    wrong = _first_wrong(runs, ranks, sizes, pairs)
    if wrong is None:
        replaced = (to for tag, _, _, to, _ in matcher.get_opcodes() if tag == "replace")
        index = next(replaced, None)
        wrong = None if index is None else theirs[index][1]
    if wrong is None:
        return None
    spot = next(name for name in ranks[0].seen if Spot.decode(name).call == wrong)
    return WrongOp(Spot.decode(spot).module, ranks[0].sources.get(spot))


def _names(outcome: Outcome) -> list[tuple[str, int]]:
    """Ops with their numbers."""
    spots = dict.fromkeys(
        (Spot.decode(name).module, Spot.decode(name).call) for name in outcome.seen
    )
    return list(spots)


def _first_wrong(
    runs: Runs, ranks: Sequence[Outcome], sizes: Sequence[int], pairs: dict[int, int]
) -> int | None:
    """The number of the first op, on the ranks, after which none gives the right result."""
    back = {ours: theirs for theirs, ours in pairs.items()}
    renamed = [_renumber(one, pairs) for one in ranks]
    singles = Runs(
        _renumber(runs.reference),
        None if runs.exact is None else _renumber(runs.exact),
        tuple((_renumber(a), None if b is None else _renumber(b)) for a, b in runs.jittered),
    )
    first: int | None = None
    for case in cases(singles, renamed, sizes):
        if case.reference is None or None in case.ranks:
            continue
        agreement = judge(case).verdict.agreement
        if agreement in FINE:
            first = None
        elif agreement in _WRONG and first is None:
            first = back[Spot.decode(case.name).call]
    return first


def _renumber(outcome: Outcome, pairs: dict[int, int] | None = None) -> Outcome:
    outputs = []
    for name, tensor in outcome.seen.items():
        spot = Spot.decode(name)
        if pairs is None:
            outputs.append((name, tensor))
        elif spot.call in pairs:
            outputs.append((spot._replace(call=pairs[spot.call]).encode(), tensor))
    return Outcome(outputs, {}, {})
