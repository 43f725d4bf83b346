"""AOT autograd as torch's own backends use it: tracing, decomposing, partitioning, boxed calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from functorch.compile import (  # type: ignore[import-untyped]
    default_partition,
    min_cut_rematerialization_partition,
)

from shardscope._torch.private import find_name

__all__ = [
    "Compiled",
    "Compiler",
    "Partition",
    "as_boxed",
    "compile_ahead",
    "config_of_decomp_partition",
    "crossref_setting",
    "give_boxed_code",
    "graph_run_error",
    "partition_by_default",
    "partition_by_min_cut",
    "partition_for_inductor",
]

aot_autograd = find_name(
    "torch._dynamo.backends.common.aot_autograd",
    "trace forward and backward for shardscope's backends",
)
functorch_config = find_name(
    "torch._functorch.config",
    "respect torch's settings for checking fake implementations and its bisector",
)
_DynamoError = find_name(
    "torch._dynamo.exc.TorchDynamoException", "raise what torch's eager_noexcept raises"
)
_BoxedCodeGen = find_name("torch.fx.graph._BoxedCodeGen", "free inputs after their last use")

Compiled = Callable[..., Any]
Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Compiled]
Partition = Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]

partition_by_default: Partition = default_partition
partition_by_min_cut: Partition = min_cut_rematerialization_partition


def partition_for_inductor(
    joint: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The cut that Inductor asks for, which recomputes what it would fuse."""
    kwargs.setdefault("compiler", "inductor")
    return partition_by_min_cut(joint, joint_inputs, **kwargs)


def compile_ahead(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Compiler,
    backward: Compiler | None = None,
    partition: Partition = partition_by_default,
    table: Mapping[Any, Callable[..., Any]] | None = None,
    keeps_mutations: bool = False,
) -> Compiled:
    """Trace forward and backward ahead of time, and hand each graph to its compiler."""
    compile_graph = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward or forward,
        inference_compiler=forward,
        partition_fn=partition,
        decompositions=None if table is None else dict(table),
        keep_inference_input_mutations=keeps_mutations,
    )
    compiled: Compiled = compile_graph(gm, example_inputs)
    return compiled


@contextmanager
def config_of_decomp_partition() -> Iterator[None]:
    """The settings under which torch compiles so, and what its bisector changes of them."""
    from torch._inductor.compiler_bisector import CompilerBisector

    changes: dict[str, Any] = {"unlift_effect_tokens": True}
    changes.update(CompilerBisector.get_config_change("aot_eager_decomp_partition") or {})
    with functorch_config.patch(changes):
        yield


def crossref_setting() -> str:
    """Which ops torch's own setting asks to cross-check: 'off', 'custom_ops' or 'all'."""
    return str(functorch_config.fake_tensor_crossref or "off")


def graph_run_error(sentence: str) -> Exception:
    """What torch itself raises for a graph that failed when it ran."""
    error: Exception = _DynamoError(sentence)
    return error


def give_boxed_code(gm: torch.fx.GraphModule) -> None:
    """Let `gm.forward` take one list, which it empties; each value goes after its last use."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()


def as_boxed(compiled: Compiled, *, takes_list: bool = False) -> Compiled:
    """`compiled` for a caller who hands over one list; as it is if it says that it takes one."""
    if getattr(compiled, "_boxed_call", False):
        return compiled

    def run(args: list[Any]) -> Any:
        if takes_list:
            return compiled(args)
        values = tuple(args)
        args.clear()
        return compiled(*values)

    run._boxed_call = True
    return run
