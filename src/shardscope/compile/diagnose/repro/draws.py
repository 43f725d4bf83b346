"""Whether a program draws numbers at random."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardscope.compile.diagnose.fragment import Fragment

__all__ = ["has_draws"]


def has_draws(fragment: Fragment) -> bool:
    """Whether running it, on copies of its inputs, moves on what numbers are drawn from."""
    is_cuda_on = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if is_cuda_on else []):
        before = _read_states(is_cuda_on)
        try:
            with torch.no_grad():
                fx.Interpreter(fragment.graph).run(*map(_copy, fragment.inputs))
        except Exception:  # noqa: BLE001 - then the script will say so
            return False
        return not all(map(torch.equal, before, _read_states(is_cuda_on)))


def _read_states(is_cuda_on: bool) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if is_cuda_on else [])]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
