"""The state of the default random number generators: Python's, numpy's and torch's on all devices.

Generators that nobody has used yet are left alone: numpy is not imported and CUDA not initialized.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = [
    "preserved_random_state",
    "read_random_state",
    "seed_generators",
    "write_random_state",
]


def read_random_state() -> dict[str, Any]:
    """The state of each default generator, for `write_random_state`."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def write_random_state(state: dict[str, Any]) -> None:
    """Restore what `read_random_state` returned; a generator first used since then is left."""
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the state of all default generators on leaving, also after an error."""
    state = read_random_state()
    try:
        yield
    finally:
        write_random_state(state)


def seed_generators(seed: int) -> None:
    """Seed all default generators; numpy's, which takes fewer bits, with the lowest 32."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
