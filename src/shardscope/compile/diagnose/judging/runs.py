"""Runs a graph, compiled or not, forward and backward, on copies of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from shardscope._torch.graph_switches import switched_back
from shardscope.compile.diagnose.leaves import find_leaf

__all__ = ["Announce", "Result", "name_inputs", "pull_back", "run", "say_nothing", "settle_device"]

Announce = Callable[[str], None]


def say_nothing(phase: str) -> None:
    """Ignore the announcement of a phase."""


@final
@dataclass(frozen=True, eq=False)
class Result:
    """The results of a run by name: values of forward, and gradients."""

    values: Mapping[str, Any]
    gradients: Mapping[str, Any]
    is_complete: bool = True  # False: a name that is missing in `values` may still exist
    layouts: Mapping[str, str] = field(default_factory=dict)  # of what the function returns


def run(
    call: Callable[[Sequence[Any]], Any],
    inputs: Sequence[Any],
    *,
    seed: int,
    with_gradients: bool,
    pulls_back: bool = True,
    announce: Announce = say_nothing,
) -> Result:
    """Call with `inputs`, which may be changed, and compute gradients of differentiable outputs."""
    torch.manual_seed(seed)
    leaves = {name: find_leaf(one) for name, one in name_inputs(inputs).items()}
    with torch.set_grad_enabled(with_gradients), switched_back():
        outputs = call(inputs)
    settle_device()
    named = _name_outputs(outputs)
    values = {name: _keep(one) for name, one in named.items()}
    if not with_gradients or not pulls_back:
        return Result(values, {})
    announce("backward")
    gradients = pull_back(named, leaves)
    settle_device()
    return Result(values, gradients)


def settle_device() -> None:
    """Synchronize with the device, so that a failing kernel raises here."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def pull_back(outputs: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of `inputs`, for fixed cotangents of all differentiable `outputs`."""
    pulled = {
        name: one
        for name, one in outputs.items()
        if isinstance(one, Tensor) and one.requires_grad and one.numel()
    }
    wanted = {name: one for name, one in inputs.items() if one.requires_grad}
    if not pulled or not wanted:
        return {}
    cotangents = [_cotangent(name, one) for name, one in pulled.items()]
    found = torch.autograd.grad(
        list(pulled.values()), list(wanted.values()), cotangents, allow_unused=True
    )
    return {
        f"gradient of {name}": torch.zeros_like(one) if gradient is None else gradient.detach()
        for (name, one), gradient in zip(wanted.items(), found, strict=True)
    }


def _cotangent(name: str, output: Tensor) -> Tensor:
    """A cotangent that depends on the output's name and shape only, not on its dtype.

    No element is zero, and all are exact in every precision: runs in double precision and with
    perturbed rounding use the same numbers.
    """
    generator = torch.Generator().manual_seed(sum(name.encode()))
    if output.is_complex():
        drawn = torch.randn(output.shape, generator=generator, dtype=torch.complex64)
    else:
        whole = torch.randint(-64, 64, output.shape, generator=generator, dtype=torch.int64)
        drawn = (2 * whole + 1) / 64
    return drawn.to(output.device, output.dtype)


def _name_outputs(outputs: Any) -> dict[str, Any]:
    if not isinstance(outputs, list | tuple):
        return {"what it returns": type(outputs).__name__}
    return {f"output {index}": one for index, one in enumerate(outputs)}


def name_inputs(inputs: Sequence[Any]) -> dict[str, Tensor]:
    """The tensors among the inputs, by the names that reports use."""
    return {f"input {i}": one for i, one in enumerate(inputs) if isinstance(one, Tensor)}


def _keep(value: Any) -> Any:
    # Some backends reuse the memory of their outputs.
    return value.detach().clone() if isinstance(value, Tensor) else value
