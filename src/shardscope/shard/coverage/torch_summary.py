"""torch's op coverage summary: its names and signatures, with a correct Supported column."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from shardscope._torch.aot import trace_graphs
from shardscope._torch.dispatch import is_overload
from shardscope._torch.fake import without_data
from shardscope._torch.modules import exchange_tensors, preserved_model
from shardscope._torch.random_state import preserved_random_state
from shardscope.attribution.module_names import NO_MODULE
from shardscope.attribution.tensors import TensorSubstitution, empty_like, map_tensors, tensors_in
from shardscope.errors import CoverageError
from shardscope.record import OpCoverage, OpVerdict
from shardscope.shard.coverage.coverage import cover_calls, coverage
from shardscope.shard.coverage.dispatch import describe
from shardscope.shard.coverage.op_calls import Capture, Use, freeze_call


def inductor_graphs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[fx.GraphModule]:
    """The graphs of `model` after Inductor's decompositions: forward, and backward if it has one.

    Parameters and buffers are inputs, tied ones once. The model is left as it was.
    """

    def flat(tensors: dict[str, torch.Tensor], args: Any, kwargs: Any) -> list[torch.Tensor]:
        return list(tensors_in(torch.func.functional_call(model, tensors, args, kwargs)))

    with without_data(), preserved_random_state(), preserved_model(model):
        substitution = TensorSubstitution(lambda tensor: empty_like(tensor, torch.device("cpu")))
        exchange_tensors(model, substitution.of)
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        new_inputs = map_tensors((args, kwargs), substitution.of)
        return trace_graphs(flat, tensors, *new_inputs)


def calls_in(graph: fx.GraphModule) -> Capture:
    """Every call of an op in the graph."""
    captured: Capture = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and is_overload(node.target):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), _read)
            call = freeze_call(node.target, args, kwargs)
            captured.setdefault(call, Use()).forward[NO_MODULE, None] += 1
    return captured


def _read(node: fx.Node) -> Any:
    return node.meta.get("val")


_HEADERS = ("Operator", "Schema", "Total Count", "Supported")
_CSV = "op_summary.csv"


def get_inductor_decomp_graphs(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> list[fx.GraphModule]:
    """The forward and backward graphs of a model after Inductor's decompositions.

    Args:
        model: The model.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Examples:
        >>> forward, backward = get_inductor_decomp_graphs(model, (x,), None)
    """
    return inductor_graphs(model, _read_args(args), dict(kwargs or {}))


def print_op_coverage_summary(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    output_csv: bool = False,
) -> None:
    """Print each op of a model's decomposed graphs, how often it is called, and whether DTensor can
    run it.

    Supported means that it runs correctly on some sharding, or on replicated tensors; `coverage`
    distinguishes the cases.

    Args:
        model: The model.
        args: Its arguments.
        kwargs: Its keyword arguments.
        output_csv: Print CSV instead of a table.

    Examples:
        >>> print_op_coverage_summary(model, (x,), None)
    """
    rows = [
        (op.op, op.schema, op.num_forward + op.num_backward, _is_supported(op))
        for op in _find_ops(model, _read_args(args), dict(kwargs or {}))
    ]
    _print_table(rows)
    if output_csv:
        with open(_CSV, "w", newline="") as file:
            csv.writer(file).writerows([_HEADERS, *rows])


def _read_args(args: Sequence[Any]) -> tuple[Any, ...]:
    if isinstance(args, torch.Tensor):
        raise CoverageError("args is a tensor, not a tuple of arguments. Write (tokens,).")
    return tuple(args)


def _find_ops(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[OpCoverage, ...]:
    try:
        graphs = get_inductor_decomp_graphs(model, args, kwargs)
    except Exception as error:  # noqa: BLE001 - values decide what the model does: no graph has it
        print(f"The model is not a single graph ({describe(error)[:120]}); it ran eagerly instead.")
        return coverage(model, *args, levels=["inductor"], **kwargs).coverage[0].ops
    return cover_calls([calls_in(graph) for graph in graphs])


def _is_supported(op: OpCoverage) -> bool:
    return op.verdict not in (OpVerdict.MISSING, OpVerdict.WRONG)


def _print_table(rows: Sequence[Sequence[Any]]) -> None:
    table = [_HEADERS, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADERS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]
    print("\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]]))
