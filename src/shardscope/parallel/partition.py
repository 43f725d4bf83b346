"""Writes one rank's program: local ops, local sizes, and collectives where values move."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, final

from torch import fx, nn

from shardscope._torch.dispatch import is_overload, op_packet, op_schema
from shardscope.parallel.blame import blamed_on
from shardscope.parallel.choices import SYM_SIZE, describe_call
from shardscope.parallel.flow import Attribute, Flow, Move, Step, Value, map_nest
from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.moves import Wire, write_move
from shardscope.parallel.placements import Placement, Size
from shardscope.parallel.rules.local import Local, LocalSize, Pen
from shardscope.parallel.rules.lookup import find_speller
from shardscope.parallel.sizes import SizeBook
from shardscope.parallel.uses import find_uses

__all__ = ["RankProgram", "write_rank"]


@final
class RankProgram:
    """The graph of one rank, and which of its nodes stand for which values of the whole."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.graph = fx.Graph()
        self.nodes: dict[Value, Any] = {}
        self.moves: dict[Move, list[fx.Node]] = {}
        self.attributes: dict[str, Any] = {}

    def as_module(self) -> fx.GraphModule:
        """The graph to run, with what hangs on it; state is passed in."""
        holder = nn.Module()
        for name, thing in self.attributes.items():
            setattr(holder, name, thing)
        return fx.GraphModule(holder, self.graph)


def write_rank(flow: Flow, seat: Seat, make_wire: Callable[[Pen], Wire]) -> RankProgram:
    """The program of the rank that sits there."""
    return _Writer(flow, seat, make_wire).write_all()


@final
class _Writer:
    """A pen that remembers what it is writing about."""

    def __init__(self, flow: Flow, seat: Seat, make_wire: Callable[[Pen], Wire]) -> None:
        self._flow = flow
        self._seat = seat
        self._program = RankProgram(seat)
        self._graph = self._program.graph
        self._nodes = self._program.nodes
        self._sizes = SizeBook(self.write)
        self._wire = make_wire(self)
        self._uses = find_uses(flow)
        self._entered: dict[tuple[Value, tuple[int, ...]], fx.Node] = {}
        self._meta: dict[str, Any] = {}
        self._written: list[fx.Node] = []

    def write_all(self) -> RankProgram:
        for value, _ in self._flow.inputs:
            self._write_input(value)
        for step in self._flow.steps:
            self._meta = step.origin.meta or {}
            self._written = []
            with blamed_on(step.origin, "written for one rank"):
                if isinstance(step, Move):
                    self._write_move(step)
                else:
                    self._write_step(step)
        self._graph.output(tuple(self._local(one) for one, _ in self._flow.outputs))
        return self._program

    # What spellers and wires write with.

    def write(self, op: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        if is_overload(op):
            args, kwargs = _by_position(op, args, kwargs)
        node = self._graph.create_node("call_function", op, args, kwargs, name=_name(op))
        node.meta.update(self._meta)
        self._written.append(node)
        return node

    def item(self, value: fx.Node, index: int) -> fx.Node:
        return self.write(operator.getitem, value, index)

    def size(self, value: Size) -> LocalSize:
        return self._sizes.find(value)

    def _write_input(self, value: Value) -> None:
        node = self._graph.placeholder(value.name)
        node.name = node.target = value.name  # also where it is a builtin's, such as `input`
        self._nodes[value] = node
        if value.is_tensor:
            self._sizes.learn_shape(node, value.layout.local_shape(self._seat))
        else:
            self._sizes.learn(node, value.scalar)

    def _write_move(self, move: Move) -> None:
        value = self._enter(move.value, self._uses.axes_entered(move, 0))
        self._nodes[move.output] = write_move(
            move,
            value,
            seat=self._seat,
            pen=self,
            wire=self._wire,
            is_entering=self._uses.only_enters(move.output, move.axis),
        )
        self._program.moves[move] = list(self._written)

    def _write_step(self, step: Step) -> None:
        if step.op is SYM_SIZE:
            self._write_size(step)
        else:
            self._take_result(step.result, self._spell(step))

    def _write_size(self, step: Step) -> None:
        """The size of the whole, from that of the rank's piece where it is cut."""
        (value,) = step.outputs
        self._nodes[value] = self._sizes.find(value.scalar)

    def _spell(self, step: Step) -> Any:
        is_whole = all(_is_replicated(one.placements) for one in (*step.inputs, *step.outputs))
        speller = find_speller(step.op) if is_overload(step.op) and not is_whole else None
        arguments = self._arguments(step)
        if speller is not None:
            return speller(self._describe(step, arguments))
        if is_overload(step.op):
            return self.write(step.op, **arguments)
        return self.write(step.op, *arguments.values())

    def _arguments(self, step: Step) -> Any:
        positions = iter(range(len(step.inputs)))

        def find(item: Any) -> Any:
            if isinstance(item, Value) and item.is_tensor:
                return self._enter(item, self._uses.axes_entered(step, next(positions)))
            return self._local(item)

        return map_nest(step.arguments, find)

    def _enter(self, value: Value, axes: tuple[int, ...]) -> Any:
        """A whole value for a computation in pieces along some axes."""
        node = self._nodes[value]
        for axis in axes:
            if (value, axes) in self._entered:
                return self._entered[value, axes]
            node = self._wire.enter(node, axis=axis)
        if axes:
            self._entered[value, axes] = node
        return node

    def _describe(self, step: Step, arguments: dict[str, Any]) -> Local:
        inputs = step.inputs
        call = describe_call(
            step,
            num_axes=0,
            seat=self._seat,
            num_ranks=self._seat.sizes[0],
            offered=tuple(one.placements[0] for one in inputs),
            is_training=False,
        )
        outputs = [one for one in step.outputs if one.is_tensor]
        return Local(
            call=call,
            arguments=arguments,
            inputs=tuple(one.layout for one in inputs),
            outputs=tuple(one.layout for one in outputs),
            seat=self._seat,
            pen=self,
        )

    def _take_result(self, result: Any, written: Any) -> None:
        """Pair what was written with the values that it computes."""
        if isinstance(result, Value):
            self._nodes[result] = written
            if not isinstance(written, fx.Node):
                return
            if not result.is_tensor:
                self._sizes.learn(written, result.scalar)
            elif not all(isinstance(size, int) for size in result.shape):
                # The data may have decided a size that no input has.
                self._sizes.learn_shape(written, result.layout.local_shape(self._seat))
        elif isinstance(result, list):
            for index, one in enumerate(result):
                if one is not None:
                    is_list = isinstance(written, (list, tuple))
                    item = written[index] if is_list else self.item(written, index)
                    self._take_result(one, item)

    def _local(self, item: Any) -> Any:
        if isinstance(item, Attribute):
            self._program.attributes[item.name] = item.thing
            return self._graph.get_attr(item.name)
        return self._nodes[item] if isinstance(item, Value) else item


def _name(op: Any) -> str:
    """As export names nodes: by the op, without its overload."""
    return str(op_packet(op).__name__ if is_overload(op) else op.__name__)


def _is_replicated(placements: list[Placement]) -> bool:
    return Layout((), tuple(placements)).is_replicated


def _by_position(op: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as people write them: by position, without defaults at the end."""
    schema = op_schema(op).arguments
    named = {one.name: value for one, value in zip(schema, args, strict=False)} | kwargs
    positional = [one for one in schema if not one.kwarg_only]
    given = [named.get(one.name, one.default_value) for one in positional]
    while given and _is_default(positional[len(given) - 1], given[-1]):
        given.pop()
    rest = {
        one.name: named[one.name]
        for one in schema
        if one.kwarg_only and one.name in named and not _is_default(one, named[one.name])
    }
    return tuple(given), rest


def _is_default(argument: Any, value: Any) -> bool:
    if not argument.has_default_value() or isinstance(value, fx.Node):
        return False
    return type(value) is type(argument.default_value) and value == argument.default_value
