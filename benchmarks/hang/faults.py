"""Faults of a rank, and what every rank has issued and completed when the run is stuck."""

from __future__ import annotations

import random
from collections import defaultdict

from msgspec import Struct
from msgspec.structs import replace

from hang.schedule import T0_NS, Op, World, make_step

STEPS = 4  # of history before the faulty step
AHEAD = 3  # collectives that a rank issues before it waits, where calls do not block
OP_NS = 2_000_000

# By kind of fault: the classes of cause that are right, the exact ones first.
KINDS = {
    "skip": ("skipped_call",),
    "other_branch": ("different_call",),
    "size": ("mismatch",),
    "dtype": ("mismatch",),
    "reduction": ("mismatch",),
    "root": ("mismatch",),
    "crash": ("crash",),
    "out_of_memory": ("out_of_memory",),
    "killed": ("crash",),
    "stopped": ("stopped", "lost"),
    "compute": ("slow",),
    "data_loading": ("data_loading",),
    "file_system": ("file_system",),
    "compiling": ("compiling",),
    "order": ("wrong_order",),
    "no_send": ("unmatched_transfer", "skipped_call"),
    "no_receive": ("unmatched_transfer", "skipped_call"),
    "exit": ("skipped_call", "lost", "crash"),
    "network": ("network",),
}
ENDED = ("crash", "out_of_memory", "killed", "exit")
SILENT = (*ENDED, "stopped")  # kinds whose rank writes no dump
BUSY = ("compute", "data_loading", "file_system", "compiling")


class Fault(Struct, frozen=True):
    """A fault of a rank, before or in the collective of an axis in the last step."""

    kind: str
    axis: str
    rank: int
    index: int  # of the op in the rank's step
    blocking: bool = True  # whether calls return when they are done, as those of gloo


class Issued(Struct):
    """A call that a rank has issued."""

    op: Op
    group: tuple[int, ...]
    position: int  # in the group, transfers aside
    created_ns: int
    is_done: bool = False
    done_ns: int = 0


class Outcome(Struct):
    """What each rank issued before the run was stuck."""

    world: World
    fault: Fault
    calls: dict[int, list[Issued]]
    position: int | None  # of the collective at which the fault is
    waiting: set[int]


def run_fault(world: World, fault: Fault, seed: int) -> Outcome:
    """Run the history and the faulty step until no rank can go on."""
    rng = random.Random(seed)
    delays = [rng.randrange(200_000) for _ in range(world.size)]
    ranks = {rank: _Rank(world, rank, delays[rank]) for rank in range(world.size)}
    programs = {rank: make_step(world, rank) for rank in range(world.size)}
    for rank, state in ranks.items():
        for step in range(STEPS):
            for op in programs[rank]:
                state.issue(op, step, is_done=True)
    for rank, state in ranks.items():
        state.program = list(programs[rank])
    op = programs[fault.rank][fault.index]
    group = ranks[fault.rank].group_of(op.axis)
    position = _inject(world, fault, ranks[fault.rank])
    cut = (op.axis, group, position) if fault.kind == "network" else None
    _execute(fault, ranks, cut)
    waiting = {rank for rank, state in ranks.items() if state.calls and not state.calls[-1].is_done}
    return Outcome(world, fault, {rank: s.calls for rank, s in ranks.items()}, position, waiting)


class _Rank:
    """A rank's program and what it has issued."""

    def __init__(self, world: World, rank: int, delay_ns: int) -> None:
        self.world, self.rank, self.delay_ns = world, rank, delay_ns
        self.program: list[Op | None] = []
        self.next = 0
        self.calls: list[Issued] = []
        self.counts: dict[str, int] = defaultdict(int)
        self.groups: dict[str, tuple[int, ...]] = {}

    def group_of(self, axis: str) -> tuple[int, ...]:
        if axis not in self.groups:
            self.groups[axis] = self.world.group(self.rank, axis)
        return self.groups[axis]

    def issue(self, op: Op, step: int, *, is_done: bool = False) -> Issued:
        group = self.group_of(op.axis)
        position = -1
        if op.kind not in ("send", "recv"):
            position = self.counts[op.axis]
            self.counts[op.axis] += 1
        created = T0_NS + len(self.calls) * OP_NS + self.delay_ns
        call = Issued(op, group, position, created, is_done, created + OP_NS // 2 if is_done else 0)
        self.calls.append(call)
        return call


def _inject(world: World, fault: Fault, state: _Rank) -> int | None:
    """Change the rank's program; the position of the collective at the fault."""
    index = fault.index
    op = state.program[index]
    assert op is not None
    position = _position_at(state, index)
    match fault.kind:
        case "skip" | "no_send" | "no_receive":
            del state.program[index]
        case "other_branch":
            kind = "broadcast" if op.kind != "broadcast" else "all_reduce"
            root = state.group_of(op.axis)[0] if kind == "broadcast" else None
            state.program[index] = replace(
                op, kind=kind, root=root, reduce_op=None if root is not None else "sum", line=200
            )
        case "size":
            state.program[index] = replace(op, elements=op.elements * 2)
        case "dtype":
            state.program[index] = replace(op, dtype="float64")
        case "reduction":
            state.program[index] = replace(op, reduce_op="max")
        case "root":
            state.program[index] = replace(op, root=state.group_of(op.axis)[-1])
        case "order":
            other = _find_swap(state, index)
            state.program[index], state.program[other] = state.program[other], op
        case "network":
            pass
        case _:
            state.program[index:] = [None]  # it issues nothing more
    return position


def _find_swap(state: _Rank, index: int) -> int:
    """The next call, of another group, which takes the place of this one."""
    return index + 1


def _position_at(state: _Rank, index: int) -> int | None:
    op = state.program[index]
    if op.kind in ("send", "recv"):
        return None
    before = sum(
        1
        for earlier in state.program[:index]
        if earlier.axis == op.axis and earlier.kind not in ("send", "recv")
    )
    return state.counts[op.axis] + before


def _execute(fault: Fault, ranks: dict[int, _Rank], cut: tuple | None) -> None:
    """Let ranks go on until none can; the collective `cut` never completes."""
    matcher = _Matcher(cut)
    ahead = 0 if fault.blocking else AHEAD
    ready = list(ranks)
    while ready:
        awake: set[int] = set()
        for rank in ready:
            state = ranks[rank]
            while state.next < len(state.program):
                op = state.program[state.next]
                if op is None or matcher.num_pending(rank) > ahead:
                    break
                state.next += 1
                call = state.issue(op, STEPS)
                awake |= matcher.add(rank, call)
        ready = sorted(awake)


class _Matcher:
    """Completes collectives that all ranks of a group have issued alike, and transfers in pairs."""

    def __init__(self, cut: tuple | None) -> None:
        self._cut = cut
        self._calls: dict[tuple, dict[int, Issued]] = defaultdict(dict)
        self._sends: dict[tuple[int, int], list[Issued]] = defaultdict(list)
        self._receives: dict[tuple[int, int], list[Issued]] = defaultdict(list)
        self._pending: dict[int, int] = defaultdict(int)
        self._stuck: set[tuple] = set()

    def num_pending(self, rank: int) -> int:
        return self._pending[rank]

    def add(self, rank: int, call: Issued) -> set[int]:
        """Ranks that may go on after a call was issued."""
        self._pending[rank] += 1
        if call.op.kind in ("send", "recv"):
            return self._add_transfer(rank, call)
        key = (call.op.axis, call.group)
        calls = self._calls[(*key, call.position)]
        calls[rank] = call
        if len(calls) < len(call.group) or key in self._stuck:
            return set()
        if (*key, call.position) == self._cut or len({_facets(c.op) for c in calls.values()}) > 1:
            self._stuck.add(key)
            return set()
        return self._complete(calls)

    def _complete(self, calls: dict[int, Issued]) -> set[int]:
        done = max(call.created_ns for call in calls.values()) + OP_NS // 2
        for rank, call in calls.items():
            call.is_done, call.done_ns = True, done
            self._pending[rank] -= 1
        return set(calls)

    def _add_transfer(self, rank: int, call: Issued) -> set[int]:
        peer = call.op.peer
        assert peer is not None
        route = (rank, peer) if call.op.kind == "send" else (peer, rank)
        own, other = (
            (self._sends, self._receives)
            if call.op.kind == "send"
            else (self._receives, self._sends)
        )
        if other[route]:
            match = other[route].pop(0)
            return self._complete({rank: call, peer: match})
        own[route].append(call)
        return set()


def _facets(op: Op) -> tuple[object, ...]:
    return op.kind, op.dtype, op.elements, op.reduce_op, op.root
