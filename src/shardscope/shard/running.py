"""Running a model, forwards and backwards, so that its ops can be counted and nothing is left.

First on tensors without data; a model that looks at values runs again on copies of its own.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardscope._torch.fakes import NO_DATA, is_fake, without_data
from shardscope._torch.model_state import exchange_tensors, kept_model
from shardscope._torch.module_calls import watch_module_calls
from shardscope._torch.propagation import quiet_collectives
from shardscope._torch.random_state import preserved_random_state
from shardscope._torch.simulated_group import meshes_with_data
from shardscope.comm.buckets import BucketBook
from shardscope.comm.calls import ModuleCalls
from shardscope.comm.names import ModuleNames
from shardscope.errors import CoverageError, ShardscopeError
from shardscope.shard.capture import Capture, Recorder
from shardscope.shard.dispatch import describe
from shardscope.shard.outputs import differentiable, tensors_in
from shardscope.shard.replication import run_somehow
from shardscope.shard.stand_ins import StandIns, map_tensors

__all__ = ["Captured", "Program", "Report", "run_model"]

_NESTED = (
    "the model uses nested tensors, which are not DTensors and cannot be tested. Call coverage() "
    "on the parts of the model that take padded ones."
)
_NO_GRADIENT = "does not require grad"

Report = Callable[[str, str], None]


@dataclass(frozen=True)
class Program:
    """A model and how to run it: `forward` calls it, `backward` begins where the output ends.

    A step that does both by itself has no `backward`. `lay_out` makes the stand-in for a tensor of
    the model's or of its arguments.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    forward: Callable[..., Any]
    lay_out: Callable[[torch.Tensor], torch.Tensor]
    has_backward: bool = True


@final
@dataclass(frozen=True)
class Captured:
    """Ops as torch.export would write them (forward only), and as autograd calls them.

    `handlers` run ops in DTensor's place where the program asked for it.
    """

    names: ModuleNames
    written: Capture
    called: Capture
    handlers: dict[Any, Any]


def run_model(program: Program, report: Report) -> Captured:
    """Capture the ops of `program`; what could not be is reported as a gap."""
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
) -> Captured:
    names = ModuleNames(program.model)
    calls = ModuleCalls(names, BucketBook(names, report), report)
    with ExitStack() as stack:
        stack.enter_context(preserved_random_state())
        stack.enter_context(kept_model(program.model))
        stack.enter_context(meshes_with_data())
        stack.enter_context(calls.watching())
        stack.enter_context(watch_module_calls(calls))
        stack.enter_context(_uncompiled())
        stand_ins = StandIns(make)
        exchange_tensors(program.model, stand_ins.of)
        args = map_tensors(program.args, stand_ins.of)
        kwargs = map_tensors(program.kwargs, stand_ins.of)
        trained = _train(program, calls, args, kwargs, report)
        called = trained.captured
        written = _infer(program, calls, args, kwargs, report)
        if written is None:
            written = {call: use for call, use in called.items() if use.forward}
        return Captured(names, written, called, trained.handlers)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Compiled parts of a model run as they were written: a graph would hide its ops."""
    eager = torch.compiler.set_stance("force_eager")
    # In eval, attention would take a way of its own, of one op, that torch.export does not.
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with eager, quiet_collectives(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are the model's, and said when it really runs
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)


def _is_placed(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _is_trained(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _train(
    program: Program, calls: ModuleCalls, args: Any, kwargs: Any, report: Report
) -> Recorder:
    recorder = Recorder(calls, run_somehow, report, is_placed=_is_placed(program.model))
    with torch.enable_grad():
        with _named_failure("forward"), recorder:
            output = program.forward(*args, **kwargs)
        roots = differentiable(output) if program.has_backward else []
        if program.has_backward and not roots and _is_trained(program.model):
            kind = type(output).__name__
            report("backward", f"nothing in the output, a {kind}, has a gradient: give loss=")
        seeds = [torch.ones_like(root) for root in roots]
        with _named_failure("backward"), recorder:
            if roots:
                _differentiate(recorder, roots, seeds, report)
    return recorder


def _differentiate(
    recorder: Recorder, roots: list[torch.Tensor], seeds: list[torch.Tensor], report: Report
) -> None:
    try:
        torch.autograd.backward(roots, seeds)
    except Exception as error:
        # Their backward traces the functions, and not under every mode.
        if not recorder.functional or isinstance(error, NO_DATA):
            raise
        fact = f"backward ended at it ({describe(error)}), so the ops after it were not tested"
        report(", ".join(sorted(recorder.functional)), fact)


def _infer(
    program: Program, calls: ModuleCalls, args: Any, kwargs: Any, report: Report
) -> Capture | None:
    """The forward once more without autograd, which would have taken composite ops apart."""
    recorder = Recorder(calls, run_somehow, report, is_placed=_is_placed(program.model))
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
def _named_failure(part: str) -> Iterator[None]:
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
    """Whether it comes from nested tensors, which cannot be without data; it does not say so."""
    return any(
        str(frame.f_globals.get("__name__")).startswith(torch.nested.__name__)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )
