"""Any part of a program, run alone, computes what it computed in the whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import fx

from captured_models import CASES, capture
from shardscope.compile.diagnose.cut import Recorded
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.values import copy_tensor, map_tensors, tensors_in

SEED = 3
RANDOM = {"dropout", "random_numbers"}


class Watched(fx.Interpreter):
    """Keeps a copy of what every node makes, right after it made it."""

    def __init__(self, fragment: Fragment) -> None:
        super().__init__(fragment.graph)
        self.seen: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "placeholder" and "functorch" not in str(getattr(n.target, "__module__", "")):
            with suppress(RuntimeError, NotImplementedError):  # what vmap makes has no memory
                self.seen[n.name] = map_tensors(value, _copy)
        return value


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return copy_tensor(tensor).requires_grad_(tensor.requires_grad)


def run_whole(fragment: Fragment) -> dict[str, Any]:
    """What a program computes that may write to inputs of which gradients are wanted."""
    return run_eagerly(fragment, copy=lambda one: _copy(one).clone())[0]


def run_eagerly(
    fragment: Fragment, copy: Callable[[torch.Tensor], torch.Tensor] = _copy
) -> tuple[dict[str, Any], list[Any], Any]:
    watched = Watched(fragment)
    leaves = map_tensors(list(fragment.inputs), copy)
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(fragment.with_gradients):
        torch.manual_seed(SEED)
        outputs = watched.run(*leaves)
    return watched.seen, leaves, outputs


def parts_of(ops: tuple[str, ...], rng: random.Random, num: int) -> Iterator[list[str]]:
    yield from ([name] for name in ops)
    for _ in range(num):
        first, last = sorted(rng.sample(range(len(ops) + 1), 2))
        yield list(ops[first:last])
        share = rng.random()
        yield [name for name in ops if rng.random() < share] or [ops[0]]
    yield list(ops)


def assert_same(got: Any, expected: Any, where: str) -> None:
    assert type(got) is type(expected), where
    for one, other in zip(tensors_in(got), tensors_in(expected), strict=True):
        assert (one.dtype, one.size()) == (other.dtype, other.size()), where
        assert one.requires_grad == other.requires_grad, where
        assert torch.equal(one, other) or one.isnan().any(), where


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("max_bytes", [1 << 30, 0], ids=["held", "computed again"])
@pytest.mark.parametrize("case", [name for name in CASES if name not in RANDOM])
def test_every_part_computes_what_the_whole_did(case: str, max_bytes: int) -> None:
    torch.manual_seed(0)
    function, args = CASES[case]()
    rng = random.Random(case)
    for fragment in capture(function, *args):
        expected = run_whole(fragment)
        recorded = Recorded(fragment, seed=SEED, max_bytes=max_bytes)
        assert len(recorded.ops) >= 3
        for keep in parts_of(recorded.ops, rng, 12):
            part = recorded.cut(keep)
            part.graph.graph.lint()
            got, leaves, outputs = run_eagerly(part)
            computed = {name for name in list(got)[:-1] if "_written_" not in name}
            assert computed <= set(expected), keep
            assert set(keep) <= {node.name for node in part.graph.graph.nodes}
            for name in computed:
                assert_same(got[name], expected[name], f"{name} of {keep}")
            assert_has_gradients(part, leaves, outputs)


def assert_has_gradients(part: Fragment, leaves: list[Any], outputs: Any) -> None:
    wanted = [one for one in outputs if isinstance(one, torch.Tensor) and one.requires_grad]
    assert bool(wanted) <= part.with_gradients
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(one) for one in wanted])
        assert any(one.grad is not None for one in leaves if isinstance(one, torch.Tensor))
