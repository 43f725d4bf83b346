"""Runs a model's forward and backward, with tensors placed by a plan, to count its ops."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from shardscope._torch.dtensor import local_part, quiet_collectives
from shardscope._torch.fake import NO_DATA, is_fake, without_data
from shardscope._torch.module_calls import watch_module_calls
from shardscope._torch.modules import (
    every_module,
    exchange_tensors,
    named_modules_with_aliases,
    own_parameters,
    preserved_model,
)
from shardscope._torch.process_groups.simulated_tensors import meshes_with_data
from shardscope._torch.random_state import preserved_random_state
from shardscope.attribution.module_calls import BucketRegistry, ModuleCalls
from shardscope.attribution.module_names import ModuleNames
from shardscope.attribution.tensors import (
    TensorSubstitution,
    differentiable,
    map_tensors,
    tensors_in,
)
from shardscope.errors import CoverageError, ShardscopeError
from shardscope.record.patterns import matches_name
from shardscope.shard.coverage.dispatch import describe
from shardscope.shard.coverage.levels import run_or_replicate
from shardscope.shard.coverage.op_calls import Capture, Recorder

_NESTED = (
    "the model uses nested tensors, which are not DTensors and cannot be tested. Call coverage() "
    "on the parts of the model that take padded ones."
)
_NO_GRADIENT = "does not require grad"

Report = Callable[[str, str], None]


@dataclass(frozen=True)
class Program:
    """A model and how to run it: `forward` calls it, and backward starts from its output.

    `has_backward` is False for a step that runs backward itself. `lay_out` makes the substitute,
    without data, for a tensor of the model or of its arguments.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    forward: Callable[..., Any]
    lay_out: Callable[[torch.Tensor], torch.Tensor]
    has_backward: bool = True


@final
@dataclass(frozen=True)
class CapturedOps:
    """The captured calls: `written` as torch.export has them (forward), `called` by autograd.

    `handlers` are those that the program registered to run ops instead of DTensor.
    """

    names: ModuleNames
    written: Capture
    called: Capture
    handlers: dict[Any, Any]


def run_model(program: Program, report: Report) -> CapturedOps:
    """Capture the ops of `program`; ops that cannot be captured are reported as gaps."""
    if any(tensor.is_nested for tensor in _tensors(program)):
        raise CoverageError(_NESTED)
    try:
        with without_data():
            return _run(program, program.lay_out, report)
    except NO_DATA as error:
        if any(tensor.is_meta or is_fake(tensor) for tensor in _tensors(program)):
            raise CoverageError(
                f"the model reads values of tensors without data ({describe(error)}). Build the "
                "model and its inputs with data, not on meta (on the command line: --data)."
            ) from error
    return _run(program, lambda tensor: tensor.detach().clone(), report)


def _tensors(program: Program) -> Iterator[torch.Tensor]:
    yield from tensors_in((program.args, program.kwargs))
    yield from program.model.parameters()
    yield from program.model.buffers()


def _run(
    program: Program, make: Callable[[torch.Tensor], torch.Tensor], report: Report
) -> CapturedOps:
    names = ModuleNames(program.model)
    calls = ModuleCalls(names, BucketRegistry(names, report), report)
    with ExitStack() as stack:
        stack.enter_context(preserved_random_state())
        stack.enter_context(preserved_model(program.model))
        stack.enter_context(meshes_with_data())
        stack.enter_context(calls.marking_threads())
        stack.enter_context(watch_module_calls(calls))
        stack.enter_context(_uncompiled())
        substitution = TensorSubstitution(make)
        exchange_tensors(program.model, substitution.of)
        args = map_tensors(program.args, substitution.of)
        kwargs = map_tensors(program.kwargs, substitution.of)
        recorder = _run_forward_backward(program, calls, args, kwargs, report)
        called = recorder.captured
        written = _run_inference(program, calls, args, kwargs, report)
        if written is None:
            written = {call: use for call, use in called.items() if use.forward}
        return CapturedOps(names, written, called, recorder.handlers)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled parts of a model eagerly: a compiled graph would hide its ops."""
    eager = torch.compiler.set_stance("force_eager")
    # In eval mode attention would run a fused op that torch.export does not use.
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with eager, quiet_collectives(), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # they are the model's, and are issued when it really runs
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)


def _is_placed(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _run_forward_backward(
    program: Program, calls: ModuleCalls, args: Any, kwargs: Any, report: Report
) -> Recorder:
    recorder = Recorder(calls, run_or_replicate, report, is_placed=_is_placed(program.model))
    with torch.enable_grad():
        with _explain_failure("forward"), recorder:
            output = program.forward(*args, **kwargs)
        roots = differentiable(output) if program.has_backward else []
        if program.has_backward and not roots and _is_trained(program.model):
            kind = type(output).__name__
            report("backward", f"nothing in the output, a {kind}, has a gradient: give loss=")
        seeds = [torch.ones_like(root) for root in roots]
        with _explain_failure("backward"), recorder:
            if roots:
                _differentiate(recorder, roots, seeds, report)
    return recorder


def _differentiate(
    recorder: Recorder, roots: list[torch.Tensor], seeds: list[torch.Tensor], report: Report
) -> None:
    try:
        torch.autograd.backward(roots, seeds)
    except Exception as error:
        # The backward of higher-order ops traces their functions, which fails under some modes.
        if not recorder.higher_order_ops or isinstance(error, NO_DATA):
            raise
        fact = f"backward ended at it ({describe(error)}), so the ops after it were not tested"
        report(", ".join(sorted(recorder.higher_order_ops)), fact)


def _run_inference(
    program: Program, calls: ModuleCalls, args: Any, kwargs: Any, report: Report
) -> Capture | None:
    """The calls of a forward without autograd, which would decompose composite ops."""
    recorder = Recorder(calls, run_or_replicate, report, is_placed=_is_placed(program.model))
    try:
        with torch.inference_mode(), recorder:
            program.forward(*args, **kwargs)
    except NO_DATA:
        raise
    except Exception as error:  # noqa: BLE001 - models may need autograd within their forward
        if not program.has_backward and _NO_GRADIENT in str(error):
            return recorder.captured  # the step has come to its backward
        report(
            "exported",
            f"the forward does not run without autograd ({describe(error)}), so the ops of this "
            "level are those that autograd called",
        )
        return None
    return recorder.captured


@contextmanager
def _explain_failure(part: str) -> Iterator[None]:
    try:
        yield
    except (ShardscopeError, *NO_DATA):
        raise
    except Exception as error:
        if _is_about_nested(error):
            raise CoverageError(_NESTED) from error
        raise CoverageError(
            f"the model's {part} raised {describe(error)}. Run the model with the same "
            "arguments first, without shardscope."
        ) from error


def _is_about_nested(error: Exception) -> bool:
    """Whether nested tensors, which need data, raised the error; its message does not say so."""
    return any(
        str(frame.f_globals.get("__name__")).startswith(torch.nested.__name__)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


Placements = Placement | Sequence[Placement]
Plan = Mapping[str, Placements] | Callable[[nn.Module, DeviceMesh], Any]
"""Placements by patterns of parameter names, or a function that shards a model in place."""


@final
class Layout:
    """The placements of each parameter; parameters that no pattern matches are replicated."""

    def __init__(
        self, mesh: DeviceMesh, placements_by_id: dict[int, tuple[Placement, ...]]
    ) -> None:
        self._mesh = mesh
        self._placements_by_id = placements_by_id

    def lay_out(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A DTensor without data in place of `tensor`."""
        replicated = tuple(Replicate() for _ in range(self._mesh.ndim))
        placements = self._placements_by_id.get(id(tensor), replicated)
        shape = local_part(tensor.shape, self._mesh, placements)
        local = torch.empty(shape, dtype=tensor.dtype, device=device)
        return DTensor.from_local(
            local,
            self._mesh,
            placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        ).detach()


def read_layout(model: nn.Module, plan: Mapping[str, Placements], mesh: DeviceMesh) -> Layout:
    """The plan's placements for the parameters of `model`, including tied ones."""
    named = dict(_named_parameters(model))
    placements_by_id: dict[int, tuple[Placement, ...]] = {}
    for pattern, placements in plan.items():
        placements_per_axis = _read_placements(pattern, placements, mesh)
        matches = [name for name in named if _matches_tensor(pattern, name)]
        for name in matches:
            _check_dims(pattern, name, named[name], placements_per_axis)
        if not matches:
            examples = ", ".join(list(named)[:3]) or "no parameters at all"
            raise CoverageError(
                f"the plan names {pattern!r}, but the model has no such parameter (it has "
                f"{examples} …). Use full names or a pattern: * matches one part of a name, ** any "
                "number of parts."
            )
        placements_by_id |= {id(named[name]): placements_per_axis for name in matches}
    return Layout(mesh, placements_by_id)


def _matches_tensor(pattern: str, name: str) -> bool:
    """Whether a plan's pattern matches a parameter or the module that owns it, as in `audit`."""
    return matches_name(pattern, name) or matches_name(pattern, name.rpartition(".")[0])


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in named_modules_with_aliases(model):
        for name, parameter in own_parameters(module):
            yield f"{prefix}.{name}".lstrip("."), parameter


def _read_placements(
    pattern: str, placements: Placements, mesh: DeviceMesh
) -> tuple[Placement, ...]:
    value: Any = placements
    per_axis = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(placement, Placement) for placement in per_axis):
        kind = next(
            type(placement).__name__
            for placement in per_axis
            if not isinstance(placement, Placement)
        )
        raise CoverageError(
            f"the plan gives {pattern!r} a {kind}, which is not a placement. Give Shard(0) or "
            "Replicate() for each axis of the mesh, or, to use parallel styles, a function that "
            "calls parallelize_module."
        )
    if len(per_axis) != mesh.ndim:
        raise CoverageError(
            f"the plan gives {pattern!r} {len(per_axis)} placements, but the mesh has "
            f"{mesh.ndim} {'axis' if mesh.ndim == 1 else 'axes'}. Give one for each axis."
        )
    return per_axis


def _check_dims(
    pattern: str, name: str, parameter: torch.Tensor, placements: tuple[Placement, ...]
) -> None:
    for placement in placements:
        dim = getattr(placement, "dim", 0)
        if not -parameter.ndim <= dim < max(1, parameter.ndim):
            raise CoverageError(
                f"the plan gives {pattern!r} {placement!r}, but {name} has {parameter.ndim} dims. "
                "Give a dim that it has."
            )


def parallelize_copy(
    model: nn.Module, parallelize: Callable[[nn.Module, DeviceMesh], Any], mesh: DeviceMesh
) -> nn.Module:
    """A copy of `model` on meta, sharded by the function."""
    try:
        sharded = copy.deepcopy(model, _meta_copies(model))
    except Exception as error:
        raise CoverageError(
            f"the model cannot be copied to be sharded ({describe(error)}). Shard it yourself "
            "within simulate(), and call coverage() on it there, without a plan."
        ) from error
    result = parallelize(sharded, mesh)
    return result if isinstance(result, nn.Module) else sharded


def _meta_copies(model: nn.Module) -> dict[int, Any]:
    """The memo for deepcopy(): tensors on meta as copies of the model's tensors."""
    copies: dict[int, Any] = {}
    for module in every_module(model):
        tensors = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        all_tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False), *tensors)
        for tensor in all_tensors:
            meta = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
    return copies
