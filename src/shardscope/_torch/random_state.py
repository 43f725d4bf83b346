"""The state of the default random number generators: of Python, torch and numpy."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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


def seed_torch(seed: int) -> None:
    """Seed torch's default generators: the CPU's, and those of devices if there are any.

    `torch.manual_seed` keeps a seed for each kind of device that is not initialized, with the
    formatted stack of its caller, even where torch has no such devices: milliseconds for each call.
    """
    if torch.cuda.is_available() or torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_generators(seed: int) -> None:
    """Seed all default generators; numpy's, which takes fewer bits, with the lowest 32."""
    seed_torch(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
