"""One program with its plan: what it is made of, how it is exported, and with a loss around it."""

from __future__ import annotations

import copy
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from shardscope.parallel.api import parallelize
from shardscope.parallel.program import ParallelProgram

__all__ = ["Case", "Given", "Trained", "copied", "drawn", "kinds", "tokens", "under"]

Given = tuple[tuple[Any, ...], dict[str, Any]]


@final
@dataclass(frozen=True, eq=False)
class Case:
    """A model, what it is called with, and how it is cut."""

    name: str
    make: Callable[[], nn.Module]
    give: Callable[[], tuple[Any, ...]]
    plan: Mapping[str, Any] = field(default_factory=dict)
    mesh: str = "tp=2"
    named: Callable[[], dict[str, Any]] = dict  # keyword arguments
    inputs: Mapping[Any, Any] | None = None
    outputs: Mapping[Any, Any] | None = None
    runs: bool = True
    trains: bool = True
    dtype: torch.dtype = torch.float64
    dynamic: Any = None  # torch.export's dynamic_shapes
    others: tuple[Callable[[], tuple[Any, ...]], ...] = ()  # inputs of other sizes
    has_outputs: bool = False  # returned with the loss where it trains
    by_hand: bool = True  # whether ranks are also run and joined by hand
    is_random: bool = False  # ranks draw numbers; only verification knows which
    tolerance: float = 1e-9  # relative to the largest number, in the check by hand
    counts: Mapping[str, int] | None = None  # collectives of the forward program
    since: tuple[int, int] = (2, 11)  # the first torch that can export it
    joint_counts: Mapping[str, int] | None = None  # of forward and backward

    def model(self, *, training: bool = False) -> nn.Module:
        """The model, the same each time, with a loss where it trains."""
        with self.defaults():
            made = self.make()
        return Trained(made, has_outputs=self.has_outputs) if training else made

    def given(self) -> Given:
        with self.defaults(seed=1):
            return self.give(), self.named()

    def export(self, *, training: bool = False) -> ExportedProgram:
        args, kwargs = self.given()
        model = self.model(training=training)
        return torch.export.export(model, args, kwargs, dynamic_shapes=self.dynamic)

    def parallelize(
        self, *, mesh: Any = None, training: bool = False, **options: Any
    ) -> ParallelProgram:
        """The program cut, not yet verified."""
        return parallelize(
            self.export(training=training),
            mesh or self.mesh,
            under(self.plan) if training else self.plan,
            inputs=self.inputs,
            outputs=None if training else self.outputs,
            training=training,
            **{"verify": False, **options},
        )

    @contextmanager
    def defaults(self, *, seed: int = 0) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@final
class Trained(nn.Module):
    """A model that returns a number to learn from, and perhaps what it returned anyway."""

    def __init__(self, model: nn.Module, *, has_outputs: bool = False) -> None:
        super().__init__()
        self.model = model

        @functools.wraps(model.forward)  # export names inputs after forward's arguments
        def forward(*args: Any, **kwargs: Any) -> Any:
            result = model(*args, **kwargs)
            loss = sum(_lose(one) for one in tree_leaves(result) if _is_number(one))
            return (loss, result) if has_outputs else loss

        self.forward = forward


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _lose(leaf: Tensor) -> Tensor:
    """Not blind to a sum that is fixed, as a softmax's is."""
    leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    return leaf.square().sum()


def under(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan for the model where it stands inside another module."""
    return {f"model.{name}".rstrip("."): style for name, style in plan.items()}


def copied(given: Given) -> Given:
    return copy.deepcopy(given)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape)


def tokens(*shape: int, below: int = 12) -> Tensor:
    return torch.randint(below, shape)


def kinds(nodes: Iterable[Any]) -> Counter[str]:
    """How many collectives of which kind a graph has."""
    named = [re.match(r"_c10d_functional\.(\w+)\.default", str(one.target)) for one in nodes]
    found = Counter(one[1] for one in named if one is not None)
    del found["wait_tensor"]
    return found
