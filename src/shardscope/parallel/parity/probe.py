"""What every module puts out, and the gradient that comes back to it, while a step runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardscope._torch.modules import named_places
from shardscope._torch.propagation import quiet_collectives
from shardscope.parallel.parity.outcome import named_tensors
from shardscope.record import Phase, Source

__all__ = ["ModuleProbe", "Spot", "make_whole"]

_SEPARATOR = "\0"  # no name has it


class Spot(NamedTuple):
    """One tensor that a module put out in one of its calls, or the gradient of it."""

    phase: Phase
    module: str
    call: int
    path: str

    def encode(self) -> str:
        """As a name."""
        return _SEPARATOR.join(map(str, self))

    @staticmethod
    def decode(name: str) -> Spot:
        """The spot behind a name."""
        phase, module, call, path = name.split(_SEPARATOR)
        return Spot(Phase(phase), module, int(call), path)


@final
class ModuleProbe:
    """Keeps what it sees, whole; on ranks, all of which must run the same modules in one order.

    `scale` is what gradients are larger by than a single device's.
    """

    def __init__(self, *, scale: float = 1.0) -> None:
        self.seen: dict[str, torch.Tensor] = {}
        self.consumers: dict[str, list[str]] = {}  # modules that took what was put out
        self.types: dict[str, str] = {}
        self.sources: dict[str, Source] = {}  # modules have no line
        self._scale = scale
        self._num_calls: dict[str, int] = {}
        self._makers: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []  # so that an identity is one tensor's alone

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Look, until the context ends."""
        handles = []
        known: set[int] = set()
        for name, module in named_places(model):
            # Of a wrapper and what it wraps, which have one name, the wrapper.
            if id(module) not in known and name not in self.types:
                known.add(id(module))
                self.types[name] = type(module).__name__
                handles.append(
                    module.register_forward_pre_hook(self._taker(name), with_kwargs=True)
                )
                handles.append(module.register_forward_hook(self._looker(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()
            self._makers.clear()

    def _taker(self, name: str) -> Any:
        def take(_: nn.Module, args: Any, kwargs: Any) -> None:
            for _place, tensor in named_tensors((args, kwargs)):
                maker = self._makers.get(id(tensor))
                if maker is not None:
                    self.consumers.setdefault(maker, []).append(name)

        return take

    def _looker(self, name: str) -> Any:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            call = self._num_calls.get(name, 0)
            self._num_calls[name] = call + 1
            for path, tensor in named_tensors(output):
                spot = Spot(Phase.FORWARD, name, call, path)
                self._keep(spot, tensor, 1.0)
                self._alive.append(tensor)
                self._makers[id(tensor)] = spot.encode()
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_looker(spot))  # type: ignore[no-untyped-call]

        return look

    def _gradient_looker(self, spot: Spot) -> Any:
        back = spot._replace(phase=Phase.BACKWARD)

        def look(gradient: torch.Tensor) -> None:
            self._keep(back, gradient, self._scale)

        return look

    def _keep(self, spot: Spot, tensor: torch.Tensor, scale: float) -> None:
        whole = make_whole(tensor)
        self.seen[spot.encode()] = whole / scale if scale != 1.0 else whole


def make_whole(tensor: Any) -> torch.Tensor:
    """A copy, put together if it is a DTensor; its ranks call this together."""
    with torch.no_grad(), quiet_collectives():
        is_cut = isinstance(tensor, DTensor)
        whole: Any = tensor.detach()
        whole = whole.full_tensor() if is_cut else whole
        if hasattr(whole, "wait"):
            whole = whole.wait()
        copy: torch.Tensor = whole.clone()
        return copy
