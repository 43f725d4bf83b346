"""Exports a model, with its loss if it is to be trained, to the program that is partitioned."""

from __future__ import annotations

import inspect
import io
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from shardscope._torch.tree import pytree_flatten, pytree_unflatten
from shardscope.attribution.call_sites import user_line
from shardscope.errors import ParallelError
from shardscope.parallel.ir.graph import raise_explained

_MODEL_ATTRIBUTE = "model"


@final
@dataclass(frozen=True)
class Capture:
    """A model's program, and which of its outputs, by position, belong to a cache."""

    program: ExportedProgram
    cached: frozenset[int] = frozenset()


def export_model(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    dynamic_shapes: object = None,
) -> Capture:
    """Export a model on example inputs.

    torch.export can return pytrees only. An object of another class, such as the DynamicCache of
    transformers, is returned as nested dicts and lists of the tensors in its attributes.
    """
    cache_flags: list[bool] = []

    def expand(_: nn.Module, __: object, output: object) -> object:
        nest, cache_flags[:] = expand_objects(output)
        return nest

    with _replaced_output(model, expand):
        program = _export(model, args, kwargs, dynamic_shapes)
    return Capture(program, frozenset(i for i, is_cached in enumerate(cache_flags) if is_cached))


@contextmanager
def _replaced_output(model: nn.Module, replace_output: Callable[..., object]) -> Iterator[None]:
    handle = model.register_forward_hook(replace_output)
    try:
        yield
    finally:
        handle.remove()


def _export(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], dynamic_shapes: Any
) -> ExportedProgram:
    _check_inputs(args, kwargs)
    try:
        with _without_graph_dump():
            return torch.export.export(
                model, tuple(args), dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
            )
    except Exception as error:
        what, where = type(model).__name__, "torch.export.export(model, args)"
        if isinstance(model, WithLoss):
            what = f"{type(model.model).__name__} and its loss"
            where = "loss(model(*args), *targets)"
        fact = f"torch.export cannot trace {what} on these inputs"
        if "DataDependent" in type(error).__name__:
            raise ParallelError(f"{fact}: {_explain_branch(model, error)}") from error
        raise_explained(error, fact, f"Make {where} work first.")


def _check_inputs(args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    inputs = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    for name, value in inputs.items():
        for leaf in pytree_flatten(value)[0]:
            if _expand(leaf) is not leaf:
                raise ParallelError(
                    f"{name} is or holds a {type(leaf).__name__}, which torch.export does not take "
                    "as an input. Leave it out, or register its class as a pytree "
                    "(torch.utils._pytree.register_pytree_node) first."
                )


@contextmanager
def _without_graph_dump() -> Iterator[None]:
    """Keep torch.export from printing the graph that it had when it failed."""
    printed, dumped = io.StringIO(), ""
    try:
        with redirect_stderr(printed):
            yield
    except Exception as error:
        dumped = f"{error.partial_fx_graph}\n" if hasattr(error, "partial_fx_graph") else ""
        raise
    finally:
        sys.stderr.write(printed.getvalue().replace(dumped, "") if dumped else printed.getvalue())


def _explain_branch(model: nn.Module, error: Exception) -> str:
    """Which module branches on a tensor's value, on which line, and what to do about it."""
    line = user_line("".join(traceback.format_tb(error.__traceback__)))
    module = _innermost_module(error)
    name = next((name for name, child in model.named_modules() if child is module), "")
    name = _strip_prefix(name) if isinstance(model, WithLoss) else name
    fact = (
        f"{name or 'the model'} decides by the value of a tensor{f' ({line})' if line else ''}, "
        "and a program that is traced has no values"
    )
    if "Experts" in type(module).__name__:  # of transformers
        return f"{fact}. Call model.set_experts_implementation('grouped_mm')."
    if module is not None and module.training:
        return (
            f"{fact}. If it does so only in training, as where layers are skipped at random, "
            "call model.eval(), or set training = False on that module only; otherwise use "
            "torch.where."
        )
    return f"{fact}. Use torch.where instead, or leave that module out of what is exported."


def _innermost_module(error: Exception) -> nn.Module | None:
    """The user's module that was running when the error was raised."""
    innermost = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        is_torchs = type(owner).__module__.startswith(("torch.", "shardscope."))
        if isinstance(owner, nn.Module) and not is_torchs:
            innermost = owner
    return innermost


def expand_objects(output: object) -> tuple[object, list[bool]]:
    """The output as a pytree, and for each of its leaves whether it belongs to a cache.

    An object whose class is no pytree node becomes a dict of those attributes that hold tensors.
    """
    leaves, tree = pytree_flatten(output, is_leaf=_is_cache)
    nests = [_expand(leaf) for leaf in leaves]
    is_cached = [
        _is_cache(leaf)
        for leaf, nest in zip(leaves, nests, strict=True)
        for _ in pytree_flatten(nest)[0]
    ]
    return pytree_unflatten(nests, tree), is_cached


def _is_cache(leaf: object) -> bool:
    """Whether its class is named a cache, as all key-value caches of transformers are."""
    return any(cls.__name__.endswith("Cache") for cls in type(leaf).__mro__)


def _expand(leaf: object) -> object:
    if isinstance(leaf, (Tensor, type)) or not hasattr(leaf, "__dict__"):
        return leaf
    nest = _tensors_of(leaf, set())
    return leaf if nest is None else nest


def _tensors_of(nest: object, parents: set[int]) -> object:
    """The tensors in nested objects and containers; None if there are none."""
    if isinstance(nest, Tensor):
        return nest
    if isinstance(nest, Mapping):
        items = {str(key): item for key, item in nest.items()}
    elif isinstance(nest, (list, tuple)):
        items = {str(index): item for index, item in enumerate(nest)}
    else:
        items = getattr(nest, "__dict__", {})
    if id(nest) in parents or isinstance(nest, (type, nn.Module)):
        return None
    tensors = {name: _tensors_of(item, parents | {id(nest)}) for name, item in items.items()}
    if all(item is None for item in tensors.values()):
        return None
    if isinstance(nest, (list, tuple)):
        return list(tensors.values())
    return {name: item for name, item in tensors.items() if item is not None}


def export_with_loss(
    model: nn.Module,
    loss: Callable[..., Tensor],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    targets: Sequence[object],
    dynamic_shapes: object = None,
) -> ExportedProgram:
    """The program that takes a model's inputs, then targets, and returns `loss(output, *targets)`.

    Its names are the model's.
    """
    wrapped = WithLoss(model, loss, args, kwargs, targets)
    with _replaced_output(wrapped, lambda _, __, output: _drop_objects(output)):
        program = _export(wrapped, (*args, *targets), kwargs, dynamic_shapes)
    return unwrap(program)


def _drop_objects(output: object) -> object:
    """The output with None for objects that torch.export cannot return, which a loss ignores."""
    leaves, tree = pytree_flatten(output, is_leaf=_is_cache)
    return pytree_unflatten([leaf if _expand(leaf) is leaf else None for leaf in leaves], tree)


@final
class WithLoss(nn.Module):
    """A model with its loss: takes inputs, then targets."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        args: Sequence[object],
        kwargs: Iterable[str],
        targets: Sequence[object],
    ) -> None:
        super().__init__()
        self.model = model
        self.training = model.training  # not train(): that would change the submodules too
        # Export names inputs by the parameters of forward.
        self.forward = _make_forward(model, loss, len(args), kwargs, len(targets))


def _make_forward(
    model: nn.Module,
    loss: Callable[..., Tensor],
    num_args: int,
    kwargs: Iterable[str],
    num_targets: int,
) -> Callable[..., Tensor]:
    def forward(*values: object, **keywords: object) -> Tensor:
        return loss(model(*values[:num_args], **keywords), *values[num_args:])

    names = [*_argument_names(model.forward, num_args), *_argument_names(loss, num_targets, skip=1)]
    unique = [name if names.index(name) == i else f"{name}_{i}" for i, name in enumerate(names)]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in unique
    ]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


def _argument_names(function: Callable[..., object], count: int, skip: int = 0) -> list[str]:
    """The names of a function's first `count` arguments; generated where it has none."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):
        parameters = []
    positional = [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    kind = "target" if skip else "input"
    return [*positional[:count], *(f"{kind}_{i}" for i in range(len(positional[:count]), count))]


def unwrap(program: ExportedProgram) -> ExportedProgram:
    """The program of a WithLoss with the names of the model inside it."""
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            items = list(stack.items())
            inner = [(key, (_strip_prefix(name), kind)) for key, (name, kind) in items if name]
            node.meta["nn_module_stack"] = dict(inner or items[:1])
    signature = program.graph_signature
    inputs = [
        replace(spec, target=spec.target and _strip_prefix(spec.target))
        for spec in signature.input_specs
    ]
    outputs = [
        replace(spec, target=spec.target and _strip_prefix(spec.target))
        for spec in signature.output_specs
    ]
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=ExportGraphSignature(input_specs=inputs, output_specs=outputs),
        state_dict={_strip_prefix(name): tensor for name, tensor in program.state_dict.items()},
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph[:1],
        example_inputs=program.example_inputs,
        constants={_strip_prefix(name): constant for name, constant in program.constants.items()},
        verifiers=program.verifiers,
    )


def _strip_prefix(name: str) -> str:
    return "" if name == _MODEL_ATTRIBUTE else name.removeprefix(f"{_MODEL_ATTRIBUTE}.")
