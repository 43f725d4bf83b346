"""Samples values of training steps: statistics of outputs, gradients, parameters and inputs.

`ValueSamples` says of which steps, and `ValueSampler` takes the samples while a trace is entered.
Statistics are computed where the tensors are, and read once at the end of a step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.dispatch import disable_dispatch_modes
from shardscope._torch.fake import is_fake
from shardscope._torch.mesh import axis_names, describe_placements
from shardscope._torch.module_calls import watch_results
from shardscope._torch.modules import is_wrapper, own_buffers, own_parameters
from shardscope._torch.storage import count_writes
from shardscope._torch.training_hooks import TrainingListener, unwatched, watch_training
from shardscope.attribution.module_calls import ModuleCalls
from shardscope.attribution.module_names import NO_MODULE, ModuleNames
from shardscope.attribution.program_records import is_simulated
from shardscope.comm.recorder import raise_if_from_signal
from shardscope.comm.value_selection import ValueSamples
from shardscope.comm.value_statistics import StatisticsBuffer
from shardscope.record import ValueKind, ValueSample

_PLACE = "values"
_SETTINGS = ("lr", "momentum", "weight_decay", "betas", "eps", "alpha", "dampening")
_MATMUL_PRECISION = "unit roundoff of float32 matmul"
_PLAIN_CLASSES = (torch.Tensor, nn.Parameter, nn.Buffer)
_MAX_DEPTH = 8  # of containers in what a module returns


@final
class ValueSampler(TrainingListener):
    """Samples the values of a trace. A step ends when a model is called after its optimizer.

    `report` is called with a sentence on what could not be sampled, `emit` with each sample.
    """

    def __init__(
        self,
        samples: ValueSamples,
        names: ModuleNames,
        calls: ModuleCalls,
        *,
        first_step: int,
        report: Callable[[str], None],
        emit: Callable[[ValueSample], None] | None,
    ) -> None:
        self.rank = 0
        self.records: list[ValueSample] = []
        self.keeps_records = True  # in memory, besides those that are emitted
        self._samples = samples
        self._names = names
        self._calls = calls
        self._report = report
        self._emit = emit
        self._step = first_step
        self._buffer = StatisticsBuffer()
        self._pending: list[tuple[ValueSample, int | None]] = []
        self._lock = threading.RLock()  # backward may run on a thread of torch's
        self._num_samples = 0
        self._last_step = -1  # the last step whose updated parameters were sampled
        self._thread = 0
        self._begin_step()

    def _begin_step(self) -> None:
        self._has_begun = False
        self._has_stepped = False
        self._is_clipped = False
        self._num_calls: dict[tuple[ValueKind, str], int] = {}
        self._sampled: set[tuple[ValueKind, int]] = set()  # ids of parameters
        self._recent: dict[int, tuple[weakref.ref[torch.Tensor], int, int | None]] = {}
        self._is_training = False  # whether the model that runs now is being trained
        self._wrappers: list[int] = []  # calls that were sampled when each running wrapper began

    @property
    def is_wanted(self) -> bool:
        """Whether the current step is to be sampled."""
        steps = self._samples.steps
        return steps is None or self._step in steps

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample what this thread does until the context ends, and its backward passes."""
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            stack.enter_context(watch_results(self))
            stack.enter_context(watch_training(self, has_reads=False))
            yield

    # ── Calls of modules ─────────────────────────────────────────────────────────────────────

    def begin_call(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A module is called: the outermost may begin a step."""
        if threading.get_ident() != self._thread or is_in_backward():
            return
        is_training = torch.is_grad_enabled()
        with self._guarding("the beginning of a module call"):
            if self._calls.caller() == NO_MODULE:
                self._is_training = is_training
                if is_training:
                    self._begin_forward(args, kwargs)
            if self._is_training and self.is_wanted and is_wrapper(module):
                self._wrappers.append(self._num_samples)

    def _begin_forward(self, args: Any, kwargs: dict[str, Any]) -> None:
        if self._has_stepped:
            self.end_step()
            self._is_training = True
        if not self.is_wanted:
            return
        name = self._names.name(self._calls.running())
        if not self._has_begun:
            self._has_begun = True
            if self._samples.parameters and self._last_step != self._step - 1:
                self._sample_parameters(ValueKind.WEIGHT)
        if self._samples.outputs and name is not None:
            self._sample_tree(ValueKind.INPUT, name, (args, kwargs))

    def end_call(self, module: nn.Module, result: Any) -> None:
        """A module call has returned: sample its output and, later, that output's gradient."""
        if threading.get_ident() != self._thread or not self._is_training or is_in_backward():
            return
        if not self._samples.outputs or not self.is_wanted:
            return
        with self._guarding(f"the output of a {type(module).__name__}"):
            if is_wrapper(module) and self._wrappers:
                begun = self._wrappers.pop()
                if self._num_samples > begun:
                    return  # the wrapped module was seen, and has the same name
            name = self._names.name(self._calls.running())
            if name is not None and self._samples.includes(name):
                self._sample_tree(ValueKind.OUTPUT, name, result)

    def _sample_tree(self, kind: ValueKind, name: str, value: Any) -> None:
        found = list(_list_tensors(value))
        call = self._count_call(kind, name)
        for index, tensor in enumerate(found):
            path = str(index) if len(found) > 1 else ""
            sample = self._describe(tensor, kind, name, path=path, call=call)
            self._add_cached(tensor, sample)
            if kind is ValueKind.OUTPUT and tensor.requires_grad and not tensor.is_leaf:
                self._watch_gradient(tensor, name, path, call)

    def _count_call(self, kind: ValueKind, name: str) -> int:
        call = self._num_calls.get((kind, name), 0)
        self._num_calls[kind, name] = call + 1
        return call

    def _watch_gradient(self, tensor: torch.Tensor, name: str, path: str, call: int) -> None:
        step = self._step

        def sample(gradient: torch.Tensor) -> None:
            if self._step != step:
                return
            with self._guarding(f"the gradient of {name}"):
                kind = ValueKind.OUTPUT_GRADIENT
                record = self._describe(gradient, kind, name, path=path, call=call)
                self._add_cached(gradient, record)

        tensor.register_hook(sample)  # type: ignore[no-untyped-call]

    # ── What a step does outside its modules ─────────────────────────────────────────────────

    def before_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Backward starts: sample the losses."""
        if not self._has_begun or is_in_backward():
            return
        with self._guarding("the loss"):
            for tensor in tensors:
                if tensor.numel() == 1:
                    call = self._count_call(ValueKind.LOSS, "loss")
                    self._add(tensor, self._describe(tensor, ValueKind.LOSS, "loss", call=call))

    def after_backward(self) -> None:
        """Gradients may be incomplete: they are sampled when they are used."""

    def before_clipping(self) -> None:
        """Sample gradients before they are clipped."""
        if self._has_begun and self._samples.gradients:
            with self._guarding("gradients before clipping"):
                self._is_clipped = True
                self._sample_gradients(ValueKind.GRADIENT)

    def clip(self, norm: torch.Tensor) -> None:
        """The clipped gradients tell the norm."""

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Sample the gradients that the optimizer gets, and its settings."""
        if self._has_begun:
            with self._guarding("what an optimizer gets"):
                own = {id(p) for group in optimizer.param_groups for p in group["params"]}
                if self._samples.gradients:
                    self._sample_gradients(ValueKind.GRADIENT, own if is_in_backward() else None)
                    if self._is_clipped:
                        self._sample_gradients(ValueKind.CLIPPED, own)
                self._sample_settings(optimizer)
        self._has_stepped = True

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Sample the parameters that an optimizer has updated, and the buffers."""
        if self._has_begun and self._samples.parameters and not is_in_backward():
            with self._guarding("what an optimizer has updated"):
                own = {id(p) for group in optimizer.param_groups for p in group["params"]}
                self._sample_parameters(ValueKind.UPDATED, own)
                self._sample_buffers()

    def read(self, tensor: torch.Tensor, value: object) -> None:
        """Values that the program reads are not sampled."""

    def after_collective(
        self, kind: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """What collectives return is not sampled."""

    def _sample_gradients(self, kind: ValueKind, only: set[int] | None = None) -> None:
        for name, parameter in self._list_parameters():
            gradient = _gradient_of(parameter)
            if gradient is None or (only is not None and id(parameter) not in only):
                continue
            if (kind, id(parameter)) not in self._sampled:
                self._sampled.add((kind, id(parameter)))
                self._add(gradient, self._describe(gradient, kind, name))

    def _sample_parameters(self, kind: ValueKind, only: set[int] | None = None) -> None:
        for name, parameter in self._list_parameters():
            if only is None or id(parameter) in only:
                self._add_once(parameter, kind, name)

    def _sample_buffers(self) -> None:
        for name, buffer in self._list_tensors(own_buffers):
            self._add_once(buffer, ValueKind.BUFFER, name)

    def _add_once(self, tensor: torch.Tensor, kind: ValueKind, name: str) -> None:
        """Add a sample of a parameter or buffer, unless this step has it already."""
        if (kind, id(tensor)) not in self._sampled:
            self._sampled.add((kind, id(tensor)))
            self._add(tensor, self._describe(tensor, kind, name))

    def _list_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._list_tensors(own_parameters):
            if not is_lazy(parameter):
                yield name, parameter

    def _list_tensors(
        self, list_own: Callable[[nn.Module], Iterable[tuple[str, torch.Tensor]]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Named tensors of all modules, each once: shared ones under their first name."""
        known: set[int] = set()
        for index, module_name in enumerate(self._names.names):
            module = self._names.module(index)
            for name, tensor in () if module is None else list_own(module):
                full_name = f"{module_name}.{name}".lstrip(".")
                if id(tensor) not in known and self._samples.includes(full_name):
                    known.add(id(tensor))
                    yield full_name, tensor

    def _sample_settings(self, optimizer: Optimizer) -> None:
        numbers: dict[str, dict[float, None]] = {}
        for group in optimizer.param_groups:
            for key in _SETTINGS:
                for name, value in _list_numbers(
                    f"{type(optimizer).__name__}.{key}", group.get(key)
                ):
                    if isinstance(value, torch.Tensor):
                        call = self._count_call(ValueKind.SETTING, name)
                        record = self._describe(value, ValueKind.SETTING, name, call=call)
                        self._add(value, record)
                    else:
                        numbers.setdefault(name, {})[value] = None
        if any(parameter.is_cuda for _, parameter in self._list_parameters()):
            is_exact = torch.get_float32_matmul_precision() == "highest"
            numbers[_MATMUL_PRECISION] = {2.0**-24 if is_exact else 2.0**-11: None}
        for name, values in numbers.items():
            for index, number in enumerate(values):
                path = str(index) if len(values) > 1 else ""
                self._add_number(name, path, number)

    def _add_number(self, name: str, path: str, number: float) -> None:
        record = ValueSample(
            rank=self.rank,
            step=self._step,
            order=self._next_order(),
            kind=ValueKind.SETTING,
            name=name,
            path=path,
            call=self._count_call(ValueKind.SETTING, f"{name} {path}"),
            sum=number,
            sum_squares=number * number,
            max_abs=abs(number),
        )
        self._pending.append((record, None))

    # ── Statistics ───────────────────────────────────────────────────────────────────────────

    def _describe(
        self, tensor: torch.Tensor, kind: ValueKind, name: str, *, path: str = "", call: int = 0
    ) -> ValueSample:
        """The record of a tensor, without its statistics."""
        axes: tuple[str, ...] = ()
        coordinate: tuple[int, ...] = ()
        placements: tuple[str, ...] = ()
        mesh_rank = None
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            axes, placements = axis_names(mesh), describe_placements(tensor.placements)
            coordinate = tuple(mesh.get_coordinate() or ())
            mesh_rank = int(mesh.mesh.min())
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return ValueSample(
            rank=self.rank,
            step=self._step,
            order=self._next_order(),
            kind=kind,
            name=name,
            path=path,
            call=call,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            local_shape=tuple(local.shape),
            axes=axes,
            coordinate=coordinate,
            placements=placements,
            mesh_rank=mesh_rank,
        )

    def _next_order(self) -> int:
        with self._lock:
            self._num_samples += 1
            return self._num_samples - 1

    def _add_cached(self, tensor: torch.Tensor, record: ValueSample) -> None:
        """Add a sample; a tensor that a module passes on unchanged is read once."""
        version = count_writes(tensor)
        known = self._recent.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version:
            if known[2] is not None:
                with self._lock:
                    self._pending.append((record, known[2]))
            return
        self._recent[id(tensor)] = (weakref.ref(tensor), version, self._add(tensor, record))

    def _add(self, tensor: torch.Tensor, record: ValueSample) -> int | None:
        """Begin to compute the statistics of a tensor; its number in the buffer."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if hasattr(local, "wait"):  # the result of a collective that is not complete yet
            local = local.wait()
        if (reason := _explain_unreadable(local)) is not None:
            self._report(f"{record.kind} of {record.name or 'the model'} was not sampled: {reason}")
            return None
        with self._lock:
            number = self._buffer.add(local)
            self._pending.append((record, number))
        return number

    def end_step(self) -> None:
        """Sample what a step leaves behind, read all statistics, and count the step."""
        with self._guarding("the end of a step"):
            if self._has_begun and self._samples.parameters and self._has_stepped:
                self._sample_parameters(ValueKind.UPDATED)
                self._sample_buffers()
                self._last_step = self._step
        self.flush()
        self._step += 1
        self._begin_step()

    def pause(self) -> None:
        """The trace is left: end the step if an optimizer has stepped."""
        if self._has_stepped:
            self.end_step()
        else:
            self.flush()

    def flush(self) -> None:
        """Wait for the statistics of all samples so far, and make their records."""
        with self._guarding("the statistics of a step"), self._lock:
            pending, self._pending = self._pending, []
            self._recent.clear()
            results = self._buffer.read()
            for record, number in pending:
                complete = record
                if number is not None:
                    result = results[number]
                    complete = replace(
                        record,
                        rank=self.rank,
                        sum=result.sum,
                        sum_squares=result.sum_squares,
                        max_abs=result.max_abs,
                        num_nonfinite=result.num_nonfinite,
                        hash=result.hash,
                    )
                if self.keeps_records:
                    self.records.append(complete)
                if self._emit is not None:
                    self._emit(complete)

    def set_rank(self, rank: int) -> None:
        """Assign the rank, now known, to all samples."""
        self.rank = rank
        self.records[:] = [replace(record, rank=rank) for record in self.records]
        self._pending[:] = [(replace(record, rank=rank), n) for record, n in self._pending]

    @contextmanager
    def _guarding(self, what: str) -> Iterator[None]:
        """Run our code inside the user's: without autograd and modes; errors become gaps."""
        try:
            with torch.no_grad(), disable_dispatch_modes(), unwatched():
                yield
        except Exception as error:  # noqa: BLE001 - tracing must not fail the run
            raise_if_from_signal(error)
            self._report(f"{what} could not be sampled ({error!r})")


def describe_simulation() -> str | None:
    """Why values of this world are not those of a real run; None if they are."""
    if dist.is_initialized() and is_simulated() and str(dist.get_backend()) == "fake":
        return "collectives of a simulated world move no data, so that values are not a real run's"
    return None


def _explain_unreadable(local: torch.Tensor) -> str | None:
    """Why statistics of a local tensor cannot be computed; None if they can."""
    if local.is_meta or is_fake(local):
        return "its tensors have no data"
    if type(local) not in _PLAIN_CLASSES:
        return f"a {type(local).__name__} is not a plain tensor"
    if local.layout is not torch.strided or local.is_quantized:
        return f"its layout is {local.layout}"
    if local.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return None


def _list_tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in nested containers of a module's arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            items: Iterable[Any] = value.values()
        elif isinstance(value, list | tuple):
            items = value
        elif is_dataclass(value) and not isinstance(value, type):
            items = vars(value).values() if hasattr(value, "__dict__") else ()
        else:
            return
        for item in items:
            yield from _list_tensors(item, depth + 1)


def _list_numbers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _list_numbers(f"{name}[{index}]", item)
    elif isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter, also where a framework accumulates it in `main_grad`."""
    if parameter.grad is not None:
        return parameter.grad
    main_grad = getattr(parameter, "main_grad", None)
    return main_grad if isinstance(main_grad, torch.Tensor) else None
