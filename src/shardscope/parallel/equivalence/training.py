"""Observes steps of training: losses, gradients before and after clipping, what the optimizer does.

A `TrainingRecorder` records what one rank, or the single device, does in each step that runs while
it is watching. Tensors are copied when they are observed; `take` returns those of a step.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Number
from typing import Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.modules import is_wrapper, named_modules_with_aliases
from shardscope._torch.training_hooks import TrainingListener, watch_training
from shardscope.attribution.call_sites import read_stack
from shardscope.parallel.equivalence.modes import ModuleMode, depends_on_mode, draws_in_training
from shardscope.parallel.equivalence.names import OriginalNames, named_items, tie_names
from shardscope.parallel.equivalence.readings import count_readings
from shardscope.record import Source, TensorKind

Table = tuple[TensorKind, str]
"""The kind of the tensors of parameters, and for optimizer state which of its entries."""
Key = tuple[TensorKind, str]

TrainStep = Callable[..., object]
"""`train_step(model, batch, optimizer)`, perhaps with a fourth parameter, the mesh."""
MakeOptimizer = Callable[[nn.Module], object]

CLIPPED: Table = (TensorKind.CLIPPED, "")
RAW: Table = (TensorKind.GRADIENT, "after backward")
REDUCED: Table = (TensorKind.GRADIENT, "after collectives")
UPDATED: Table = (TensorKind.UPDATED, "")
DECISION: Key = (TensorKind.SETTING, "metric of ReduceLROnPlateau")
_NORM: Key = (TensorKind.NORM, "gradient norm")
_LOSS: Key = (TensorKind.LOSS, "loss")


@final
@dataclass(frozen=True, eq=False)
class Training:
    """How a model is trained: a function that runs one step, and one that makes the optimizer.

    `rank_step` runs a step on the ranks; it may be the same function.
    """

    step: TrainStep
    rank_step: TrainStep
    make_optimizer: MakeOptimizer | None = None

    def run(
        self, model: nn.Module, batch: object, optimizer: object, *, mesh: Any = None
    ) -> object:
        """Run one step; with `mesh` as one of its ranks. Returns what the user's function does."""
        step = self.step if mesh is None else self.rank_step
        return step(model, batch, optimizer, *([mesh] if _takes_mesh(step) else []))


def _takes_mesh(step: TrainStep) -> bool:
    """Whether a step has a fourth parameter that must be passed, or that is named `mesh`."""
    parameters = list(inspect.signature(step).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 4:
        return False
    return positional[3].name == "mesh" or positional[3].default is inspect.Parameter.empty


@final
@dataclass(eq=False)
class TrainingValues:
    """What was observed in one step beyond the calls of the model and the gradients.

    `tables` has tensors of parameters by name: gradients as backward has left them, as collectives
    that the program calls after it have (where ranks are threads), before they are clipped, and as
    the optimizer gets them; each entry of its state, and the updated parameters. `scalars` has
    single numbers in the order in which they occurred: losses, norms, what the step returns,
    counters. `settings` maps settings of the optimizer, such as lr, to their values by parameter;
    `sources` has the line behind a scalar. `stale` names parameters that have a gradient, but are
    in no optimizer that stepped. `modes` has the modules that depend on their mode.
    """

    tables: dict[Table, dict[str, torch.Tensor]] = field(default_factory=dict)
    scalars: dict[Key, list[torch.Tensor]] = field(default_factory=dict)
    settings: dict[str, dict[str, float]] = field(default_factory=dict)
    sources: dict[Key, Source] = field(default_factory=dict)
    stale: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()  # names of counters
    num_optimizer_steps: int = 0
    modes: dict[str, ModuleMode] = field(default_factory=dict)

    def add_scalar(self, key: Key, value: torch.Tensor) -> None:
        """Note a further value of a number that the step computes."""
        self.scalars.setdefault(key, []).append(value)

    def find_logged(self) -> frozenset[Key]:
        """The numbers that the program reads, by line, and that are a loss or a norm."""
        losses = [float(value) for value in self.scalars.get(_LOSS, ())]
        norms = [float(value) for value in self.scalars.get(_NORM, ())]
        wanted = [*losses, *norms]
        if losses:
            wanted += [sum(losses), sum(losses) / len(losses)]
        return frozenset(
            key
            for key in self.sources
            if any(
                math.isclose(float(value), number, rel_tol=1e-4)
                for value in self.scalars[key]
                for number in wanted
            )
        )


@final
class TrainingRecorder(TrainingListener):
    """Records the steps of one rank. `trainer` is an object whose counters are recorded, too.

    `on_gradients` is called when the gradients of a step were copied, before they are clipped.
    """

    def __init__(
        self,
        model: nn.Module,
        names: OriginalNames,
        trainer: object = None,
        on_gradients: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._names = names
        self._trainer = trainer
        self._on_gradients = on_gradients
        self._optimizers: dict[int, Optimizer] = {}
        self._optimized: dict[str, torch.Tensor] = {}  # parameters when an optimizer stepped
        self._depth = 0  # of calls of modules
        self._num_in_optimizer = 0
        self._begin()

    def _begin(self) -> None:
        self._values = TrainingValues()
        self._has_new_gradients = True  # since they were last read
        self._addresses: dict[int, str] | None = None  # of gradients that collectives may reduce
        self._unclipped: dict[str, torch.Tensor] = {}  # gradients when they were last read
        self._used: set[str] = set()  # parameters whose optimizer has used their gradients
        self._stepped: set[int] = set()  # ids of parameters
        self._graded: dict[str, torch.Tensor] = {}  # parameters with a gradient when one stepped
        self._counters = dict(self._read_counters())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe steps on this thread until the context ends."""
        hooks = []
        modules = list(self._names.modules(self._model))
        for name, module in {id(module): (name, module) for name, module in modules}.values():
            hooks.append(module.register_forward_pre_hook(self._enter))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
            if depends_on_mode(module) and not is_wrapper(module):
                hooks.append(module.register_forward_pre_hook(partial(self._note_mode, name)))
        try:
            with watch_training(self):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def is_updated(self) -> bool:
        """Whether an optimizer has stepped in the step that runs."""
        return self._values.num_optimizer_steps > 0

    def take(self, returned: object) -> TrainingValues:
        """What was observed in the step that has ended and returned this; begins the next."""
        values = self._values
        if self._has_new_gradients:  # no optimizer has stepped
            self._read_gradients()
        if not values.num_optimizer_steps:
            self._read_clipped()
        for path, number in named_numbers(returned):
            values.add_scalar((TensorKind.REPORTED, f"returned{path}"), number)
        if UPDATED not in values.tables:
            self.read_updated()
        after = dict(self._read_counters())
        for name, value in after.items():
            values.add_scalar((TensorKind.COUNTER, name), torch.tensor(value, dtype=torch.float64))
        values.changed = frozenset(
            name for name, value in after.items() if self._counters.get(name, 0) != value
        )
        self._begin()
        return values

    def read_updated(self) -> TrainingValues:
        """Copy the parameters and the optimizer's state, and return what the step has so far."""
        values = self._values
        raw = values.tables.setdefault(RAW, values.tables[TensorKind.GRADIENT, ""])
        values.tables[REDUCED] = raw | values.tables.get(REDUCED, {})
        values.tables[UPDATED] = _copy_all(self._parameters())
        self._read_states()
        if self._stepped:
            graded = self._graded | self._find_graded()
            values.stale = frozenset(n for n, p in graded.items() if id(p) not in self._stepped)
        return values

    def before_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Note the losses that backward starts at."""
        self._has_new_gradients = True
        if is_in_backward():
            return
        source = read_stack(sys._getframe(1)).source
        for tensor in tensors:
            if tensor.numel() == 1 and tensor.requires_grad:
                self._add(_LOSS, tensor, source)

    def after_backward(self) -> None:
        """Copy the gradients: the program may change them by itself."""
        if self._num_in_optimizer:  # it computes gradients by itself, as LBFGS does
            self._used.clear()
        if not is_in_backward():
            self._values.tables[RAW] = _copy_all(self._gradients())
            self._values.tables[REDUCED] = {}
            self._addresses = None

    def before_clipping(self) -> None:
        """Copy the gradients, unless that was done since the last backward."""
        if self._has_new_gradients:
            self._read_gradients()

    def clip(self, norm: torch.Tensor) -> None:
        """Note the norm that gradients are clipped with."""
        self._add(_NORM, norm, read_stack(sys._getframe(1)).source)

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Copy the gradients that the optimizer gets, and its settings."""
        self._num_in_optimizer += 1
        self._values.num_optimizer_steps += 1
        self._optimizers[id(optimizer)] = optimizer
        if self._has_new_gradients:
            self._read_gradients()
        named = self._parameters()
        self._graded |= self._find_graded()
        names = {id(parameter): name for name, parameter in reversed(named.items())}
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._use_gradients({n: p for n, p in named.items() if id(p) in ids})
        for group in optimizer.param_groups:
            self._stepped.update(map(id, group["params"]))
            group_ids = set(map(id, group["params"]))
            self._optimized |= {n: p for n, p in named.items() if id(p) in group_ids}
            numbers = {name: float(value) for name, value in group.items() if _is_number(value)}
            for parameter in group["params"]:
                for name, value in numbers.items() if id(parameter) in names else ():
                    self._values.settings.setdefault(name, {})[names[id(parameter)]] = value
        self._read_clipped(ids)

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped."""
        self._num_in_optimizer = max(0, self._num_in_optimizer - 1)

    def decide(self, number: float) -> None:
        """Note a number by which a scheduler decides."""
        source = read_stack(sys._getframe(1)).source
        self._add(DECISION, torch.tensor(number, dtype=torch.float64), source)

    def read(self, tensor: torch.Tensor, value: object) -> None:
        """Note a number that the program reads outside its modules, by the line that reads it.

        Of several on one line, all but the first have their count behind it: `train.py:9 (2)`.
        """
        if self._depth or self._num_in_optimizer or is_in_backward() or tensor.numel() != 1:
            return
        stack = read_stack(sys._getframe(1))
        source = stack.source
        if source is not None and stack.user is not None and _is_number(value):
            count = count_readings(stack.user, stack.instruction)
            more = f" ({count})" if count > 1 else ""
            key = (TensorKind.REPORTED, f"{source.file}:{source.line}{more}")
            self._add(key, torch.tensor(value, dtype=tensor.dtype), source)

    def after_collective(self, kind: str, inputs: object, outputs: Sequence[torch.Tensor]) -> None:
        """Copy the gradients that the program has reduced by itself, before it changes them."""
        if self._depth or self._num_in_optimizer or is_in_backward():
            return
        reduced = self._values.tables.get(REDUCED)
        if reduced is None:
            return
        gradients = self._gradients()
        if self._addresses is None:
            self._addresses = {_address(gradient): name for name, gradient in gradients.items()}
        for tensor in outputs:
            name = self._addresses.get(_address(tensor))
            if name is not None and name in gradients:
                reduced |= _copy_all({name: gradients[name]})

    def _add(self, key: Key, tensor: torch.Tensor, source: Source | None) -> None:
        self._values.add_scalar(key, tensor.detach().clone())
        if source is not None:
            self._values.sources.setdefault(key, source)

    def _note_mode(self, name: str, module: nn.Module, _: object) -> None:
        if torch.is_grad_enabled() and not is_in_backward():
            known = self._values.modes.get(name)
            modes = frozenset({module.training}) | (known.modes if known else frozenset())
            self._values.modes[name] = ModuleMode(modes, draws_in_training(module))

    def _enter(self, *_: object) -> None:
        self._depth += 1

    def _leave(self, *_: object) -> None:
        self._depth -= 1

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: p for name, p in self._names.parameters(self._model) if not p.is_meta}

    def _find_graded(self) -> dict[str, torch.Tensor]:
        return {n: p for n, p in self._parameters().items() if _gradient_of(p) is not None}

    def _gradients(self) -> dict[str, torch.Tensor]:
        pairs = ((name, _gradient_of(p)) for name, p in self._parameters().items())
        return {name: gradient for name, gradient in pairs if gradient is not None}

    def _read_gradients(self) -> None:
        """Copy the gradients, but not what is left of those that an optimizer has used."""
        self._has_new_gradients = False
        self._unclipped = _copy_all(self._gradients())
        table = self._values.tables.setdefault((TensorKind.GRADIENT, ""), {})
        for name in [name for name in table if name not in self._used | self._unclipped.keys()]:
            del table[name]
        table |= {n: g for n, g in self._unclipped.items() if n not in self._used & table.keys()}
        self._on_gradients()

    def _use_gradients(self, own: Mapping[str, torch.Tensor]) -> None:
        """Take the gradients of these parameters, which an optimizer is about to use."""
        if is_in_backward():  # the gradients of others, that were read, are older than these
            gradients = {name: _gradient_of(parameter) for name, parameter in own.items()}
            self._unclipped |= _copy_all({n: g for n, g in gradients.items() if g is not None})
        table = self._values.tables[TensorKind.GRADIENT, ""]
        table |= {name: self._unclipped[name] for name in own if name in self._unclipped}
        self._used.update(own)

    def _read_clipped(self, own: Collection[int] = ()) -> None:
        """Copy gradients after clipping: of the parameters `own`, and those not yet copied."""
        table = self._values.tables.setdefault(CLIPPED, {})
        unclipped = self._values.tables[TensorKind.GRADIENT, ""]
        named = self._parameters()
        for name, gradient in _copy_all(self._gradients()).items():
            if name not in table or id(named[name]) in own:
                is_same = name in unclipped and _is_same(unclipped[name], gradient)
                table[name] = unclipped[name] if is_same else gradient

    def _read_states(self) -> None:
        # A later forward may have exchanged parameters of the model, as those of FSDP's root.
        named = self._parameters() | self._optimized
        for optimizer in self._optimizers.values():
            for name, first in tie_names(named).items():
                state = optimizer.state.get(named[first]) if name == first else None
                for entry, value in (state or {}).items():
                    if isinstance(value, torch.Tensor) or _is_number(value):
                        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                        table = self._values.tables.setdefault((TensorKind.STATE, str(entry)), {})
                        table[name] = tensor.detach().clone()

    def _read_counters(self) -> Iterator[tuple[str, float]]:
        """The numbers among the attributes of modules and of the trainer."""
        known: set[int] = set()
        for path, module in named_modules_with_aliases(self._model):
            if id(module) not in known:
                known.add(id(module))
                yield from _numbers_of(module, path)
        if self._trainer is not None and not isinstance(self._trainer, nn.Module):
            yield from _numbers_of(self._trainer, "trainer")


def _numbers_of(owner: object, path: str) -> Iterator[tuple[str, float]]:
    for name, value in list(vars(owner).items()) if hasattr(owner, "__dict__") else ():
        if _is_number(value) and not name.startswith("_"):
            yield f"{path}.{name}".lstrip("."), float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter, also where a framework accumulates it in `main_grad`."""
    if parameter.grad is not None:
        return parameter.grad
    main_grad = getattr(parameter, "main_grad", None)
    return main_grad if isinstance(main_grad, torch.Tensor) else None


def _address(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.data_ptr()


def _copy_all(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tensors; names of one tensor share a copy."""
    copies: dict[int, torch.Tensor] = {}
    for tensor in named.values():
        if id(tensor) not in copies:
            dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
            copies[id(tensor)] = dense.detach().clone()
    return {name: copies[id(tensor)] for name, tensor in named.items()}


def _is_same(tensor: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether two tensors are equal on this rank."""
    tensor, reference = (
        value.to_local() if isinstance(value, DTensor) else value for value in (tensor, reference)
    )
    return (
        tensor.dtype == reference.dtype
        and tensor.shape == reference.shape
        and torch.equal(tensor, reference)
    )


def named_numbers(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors and plain numbers in a nested value, with their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value.detach().clone()
    elif isinstance(value, Number) and not isinstance(value, bool | complex):
        yield path, torch.tensor(float(value), dtype=torch.float64)  # type: ignore[arg-type]
    else:
        for key, item in named_items(value):
            yield from named_numbers(item, path + key)


def find_trainer(step: TrainStep) -> object:
    """The object that a step is a method of; None if it is a function."""
    owner = getattr(step, "__self__", None)
    return owner if owner is not None and not isinstance(owner, type) else None
