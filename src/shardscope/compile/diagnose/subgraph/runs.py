"""Runs a graph, compiled or not, forward and backward, on copies of its inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from shardscope._torch.graph import switched_back
from shardscope.compile.diagnose.subgraph.values import find_leaf, is_computed, make_computed

PhaseCallback = Callable[[str], None]


def ignore_phase(phase: str) -> None:
    """Ignore the start of a phase."""


@final
@dataclass(frozen=True, eq=False)
class RunValues:
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
    report_phase: PhaseCallback = ignore_phase,
) -> RunValues:
    """Call with `inputs`, which may be changed, and compute gradients of differentiable outputs."""
    torch.manual_seed(seed)
    leaves = {name: find_leaf(value) for name, value in name_inputs(inputs).items()}
    with torch.set_grad_enabled(with_gradients), switched_back():
        outputs = call(inputs)
    synchronize_device()
    named = _name_outputs(outputs)
    values = {name: _copy_output(value) for name, value in named.items()}
    if not with_gradients or not pulls_back:
        return RunValues(values, {})
    report_phase("backward")
    gradients = pull_back(named, leaves)
    synchronize_device()
    return RunValues(values, gradients)


def synchronize_device() -> None:
    """Synchronize with the device, so that a failing kernel raises here."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def pull_back(outputs: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of `inputs`, for fixed cotangents of all differentiable `outputs`."""
    differentiable = {
        name: output
        for name, output in outputs.items()
        if isinstance(output, Tensor) and output.requires_grad and output.numel()
    }
    leaves = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    if not differentiable or not leaves:
        return {}
    cotangents = [_cotangent(name, output) for name, output in differentiable.items()]
    gradients = torch.autograd.grad(
        list(differentiable.values()), list(leaves.values()), cotangents, allow_unused=True
    )
    return {
        f"gradient of {name}": torch.zeros_like(tensor) if gradient is None else gradient.detach()
        for (name, tensor), gradient in zip(leaves.items(), gradients, strict=True)
    }


def _cotangent(name: str, output: Tensor) -> Tensor:
    """A cotangent that depends on the output's name and shape only, not on its dtype.

    No element is zero, and all are exact in every precision: runs in double precision and with
    perturbed rounding use the same numbers.
    """
    generator = torch.Generator().manual_seed(sum(name.encode()))
    if output.is_complex():
        numbers = torch.randn(output.shape, generator=generator, dtype=torch.complex64)
    else:
        integers = torch.randint(-64, 64, output.shape, generator=generator, dtype=torch.int64)
        numbers = (2 * integers + 1) / 64
    return numbers.to(output.device, output.dtype)


def _name_outputs(outputs: Any) -> dict[str, Any]:
    if not isinstance(outputs, list | tuple):
        return {"what it returns": type(outputs).__name__}
    return {f"output {index}": output for index, output in enumerate(outputs)}


def name_inputs(inputs: Sequence[Any]) -> dict[str, Tensor]:
    """The tensors among the inputs, by the names that reports use."""
    return {f"input {i}": value for i, value in enumerate(inputs) if isinstance(value, Tensor)}


def _copy_output(value: Any) -> Any:
    # Some backends reuse the memory of their outputs.
    return value.detach().clone() if isinstance(value, Tensor) else value


Change = Callable[[Tensor], Tensor]


def copy_inputs(inputs: Sequence[Any], change: Change = lambda tensor: tensor) -> list[Any]:
    """A copy of each value, with the original's `requires_grad`, and a leaf if the original is one.

    `change` is applied to the copied data, for example to convert its dtype.
    """
    copied: dict[int, Tensor] = {}
    for group in _group_by_storage(inputs):
        copied.update(_copy_group(group, change))
    return [
        _restore_autograd_state(value, copied[id(value)]) if isinstance(value, Tensor) else value
        for value in inputs
    ]


def _group_by_storage(inputs: Sequence[Any]) -> list[list[Tensor]]:
    """Tensors grouped by storage; subclasses and other layouts form separate groups."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in {id(tensor): tensor for tensor in inputs if isinstance(tensor, Tensor)}.values():
        if (
            type(tensor) in (Tensor, nn.Parameter)
            and tensor.layout is torch.strided
            and tensor.numel()
        ):
            groups[tensor.untyped_storage().data_ptr(), tensor.dtype].append(tensor)
        else:
            groups[id(tensor)].append(tensor)
    return list(groups.values())


def _copy_group(group: Sequence[Tensor], change: Change) -> dict[int, Tensor]:
    if len(group) == 1 and not _is_spread(group[0]):
        return {id(group[0]): change(group[0].detach().clone())}
    begin = min(tensor.storage_offset() for tensor in group)
    end = max(tensor.storage_offset() + _extent(tensor) for tensor in group)
    with torch.no_grad():
        flat = change(group[0].detach().as_strided((end - begin,), (1,), begin).clone())
    return {
        id(tensor): flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - begin)
        for tensor in group
    }


def _is_spread(tensor: Tensor) -> bool:
    """Whether `clone` would change the strides."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return tensor.numel() > 0 and _extent(tensor) != tensor.numel()


def _extent(tensor: Tensor) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _restore_autograd_state(original: Tensor, copied: Tensor) -> Tensor:
    if isinstance(original, nn.Parameter):
        return nn.Parameter(copied, requires_grad=original.requires_grad)
    if not original.requires_grad:
        return copied
    leaf = copied.detach().requires_grad_()
    return make_computed(leaf) if is_computed(original) else leaf
