"""Finds the first op in a module whose result differs, of the ops that both versions call."""

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
from shardscope.attribution.call_sites import read_stack
from shardscope.numerics.fp64 import name_arguments
from shardscope.numerics.noise import is_inexact
from shardscope.parallel.equivalence.cases import Runs, cases
from shardscope.parallel.equivalence.compare import TensorComparison, compare_case
from shardscope.parallel.equivalence.result import StepResult, named_tensors
from shardscope.parallel.equivalence.step import OriginalNames
from shardscope.parallel.parity.probe import ProbePoint, Role, copy_full
from shardscope.record import TOLERABLE, Agreement, Phase, Source

# Ops that only move data; on shards, programs call more or fewer of them.
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_DATA_MOVEMENT = _ALLOCATIONS | {
    *("_to_copy", "_unsafe_view", "alias", "as_strided", "chunk", "clone", "contiguous", "copy_"),
    *("detach", "expand", "lift_fresh", "permute", "reshape", "select", "slice", "split"),
    *("squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
}
_WRONG = (Agreement.DIFFERS, Agreement.RANKS_DISAGREE, Agreement.NONFINITE)


@final
@dataclass(frozen=True, eq=False)
class WrongOp:
    """An op, the user's line that calls it on the ranks, and its compared inputs and outputs.

    `changed` lists arguments whose numbers differ: name, value on the single device, on the
    ranks.
    """

    name: str
    source: Source | None
    inputs: tuple[TensorComparison, ...] = ()
    outputs: tuple[TensorComparison, ...] = ()
    changed: tuple[tuple[str, float, float], ...] = ()


@final
class OpProbe:
    """Records the full tensors that ops take and return in the code of one module.

    Ops of the modules that it calls are left out. `consumers` maps the number of an op to the
    ops that take its result.
    """

    def __init__(self, module: str) -> None:
        self.snapshots: dict[str, torch.Tensor] = {}
        self.sources: dict[str, Source] = {}
        self.numbers: dict[str, dict[str, float]] = {}
        self.consumers: dict[int, set[int]] = {}
        self.num_calls = 0
        self._module = module
        self._num_ops = 0
        self._running: list[str] = []
        self._producers: dict[
            int | None, frozenset[int]
        ] = {}  # the ops behind a storage, by its address
        self._unwritten: set[int | None] = set()  # addresses of storage without values yet
        self._alive: list[
            torch.UntypedStorage
        ] = []  # keeps storages alive, so that an address is not reused

    @contextmanager
    def attached(self, model: nn.Module, names: OriginalNames) -> Iterator[None]:
        """Record until the context ends."""
        handles = []
        known: set[int] = set()
        for name, module in names.modules(model):
            if name in names.module_names and id(module) not in known:
                known.add(id(module))
                handles.append(module.register_forward_pre_hook(self._make_pre_hook(name)))
                handles.append(module.register_forward_hook(self._after_call, always_call=True))
        try:
            with _OpMode(self):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()
            self._producers.clear()
            self._unwritten.clear()

    def _make_pre_hook(self, name: str) -> Any:
        def enter(*_: Any) -> None:
            is_wrapped = bool(self._running) and self._running[-1] == name
            self._running.append(name)
            is_call = name == self._module and not is_wrapped and not is_in_backward()
            self.num_calls += is_call

        return enter

    def _after_call(self, *_: Any) -> None:
        self._running.pop()

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op, and record it if it is called in the module's own code."""
        is_there = bool(self._running) and self._running[-1] == self._module
        if not is_there or not is_overload(func) or is_in_backward():
            return func(*args, **kwargs)
        arguments = dict(named_tensors([*args, kwargs] if kwargs else list(args)))
        producers = frozenset().union(
            *(self._producers.get(_address(tensor), ()) for tensor in arguments.values())
        )
        if _is_data_movement(func):
            result = func(*args, **kwargs)
            self._remember(result, producers)
            if op_packet(func).__name__ in _ALLOCATIONS:
                self._unwritten.update(_address(tensor) for _, tensor in named_tensors(result))
                self._unwritten.discard(None)
            elif op_schema(func).is_mutable:
                self._unwritten.difference_update(map(_address, arguments.values()))
            return result
        point = ProbePoint(Phase.FORWARD, Role.INPUT, str(func), self._num_ops, "")
        self._num_ops += 1
        source = read_stack(sys._getframe(2)).source
        named = name_arguments(func, args, kwargs)
        self.numbers[point.encode()] = {k: v for k, v in named.items() if isinstance(v, float)}
        written = {
            path: tensor
            for path, tensor in arguments.items()
            if _address(tensor) not in self._unwritten
        }
        self._record(point, written, source)  # before the op can change them
        self._unwritten.difference_update(map(_address, arguments.values()))
        result = func(*args, **kwargs)
        self._record(point._replace(role=Role.OUTPUT), dict(named_tensors(result)), source)
        for producer in producers:
            self.consumers.setdefault(producer, set()).add(point.call)
        self._remember(result, frozenset({point.call}))
        return result

    def _record(
        self, point: ProbePoint, tensors: Mapping[str, torch.Tensor], source: Source | None
    ) -> None:
        for path, tensor in tensors.items():
            name = point._replace(path=path).encode()
            self.snapshots[name] = copy_full(tensor)
            if source is not None:
                self.sources[name] = source

    def _remember(self, result: Any, producers: frozenset[int]) -> None:
        for _, tensor in named_tensors(result):
            address = _address(tensor)
            if address is not None:
                self._producers[address] = producers
                self._alive.append(tensor.untyped_storage())


@final
class _OpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self, probe: OpProbe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._probe = probe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._probe.run(func, args, kwargs or {})


def _address(tensor: torch.Tensor) -> int | None:
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
        return None  # a subclass has no storage of its own
    return tensor.untyped_storage().data_ptr()


def _is_data_movement(func: Any) -> bool:
    return "c10d" in func.namespace or op_packet(func).__name__ in _DATA_MOVEMENT


def find_op(
    runs: Runs,
    ranks: Sequence[StepResult],
    sizes: Sequence[int],
    consumers: Mapping[int, set[int]],
) -> WrongOp | None:
    """The first op that both versions call and whose result differs on the ranks.

    A result may differ and be corrected later, such as a partial sum: then all its `consumers`
    agree. If no result differs, the first op that the ranks call in place of another.
    """
    single_ops, rank_ops = _names(runs.reference), _names(ranks[0])
    matcher = SequenceMatcher(
        None, [name for name, _ in single_ops], [name for name, _ in rank_ops], False
    )
    pairs = {
        rank_ops[block.b + step][1]: single_ops[block.a + step][1]
        for block in matcher.get_matching_blocks()
        for step in range(block.size)
    }
    comparisons = _compare_ops(runs, ranks, sizes, pairs)
    single_op_number = _find_first_wrong(comparisons, consumers)
    if single_op_number is not None:
        rank_op_number = next(
            rank_number
            for rank_number, single_number in pairs.items()
            if single_number == single_op_number
        )
        inputs, outputs = comparisons[single_op_number]
        changed = _find_changed(runs.reference, ranks[0], single_op_number, rank_op_number)
        return _make_op(ranks[0], rank_op_number, inputs=inputs, outputs=outputs, changed=changed)
    for tag, single_start, _, rank_start, _ in matcher.get_opcodes():
        if tag == "replace":
            single_op_number, rank_op_number = single_ops[single_start][1], rank_ops[rank_start][1]
            _, outputs = _compare_ops(runs, ranks, sizes, {rank_op_number: single_op_number}).get(
                single_op_number, ([], [])
            )
            return _make_op(ranks[0], rank_op_number, outputs=outputs)
    return None


def _make_op(
    rank: StepResult,
    number: int,
    *,
    inputs: Sequence[TensorComparison] = (),
    outputs: Sequence[TensorComparison] = (),
    changed: Sequence[tuple[str, float, float]] = (),
) -> WrongOp:
    name = next(name for name in rank.snapshots if ProbePoint.decode(name).call == number)
    source = rank.sources.get(name)
    return WrongOp(
        ProbePoint.decode(name).module, source, tuple(inputs), tuple(outputs), tuple(changed)
    )


def _find_changed(
    single: StepResult, rank: StepResult, single_op_number: int, rank_op_number: int
) -> list[tuple[str, float, float]]:
    """The numbers that an op is called with, where ranks and single device differ."""

    def choose(step_result: StepResult, call: int) -> Mapping[str, float]:
        names = (name for name in step_result.numbers if ProbePoint.decode(name).call == call)
        return step_result.numbers.get(next(names, ""), {})

    rank_numbers, single_numbers = choose(rank, rank_op_number), choose(single, single_op_number)
    return [
        (name, single_numbers[name], value)
        for name, value in rank_numbers.items()
        if name in single_numbers and not math.isclose(value, single_numbers[name], rel_tol=1e-9)
    ]


def _names(step_result: StepResult) -> list[tuple[str, int]]:
    """The ops as pairs of name and number."""
    points = (ProbePoint.decode(name) for name in step_result.snapshots)
    return list(dict.fromkeys((point.module, point.call) for point in points))


def _compare_ops(
    runs: Runs, ranks: Sequence[StepResult], sizes: Sequence[int], pairs: Mapping[int, int]
) -> dict[int, tuple[list[TensorComparison], list[TensorComparison]]]:
    """The compared inputs and outputs of each op, by its number on the single device."""
    renumbered = [_renumber(rank, pairs) for rank in ranks]
    singles = Runs(
        _renumber(runs.reference),
        None if runs.fp64 is None else _renumber(runs.fp64),
        tuple((_renumber(a), None if b is None else _renumber(b)) for a, b in runs.perturbed_runs),
    )
    comparisons: dict[int, tuple[list[TensorComparison], list[TensorComparison]]] = {}
    for case in cases(singles, renumbered, sizes):
        point = ProbePoint.decode(case.name)
        if case.reference is not None and None not in case.ranks:
            role = 0 if point.role is Role.INPUT else 1
            comparisons.setdefault(point.call, ([], []))[role].append(compare_case(case))
    return comparisons


def _find_first_wrong(
    comparisons: Mapping[int, tuple[list[TensorComparison], list[TensorComparison]]],
    consumers: Mapping[int, set[int]],
) -> int | None:
    agreements = {
        number: {output.verdict.agreement for output in outputs}
        for number, (inputs, outputs) in comparisons.items()
        if _is_comparable(inputs, outputs)
    }
    is_right: dict[int, bool] = {}  # the result agrees, or is corrected by all consumers
    for number in sorted(agreements, reverse=True):
        are_consumers_right = [
            is_right[consumer] for consumer in consumers.get(number, ()) if consumer in is_right
        ]
        is_fine = bool(agreements[number]) and agreements[number] <= TOLERABLE
        is_right[number] = is_fine or (bool(are_consumers_right) and all(are_consumers_right))
    for number in sorted(agreements):
        if agreements[number].intersection(_WRONG) and not is_right[number]:
            return number
    return None


def _is_comparable(inputs: Sequence[TensorComparison], outputs: Sequence[TensorComparison]) -> bool:
    """Whether an op is the same in both versions, and its result can be wrong.

    Ops on tensors of unrelated shapes are not the same. Integers computed from a shard, such as
    those of nonzero or argsort, are relative to the shard.
    """
    has_comparable_inputs = all(
        taken.verdict.agreement is not Agreement.RESHAPED for taken in inputs
    )
    has_shards = any(taken.layout is not None for taken in inputs)
    is_counted = all(
        returned.case.reference is not None and not is_inexact(returned.case.reference)
        for returned in outputs
    )
    return has_comparable_inputs and not (has_shards and is_counted)


def _renumber(step_result: StepResult, pairs: Mapping[int, int] | None = None) -> StepResult:
    outputs = []
    for name, tensor in step_result.snapshots.items():
        point = ProbePoint.decode(name)
        number = point.call if pairs is None else pairs.get(point.call)
        if number is not None:
            outputs.append((point._replace(module="", call=number).encode(), tensor))
    return StepResult(outputs, {}, {})
