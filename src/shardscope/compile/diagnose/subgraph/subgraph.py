"""`Subgraph`: a graph with the values that it is called with; copies of values, and runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from shardscope._torch.graph import switched_back
from shardscope._torch.random_state import seed_torch
from shardscope._torch.storage import is_wrapper_type


@final
@dataclass(frozen=True)
class Subgraph:
    """A graph, and one value for each of its placeholders, in order.

    The graph's output is a flat tuple of nodes and constants. Nodes have dynamo's metadata in
    `meta` (`stack_trace`, `nn_module_stack`). Tensors among `inputs` require grad and are leaves as
    in the program's call; code that runs a subgraph copies them first.
    """

    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    with_gradients: bool  # record gradients when it runs, and compare them if there are any
    has_symbolic_sizes: bool = False  # dynamo captured symbolic sizes instead of numbers


@final
@dataclass(frozen=True)
class Compiler:
    """A backend by name or as a callable, and the other arguments of torch.compile."""

    backend: str | Callable[..., Any]
    options: Mapping[str, Any] | None = None
    mode: str | None = None
    dynamic: bool | None = None
    config: Mapping[str, Any] = field(default_factory=dict)  # Inductor's, patched while it runs

    @property
    def name(self) -> str:
        """The name of the backend in reports."""
        if isinstance(self.backend, str):
            return self.backend
        return getattr(self.backend, "__name__", type(self.backend).__name__)


def map_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same value with all leaves of type `kind` changed; named tuples become plain tuples."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple | list):
        parts = [map_leaves(part, kind, change) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {key: map_leaves(part, kind, change) for key, part in value.items()}
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        return slice(*(map_leaves(part, kind, change) for part in ends))
    return value


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same value with its tensors changed."""
    return map_leaves(value, torch.Tensor, change)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a value, in the order in which `map_tensors` changes them."""
    tensors: list[torch.Tensor] = []
    map_tensors(value, tensors.append)
    return iter(tensors)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is a dense tensor whose bytes are accessible."""
    is_plain = tensor.layout is torch.strided and not is_wrapper_type(type(tensor))
    return is_plain and not tensor.is_meta and not tensor.is_quantized and not tensor.is_nested


@torch.inference_mode(False)
@torch.no_grad()
def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with equal values, sizes and strides, without gradients, in new memory."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not has_memory(tensor):
        return tensor.clone()
    size, stride = tensor.size(), tensor.stride()
    steps = [(dim_size - 1) * step for dim_size, step in zip(size, stride, strict=True)]
    length = 1 + sum(steps) if math.prod(size) else 0
    flat = tensor.as_strided((length,), (1,)).clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(flat.untyped_storage(), 0, size, stride)


def is_non_leaf(tensor: Tensor) -> bool:
    """Whether it is a non-leaf tensor that requires grad."""
    return tensor.requires_grad and not tensor.is_leaf


def make_non_leaf(leaf: Tensor) -> Tensor:
    """A non-leaf tensor with the same memory, which autograd treats as computed from `leaf`."""
    with torch.enable_grad():
        computed: Tensor = _NonLeaf.apply(leaf)  # type: ignore[no-untyped-call]
    return computed


def find_leaf(tensor: Tensor) -> Tensor:
    """The leaf of a tensor from `make_non_leaf`; any other tensor itself."""
    step = tensor.grad_fn
    if step is None or step.name() != f"{_NonLeaf.__name__}Backward":
        return tensor
    ((accumulate, _),) = step.next_functions
    leaf: Tensor = accumulate.variable  # type: ignore[union-attr]
    return leaf


@final
class _NonLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        if not has_memory(leaf):
            return leaf.clone()
        # A view would be marked as one, and could not be written to.
        bare = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        layout = (leaf.storage_offset(), leaf.size(), leaf.stride())
        return bare.set_(leaf.untyped_storage(), *layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


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
    with_backward: bool = True,
    report_phase: PhaseCallback = ignore_phase,
) -> RunValues:
    """Call with `inputs`, which may be changed, and compute gradients of differentiable outputs."""
    seed_torch(seed)
    leaves = {name: find_leaf(value) for name, value in name_inputs(inputs).items()}
    with torch.set_grad_enabled(with_gradients), switched_back():
        outputs = call(inputs)
    synchronize_device()
    named = _name_outputs(outputs)
    values = {name: _copy_output(value) for name, value in named.items()}
    if not with_gradients or not with_backward:
        return RunValues(values, {})
    report_phase("backward")
    gradients = compute_gradients(named, leaves)
    synchronize_device()
    return RunValues(values, gradients)


def synchronize_device() -> None:
    """Synchronize with the device, so that a failing kernel raises here."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def compute_gradients(
    outputs: Mapping[str, Any], inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
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
    return make_non_leaf(leaf) if is_non_leaf(original) else leaf
