"""Records what each backward pass of a step adds to the gradients of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.training_hooks import TrainingListener, watch_training
from shardscope.parallel.equivalence import Declared, OriginalNames, StepResult
from shardscope.record import Source

_SEPARATOR = "\0"  # in no name
Contributions = list[dict[str, torch.Tensor]]
"""For each backward pass, what it adds to the gradients, by parameter."""


@final
class BackwardProbe(TrainingListener):
    """Records the gradients that arrive at parameters, before the program can change them.

    The snapshots are named by the index of the backward pass and the parameter.
    """

    def __init__(self) -> None:
        self.snapshots: dict[str, torch.Tensor] = {}
        self.declared: dict[str, Declared] = {}  # unused
        self.sources: dict[str, Source] = {}  # unused
        self.numbers: dict[str, dict[str, float]] = {}  # unused
        self._index = -1

    @contextmanager
    def attached(self, model: nn.Module, names: OriginalNames) -> Iterator[None]:
        """Record until the context ends."""
        handles = []
        known: set[int] = set()
        for name, parameter in names.parameters(model):
            is_plain = parameter.requires_grad and not isinstance(parameter, DTensor)
            if is_plain and id(parameter) not in known:
                known.add(id(parameter))
                handles.append(parameter.register_hook(self._make_hook(name)))  # type: ignore[no-untyped-call]
        try:
            with watch_training(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _make_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def record(gradient: torch.Tensor) -> None:
            key = f"{self._index}{_SEPARATOR}{name}"
            dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
            copy = dense.detach().double().cpu().clone()
            known = self.snapshots.get(key)
            self.snapshots[key] = copy if known is None else known + copy

        return record

    def before_backward(self, _: object) -> None:
        """Begin with the next backward pass, unless it is one inside another."""
        self._index += not is_in_backward()


def list_contributions(snapshots: Mapping[str, torch.Tensor]) -> Contributions:
    """The recorded gradients, by backward pass."""
    passes: dict[int, dict[str, torch.Tensor]] = {}
    for key, gradient in snapshots.items():
        index, _, name = key.partition(_SEPARATOR)
        passes.setdefault(int(index), {})[name] = gradient
    return [passes[index] for index in sorted(passes)]


def sum_contributions(ranks: Sequence[StepResult]) -> Contributions:
    """What a backward pass adds on all ranks together; only parameters that all of them have."""
    passes = [list_contributions(rank.snapshots) for rank in ranks]
    if len({len(of_rank) for of_rank in passes}) != 1:
        return []
    return [
        {
            name: torch.stack([part[name] for part in parts]).sum(0)
            for name in parts[0]
            if all(name in part and part[name].shape == parts[0][name].shape for part in parts)
        }
        for parts in zip(*passes, strict=True)
    ]
