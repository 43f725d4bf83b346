"""Random numbers of a run: observed, or replaced by the mean of their distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import nn

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.dispatch import (
    OpOverload,
    TorchDispatchMode,
    is_overload,
    name_arguments,
    op_packet,
)
from shardscope._torch.tree import map_leaves, tensor_leaves
from shardscope.numerics import is_random
from shardscope.parallel.equivalence.names import OriginalNames


@final
@dataclass(frozen=True)
class RandomNumbers:
    """How a run gets random numbers: it draws them, or, with `is_replaced`, gets their mean.

    Generators of the program with one of `kept_seeds` are left alone.
    """

    is_replaced: bool = False
    kept_seeds: frozenset[int] = frozenset()

    def replacing(self) -> ExitStack:
        """A context in which random numbers are replaced, if they are to be."""
        stack = ExitStack()
        if self.is_replaced:
            stack.enter_context(MeanRngMode(self.kept_seeds))
        return stack


DRAWN = RandomNumbers()


class Draw(NamedTuple):
    """One call of an op that draws: the op, the shape, and numbers that identify the values."""

    op: str
    shape: tuple[int, ...]
    values: tuple[float, float]


@final
@dataclass(frozen=True)
class Draws:
    """The random numbers of a step.

    `has_drawn` says that some came from the global generators; `seeded` has those of generators
    that the program made, by their seeds. `redrawn` names modules that a checkpoint calls again in
    backward, and that then draw other numbers than in forward.
    """

    has_drawn: bool = False
    seeded: Mapping[int, tuple[Draw, ...]] = field(default_factory=dict)
    redrawn: frozenset[str] = frozenset()


def find_common_seeds(steps: Sequence[Sequence[Draws]]) -> tuple[frozenset[int], bool]:
    """The seeds of generators that draw the same in all runs, and whether others were used.

    `steps` has the draws of each run, of the single device and of the ranks, for each step.
    """
    seeds = frozenset(seed for runs in steps for run in runs for seed in run.seeded)
    common = frozenset(
        seed
        for seed in seeds
        if all(run.seeded.get(seed) == runs[0].seeded.get(seed) for runs in steps for run in runs)
    )
    return common, common != seeds or any(run.has_drawn for runs in steps for run in runs)


@final
class RngObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the random numbers that a step draws, and those that a recomputation draws again."""

    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._running: list[str] = []
        self._begin()

    def _begin(self) -> None:
        self._has_drawn = False
        self._seeded: dict[int, list[Draw]] = {}
        self._forward: set[Draw] = set()
        self._redrawn: set[str] = set()

    @contextmanager
    def attached(self, model: nn.Module, names: OriginalNames) -> Iterator[None]:
        """Observe until the context ends."""
        with ExitStack() as stack:
            modules = {id(module): (name, module) for name, module in names.modules(model)}
            for name, module in modules.values():
                enter = module.register_forward_pre_hook(partial(self._enter, name))
                leave = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            stack.enter_context(self)
            yield

    def take(self) -> Draws:
        """What was observed of the step that has ended; begins the next."""
        seeded = {seed: tuple(draws) for seed, draws in self._seeded.items()}
        draws = Draws(self._has_drawn, seeded, frozenset(self._redrawn))
        self._begin()
        return draws

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_overload(func) and is_random(func, args, kwargs):
            self._note(func, name_arguments(func, args, kwargs), result)
        return result

    def _note(self, func: OpOverload, arguments: Mapping[str, Any], result: object) -> None:
        draw = _identify(op_packet(func).__name__, result)
        generator = _own_generator(arguments)
        if generator is None:
            self._has_drawn = True
        elif draw is not None:
            self._seeded.setdefault(generator.initial_seed(), []).append(draw)
        if draw is None or draw.op not in _PURE:
            return
        if not is_in_backward():
            self._forward.add(draw)
        elif self._running and draw not in self._forward:
            self._redrawn.add(self._running[-1])

    def _enter(self, name: str, *_: object) -> None:
        self._running.append(name)

    def _leave(self, *_: object) -> None:
        self._running.pop()


def _own_generator(arguments: Mapping[str, Any]) -> torch.Generator | None:
    """The generator that the program passes; None if it is a global one."""
    generator = arguments.get("generator")
    if not isinstance(generator, torch.Generator) or generator is torch.default_generator:
        return None
    return generator


def _identify(op: str, result: object) -> Draw | None:
    tensors = tensor_leaves(result)
    if not tensors or tensors[-1].is_meta:
        return None
    drawn = tensors[-1]  # of dropout the mask
    local = drawn.to_local() if hasattr(drawn, "to_local") else drawn
    flat = local.detach().double().flatten()
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
    return Draw(op, tuple(local.shape), (float(flat.sum()), float(flat @ weights)))


@final
class MeanRngMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers by the mean of their distribution, and dropout by the identity.

    Generators of the program with one of `kept_seeds` are left alone.
    """

    supports_higher_order_operators = True  # torch would refuse to run them

    def __init__(self, kept_seeds: frozenset[int] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept_seeds = kept_seeds

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if not is_overload(func) or not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        arguments = name_arguments(func, args, kwargs)
        generator, name = _own_generator(arguments), op_packet(func).__name__
        if generator is not None and generator.initial_seed() in self._kept_seeds:
            return func(*args, **kwargs)
        if name == "native_dropout":
            return arguments["input"].clone(), torch.ones_like(arguments["input"], dtype=torch.bool)
        if name == "bernoulli" and arguments.get("p") is None:
            return arguments["self"].clone()
        if name == "randperm" and arguments.get("generator") is None:  # its own is seeded: an order
            drawn = func(*args, **kwargs)
            assert isinstance(drawn, torch.Tensor)
            return drawn.copy_(torch.arange(len(drawn)))
        if name in _MEANS:
            drawn = func(*args, **kwargs)  # for its shape, or as the destination
            return map_leaves(lambda value: _fill_with_mean(value, name, arguments), drawn)
        return func(*args, **kwargs)


# The mean of each distribution, from the arguments of its op.
_MEANS: dict[str, Callable[[Mapping[str, Any]], torch.Tensor | float]] = {
    "bernoulli": lambda arguments: arguments["p"],
    "bernoulli_": lambda arguments: arguments["p"],
    "exponential_": lambda arguments: 1 / arguments["lambd"],
    "normal": lambda arguments: arguments["mean"],
    "normal_": lambda arguments: arguments["mean"],
    "normal_functional": lambda arguments: arguments["mean"],
    "rand": lambda _: 0.5,
    "rand_like": lambda _: 0.5,
    "randint": lambda arguments: arguments.get("low") or 0,
    "randint_like": lambda arguments: arguments.get("low") or 0,
    "randn": lambda _: 0.0,
    "randn_like": lambda _: 0.0,
    "uniform": lambda arguments: (arguments["from"] + arguments["to"]) / 2,
    "uniform_": lambda arguments: (arguments["from"] + arguments["to"]) / 2,
}
# The ops whose result is what they draw, and depends on nothing else.
_PURE = frozenset({"native_dropout", *_MEANS} - {"bernoulli"})


def _fill_with_mean(drawn: object, name: str, arguments: Mapping[str, Any]) -> object:
    """Overwrite the random numbers that the op `name` drew with the mean of its distribution."""
    mean = _MEANS[name](arguments)
    if not isinstance(drawn, torch.Tensor):
        return drawn
    return drawn.copy_(mean) if isinstance(mean, torch.Tensor) else drawn.fill_(mean)
