"""What each rank holds: its share of the state, its inputs, and what its program makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx
from torch.export import ExportedProgram

from shardscope.parallel.costs import size_hint
from shardscope.parallel.flow import Flow, Value
from shardscope.parallel.footprint import measure
from shardscope.parallel.layouts import Layout, Seat
from shardscope.parallel.placements import product
from shardscope.record import RankMemory, compress_ranks

__all__ = ["hold_memory", "local_bytes"]


def hold_memory(
    source: ExportedProgram,
    flow: Flow,
    seat: Seat,
    graph: fx.Graph,
    *,
    ranks: tuple[int, ...],
    num_gradients: int = 0,
) -> RankMemory:
    """The memory of the rank that sits there, for all that hold the same.

    `graph` is its program, annotated, of which the last so many results are gradients.
    """
    parameters, buffers = _state_bytes(source, flow, seat)
    inputs = sum(local_bytes(one, flow, seat) for one, role in flow.inputs if role.kind == "input")
    (output,) = graph.find_nodes(op="output")
    returned: Any = output.args[0]
    kept = returned[len(returned) - num_gradients :] if num_gradients else ()
    made = measure(graph, flow.sizes.hints, kept=[one for one in kept if isinstance(one, fx.Node)])
    stack = made.peak_node.meta.get("nn_module_stack") if made.peak_node is not None else None
    return RankMemory(
        ranks=compress_ranks(ranks),
        parameter_bytes=parameters,
        buffer_bytes=buffers,
        input_bytes=inputs,
        gradient_bytes=made.kept_bytes,
        intermediate_bytes=made.intermediate_bytes,
        peak_bytes=parameters + buffers + inputs + made.peak_bytes,
        peak_node="" if made.peak_node is None else made.peak_node.name,
        peak_module=list(stack.values())[-1][0] if stack else "",
    )


def local_bytes(value: Value, flow: Flow, seat: Seat) -> int:
    """The bytes of a rank's piece of a value; 0 of what is no tensor."""
    return _bytes(value.layout, value.dtype, flow, seat) if value.is_tensor else 0


def _bytes(layout: Layout, dtype: Any, flow: Flow, seat: Seat) -> int:
    num_elements = size_hint(product(layout.local_shape(seat)), flow.sizes.hints)
    return num_elements * int(dtype.itemsize)


def _state_bytes(source: ExportedProgram, flow: Flow, seat: Seat) -> tuple[int, int]:
    """Parameters, and buffers with constants; what is one tensor under several names, once."""
    layouts = {role.name: value.layout for value, role in flow.inputs if value.is_tensor}
    state = {**source.constants, **source.state_dict}
    placed = {id(one): layouts[name] for name, one in state.items() if name in layouts}
    totals = [0, 0]
    for is_buffer, one in _each_once(source, state):
        whole = Layout(tuple(one.shape), ())
        layout = placed.get(id(one))
        lies = whole if layout is None else layout
        totals[is_buffer] += _bytes(lies, one.dtype, flow, seat if layout else Seat((), ()))
    return totals[0], totals[1]


def _each_once(source: ExportedProgram, state: dict[str, Any]) -> Iterator[tuple[bool, Tensor]]:
    parameters = set(source.graph_signature.parameters)
    known: set[int] = set()
    # Parameters first: one that is a buffer too, or has another name, is a parameter.
    for name in sorted(state, key=lambda name: name not in parameters):
        tensor = state[name]
        if isinstance(tensor, Tensor) and id(tensor) not in known:
            known.add(id(tensor))
            yield name not in parameters, tensor
