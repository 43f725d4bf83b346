"""Backends on AOT autograd: each adds one of the steps that Inductor takes before compiling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx

from shardscope._torch.aot import (
    Compiled,
    Compiler,
    Partition,
    as_boxed,
    call_as_subgraph,
    compile_ahead,
    config_of_decomp_partition,
    crossref_setting,
    partition_by_default,
    partition_by_min_cut,
    partition_for_inductor,
)
from shardscope._torch.decompositions import table_in_force
from shardscope.compile.backends.graph_backends import (
    checking_compiler,
    enter_all,
    is_mode,
    run_boxed,
    run_boxed_within,
)
from shardscope.compile.backends.options import Option, choice_of, read_options

Options = Mapping[str, Any] | None

_COMPILER = "a function that takes a graph and its example inputs and returns a function"
_COMPILERS = {
    "fw_compiler": Option(_COMPILER, callable),
    "bw_compiler": Option(f"{_COMPILER}, for backward", callable),
}


def aot_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Trace forward and backward with AOT autograd, partition them, and run both graphs eagerly.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; unknown options raise BackendError.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_aot_eager")(x)
    """
    chosen = read_options("aot_eager", options, mode, _COMPILERS)
    return _compile_eagerly(gm, example_inputs, chosen, partition_by_min_cut)


def aot_eager_default_partitioner(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Trace forward and backward and run both eagerly; everything is saved, nothing recomputed.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; unknown options raise BackendError.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_aot_eager_default_partitioner")(x)
    """
    chosen = read_options("aot_eager_default_partitioner", options, mode, _COMPILERS)
    return _compile_eagerly(gm, example_inputs, chosen, partition_by_default)


def aot_eager_decomp_partition(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Decompose and partition as Inductor does, and run the graphs eagerly.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; unknown options raise BackendError.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_aot_eager_decomp_partition")(x)
    """
    chosen = read_options("aot_eager_decomp_partition", options, mode, _COMPILERS)
    forward, backward = _compilers(chosen, checking_compiler(crossref_setting()))
    return compile_as_inductor_would(gm, example_inputs, forward=forward, backward=backward)


_MODE = Option(
    "a TorchDispatchMode, or a function that makes one for each call", is_mode, is_required=True
)


def aot_eager_decomp_partition_with_mode(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Decompose and partition as Inductor does, and run both graphs within a TorchDispatchMode.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; unknown options raise BackendError.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_aot_eager_decomp_partition_with_mode")(x)
    """
    chosen = read_options("aot_eager_decomp_partition_with_mode", options, mode, {"mode": _MODE})
    within = partial(run_boxed_within, make_context=lambda: enter_all([chosen["mode"]]))
    return compile_as_inductor_would(gm, example_inputs, forward=within)


def aot_eager_decomp_partition_crossref(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Decompose and partition as Inductor does, and compare what each op returns with its fake.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; unknown options raise BackendError.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_aot_eager_decomp_partition_crossref")(x)
    """
    # Fakes of some aten ops differ in harmless ways, so only custom ops are checked by default.
    setting = crossref_setting()
    check = choice_of(
        "off", "custom_ops", "all", default="custom_ops" if setting == "off" else setting
    )
    chosen = read_options("aot_eager_decomp_partition_crossref", options, mode, {"check": check})
    return compile_as_inductor_would(gm, example_inputs, forward=checking_compiler(chosen["check"]))


def invoke_subgraph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Options = None,
    mode: str | None = None,
) -> Compiled:
    """Keep forward and backward as one call each when compiled code is traced again.

    Args:
        gm: The graph that dynamo captured.
        example_inputs: Example inputs of the graph.
        options: Options of this backend; unknown options raise BackendError.
        mode: `mode` of torch.compile, which is ignored.

    Examples:
        >>> torch.compile(model, backend="shardscope_invoke_subgraph")(x)
    """
    read_options("invoke_subgraph", options, mode, {})
    return compile_ahead(
        gm,
        example_inputs,
        forward=call_as_subgraph,
        partition=partition_by_min_cut,
        keeps_mutations=True,
    )


def compile_as_inductor_would(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Compiler = run_boxed,
    backward: Compiler | None = None,
    partition: Partition = partition_for_inductor,
    table: Mapping[Any, Any] | None = None,
) -> Compiled:
    """Do what Inductor does before lowering, then call the compilers of the two graphs."""
    with config_of_decomp_partition():
        return compile_ahead(
            gm,
            example_inputs,
            forward=forward,
            backward=backward,
            partition=partition,
            table=table_in_force() if table is None else table,
        )


def _compile_eagerly(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    chosen: Mapping[str, Any],
    partition: Partition,
) -> Compiled:
    forward, backward = _compilers(chosen, run_boxed)
    return compile_ahead(
        gm,
        example_inputs,
        forward=forward,
        backward=backward,
        partition=partition,
        keeps_mutations=True,
    )


def _compilers(chosen: Mapping[str, Any], default: Compiler) -> tuple[Compiler, Compiler]:
    forward, backward = chosen["fw_compiler"], chosen["bw_compiler"]
    return _boxing(forward or default), _boxing(backward or default)


def _boxing(compiler: Compiler) -> Compiler:
    """A compiler whose result takes a list of inputs, as AOT autograd calls it."""
    return lambda gm, example_inputs: as_boxed(compiler(gm, example_inputs))
