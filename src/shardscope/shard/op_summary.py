"""torch's op coverage summary: its names and signatures, and a Supported column that is true."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from shardscope.errors import CoverageError
from shardscope.record import OpCoverage, Verdict
from shardscope.shard.coverage import cover_calls, coverage
from shardscope.shard.dispatch import describe
from shardscope.shard.graphs import calls_in, inductor_graphs

__all__ = ["get_inductor_decomp_graphs", "print_op_coverage_summary"]

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
        (one.op, one.schema, one.num_forward + one.num_backward, _is_supported(one))
        for one in _find_ops(model, _read_args(args), dict(kwargs or {}))
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


def _is_supported(one: OpCoverage) -> bool:
    return one.verdict not in (Verdict.MISSING, Verdict.WRONG)


def _print_table(rows: Sequence[Sequence[Any]]) -> None:
    table = [_HEADERS, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADERS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in table
    ]
    print("\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]]))
