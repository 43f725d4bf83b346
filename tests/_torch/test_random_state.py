"""The default random number generators: read, restored and seeded together."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from shardscope import simulate
from shardscope._torch.random_state import preserved_random_state, seed_generators, seed_torch


def draw() -> tuple[Any, ...]:
    return random.random(), numpy.random.rand(), torch.rand(1).item()


def test_all_default_generators_are_restored_also_after_an_error() -> None:
    seed_generators(3)
    expected = draw()
    seed_generators(3)
    with pytest.raises(ZeroDivisionError), preserved_random_state():
        _ = draw()[0] / 0
    assert draw() == expected


def test_seeds_larger_than_numpy_takes_are_accepted() -> None:
    seed_generators(2**40 + 1)
    expected = draw()
    seed_generators(2**40 + 1)
    assert draw() == expected


def test_seeds_are_those_of_torch_also_of_simulated_devices() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    seed_torch(5)
    assert torch.equal(torch.rand(3), expected)
    with simulate({"dp": 2}, device="cuda"):
        seed_torch(7)
        assert torch.cuda.initial_seed() == torch.initial_seed() == 7
