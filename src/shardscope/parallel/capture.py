"""From a model, and a loss if it is to be trained, to the program that is cut."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from shardscope.errors import ParallelError

__all__ = ["WithLoss", "export_model", "export_with_loss", "unwrap"]

_WRAPPED = "model"


def export_model(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any = None
) -> ExportedProgram:
    """The program of a model on such inputs."""
    try:
        return torch.export.export(
            model, tuple(args), dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
        )
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        what, where = type(model).__name__, "torch.export.export(model, args)"
        if isinstance(model, WithLoss):
            what, where = (
                f"{type(model.model).__name__} and its loss",
                "loss(model(*args), *targets)",
            )
        raise ParallelError(
            f"torch.export cannot trace {what} on these inputs ({type(error).__name__}: "
            f"{first:.200}). Make {where} work first."
        ) from error


def export_with_loss(
    model: nn.Module,
    loss: Callable[..., Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    targets: Sequence[Any],
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """The program that takes a model's inputs, then targets, and returns `loss(output, *targets)`.

    Its names are the model's.
    """
    whole = WithLoss(model, loss, args, kwargs, targets)
    program = export_model(whole, (*args, *targets), kwargs, dynamic_shapes)
    return unwrap(program)


@final
class WithLoss(nn.Module):
    """A model with its loss: takes inputs, then targets."""

    def __init__(
        self, model: nn.Module, loss: Callable[..., Tensor], args: Any, kwargs: Any, targets: Any
    ) -> None:
        super().__init__()
        self.model = model
        self.training = model.training  # not train(): that would change the model's parts
        # Export names inputs by the parameters of forward.
        self.forward = _make_forward(model, loss, len(args), kwargs, len(targets))


def _make_forward(
    model: nn.Module, loss: Callable[..., Tensor], num_args: int, kwargs: Any, num_targets: int
) -> Callable[..., Tensor]:
    def forward(*given: Any, **named: Any) -> Tensor:
        return loss(model(*given[:num_args], **named), *given[num_args:])

    names = [*_names(model.forward, num_args), *_names(loss, num_targets, skip=1)]
    unique = [name if names.index(name) == i else f"{name}_{i}" for i, name in enumerate(names)]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in unique
    ]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


def _names(function: Callable[..., Any], count: int, skip: int = 0) -> list[str]:
    """The names of a function's first arguments; made up where it has none."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError):
        parameters = []
    plain = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    kind = "target" if skip else "input"
    return [*plain[:count], *(f"{kind}_{i}" for i in range(len(plain[:count]), count))]


def unwrap(program: ExportedProgram) -> ExportedProgram:
    """The same program with the model's own names."""
    for node in program.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            items = list(stack.items())
            inner = [(key, (_strip(name), kind)) for key, (name, kind) in items if name]
            node.meta["nn_module_stack"] = dict(inner or items[:1])
    signature = program.graph_signature
    inputs = [replace(one, target=_strip(one.target)) for one in signature.input_specs]
    outputs = [replace(one, target=_strip(one.target)) for one in signature.output_specs]
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=ExportGraphSignature(input_specs=inputs, output_specs=outputs),
        state_dict={_strip(name): one for name, one in program.state_dict.items()},
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph[:1],
        example_inputs=program.example_inputs,
        constants={_strip(name): one for name, one in program.constants.items()},
        verifiers=program.verifiers,
    )


def _strip(name: Any) -> Any:
    if not isinstance(name, str):
        return name
    return "" if name == _WRAPPED else name.removeprefix(f"{_WRAPPED}.")
