"""What a call can reach: found, put back after it, and compared."""

from __future__ import annotations

import functools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from shardscope.compile.call_state import (
    StateWalk,
    describe_values,
    list_uncompared,
    walk_call,
    walk_values,
)
from shardscope.compile.preserved_state import preserved_call_state, preserved_code_state

COUNT = 0
SEEN: list[int] = []


class Point(NamedTuple):
    x: Any
    y: Any


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class Holder:
    shared: list[int] = []  # noqa: RUF012 - what the test is about

    def __init__(self) -> None:
        self.value = 1
        self.items = {"a": [1]}


class Counting(nn.Module):
    calls: list[int] = []  # noqa: RUF012 - what the test is about
    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.steps = 0
        self.history = deque([0], maxlen=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.history.append(self.steps)
        self.seen += x
        Counting.calls.append(1)
        Counting.total += 1
        self.new = x
        return x


def names_of(fn: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return describe_values(walk_call(fn, args, kwargs))


def test_whatever_a_call_can_reach_has_a_name() -> None:
    weight = torch.ones(2)

    def step(x: Any, default: list[int] = [3]) -> None:  # noqa: B006
        SEEN.append(COUNT)
        return x * weight

    found = names_of(step, {"a": [torch.zeros(1), 2]}, Point(1, (2,)), key=Holder())
    assert found["argument 0"] == "dict with the keys 1: 'a'"
    assert found["argument 0['a'][1]"] == 2
    assert (found["argument 1.x"], found["argument 1.y[0]"]) == (1, 2)
    assert found["argument key.items['a'][0]"] == 1
    assert found["Holder.shared"] == "list of 0"
    assert (found["COUNT"], found["SEEN"], found["step default 0[0]"]) == (0, "list of 0", 3)
    assert found["weight"].tolist() == [1.0, 1.0]
    model = names_of(nn.Sequential(Counting()), torch.ones(2))
    assert model["0.seen"].tolist() == [0.0, 0.0]
    assert (model["0.steps"], model["0.history[0]"], model["Counting.total"]) == (0, 0, 0)


def test_containers_are_distinguished_by_contents_and_order() -> None:
    def describe(value: Any) -> Any:
        return describe_values(walk_values("it", value))["it"]

    assert describe(OrderedDict(b=1, a=2)) == "OrderedDict with the keys 2: 'b', 'a'"
    assert describe({3, 1}) == "set of 2: '1', '3'"
    assert describe(deque([1])) == "deque of 1"
    assert describe(bytearray(b"ab")).tolist() == [97, 98]
    assert describe(iter(())) == describe(one for one in ()) == "iterator"
    assert describe(numpy.arange(2)).tolist() == [0, 1]
    assert describe(numpy.array(["a"])) == "<U1 ['a']"
    pair = [1]
    assert list(describe_values(walk_values("it", [pair, pair]))) == [
        "it",
        "it[0]",
        "it[1]",
        "it[0][0]",
    ]


def test_large_containers_are_distinguished_by_all_contents() -> None:
    def describe(value: Any) -> Any:
        return describe_values(walk_values("it", value))

    ordered = OrderedDict.fromkeys(range(30))
    before = describe(ordered)
    ordered.move_to_end(25)
    after = describe(ordered)
    assert (before["it[key at 25]"], after["it[key at 25]"]) == ("25", "26")
    assert describe({*range(30)}) != describe({*range(29), 99})


def test_whatever_a_call_changes_is_put_back() -> None:
    holder, slotted, model, array = Holder(), Slotted(), Counting(), numpy.zeros(2)
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    drawn = rng.getstate(), generator.get_state()
    containers: list[Any] = [
        OrderedDict(a=1, b=2),
        {1, 2},
        deque([1, 2], maxlen=2),
        defaultdict(list, a=[1]),
        Counter("aab"),
        bytearray(b"ab"),
        [[1], {"a": (2, [3])}],
    ]
    copies = [
        type(one)(one) if not isinstance(one, defaultdict) else dict(one) for one in containers
    ]
    local = 1

    def change(*args: Any) -> None:
        nonlocal local
        global COUNT, NEW
        local, COUNT, NEW = 2, 5, 6  # type: ignore[name-defined]
        change.calls = 3  # type: ignore[attr-defined]
        SEEN.append(1)
        ordered, a_set, queue, default, counter, raw, nested = containers
        ordered.move_to_end("a")
        a_set.add(3)
        queue.append(3)
        default["a"].append(2)
        default["c"].append(1)
        counter.update("c")
        raw.extend(b"c")
        nested[1]["a"][1].append(4)
        nested.pop(0)
        holder.value, holder.items["a"] = 2, []
        holder.other = 1  # type: ignore[attr-defined]
        Holder.shared.append(1)
        Holder.new = 1  # type: ignore[attr-defined]
        slotted.value = 2
        model(torch.ones(2))
        array[:] = 1
        rng.random(), torch.rand(1, generator=generator), random.random(), torch.rand(1)

    state = random.getstate(), torch.get_rng_state()
    with preserved_call_state(change, (holder, slotted, model, array), {"rng": rng}):
        change()
    assert (local, COUNT, SEEN) == (1, 0, [])
    assert "NEW" not in globals()
    assert not hasattr(change, "calls")
    assert [list(one) for one in containers] == [list(one) for one in copies]
    assert (containers[3], containers[6]) == ({"a": [1]}, [[1], {"a": (2, [3])}])
    assert vars(holder) == {"value": 1, "items": {"a": [1]}}
    assert (Holder.shared, hasattr(Holder, "new"), slotted.value) == ([], False, 1)
    assert (model.steps, list(model.history), hasattr(model, "new")) == (0, [0], False)
    assert (Counting.calls, Counting.total, model.seen.tolist()) == ([], 0, [0.0, 0.0])
    assert array.tolist() == [0.0, 0.0]
    assert rng.getstate() == drawn[0]
    assert torch.equal(generator.get_state(), drawn[1])
    assert (random.getstate(), torch.get_rng_state().tolist()) == (state[0], state[1].tolist())


def test_random_numbers_are_put_back_also_where_the_rest_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("not this one")

    x = torch.ones(1)
    state = torch.get_rng_state()
    monkeypatch.setattr("shardscope.compile.preserved_state.TensorBackup.put_back", fail)
    with pytest.raises(RuntimeError, match="not this one"), preserved_call_state(len, ([x],), {}):
        torch.manual_seed(99)
    assert torch.equal(torch.get_rng_state(), state)


def test_of_a_model_only_what_its_code_shares_is_kept_between_runs() -> None:
    model = Counting()
    with preserved_code_state(model):
        model(torch.ones(2))
    assert (Counting.calls, Counting.total, model.steps) == ([], 0, 1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_tensors_of_odd_kinds_are_put_back() -> None:
    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    strided = torch.nested.nested_tensor(parts)
    sparse, rows = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    tensors = (jagged, strided, sparse, rows, quantized, torch.empty(2, device="meta"))

    def change(*tensors: torch.Tensor) -> None:
        tensors[0].mul_(2)
        tensors[1].mul_(2)
        tensors[2].mul_(2)
        tensors[4].fill_(2.0)

    with preserved_call_state(change, tensors, {}):
        change(*tensors)
    assert [one.sum().item() for one in (*jagged.unbind(), *strided.unbind())] == [6, 3, 6, 3]
    assert sparse.to_dense().sum().item() == 3
    assert quantized.dequantize().tolist() == [1.0, 1.0, 1.0]


def test_partials_and_methods_are_looked_into() -> None:
    holder = Holder()
    found = names_of(functools.partial(max, holder, key=[1]))
    assert (found["[0].value"], found["key[0]"]) == (1, 1)
    assert names_of(Counting().forward)["steps"] == 0


def test_a_walk_that_stops_at_its_limit_is_incomplete() -> None:
    items = [[0] for _ in range(5)]  # six objects with the list that contains them
    for limit, expected in [(6, True), (5, False)]:
        walk = StateWalk([("items", items)], is_data=True, limit=limit)
        names = [name for name, value in walk if isinstance(value, list)]
        assert (walk.is_complete, len(names)) == (expected, limit)
    walk = walk_values("items", items)
    assert list_uncompared(walk) == []


@torch.no_grad()
def count_in_decorator(x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    random.shardscope_test_value = COUNT  # type: ignore[attr-defined]
    return x


def test_globals_behind_a_decorator_of_torch_and_of_library_modules_are_restored() -> None:
    before = COUNT
    with preserved_code_state(count_in_decorator):
        count_in_decorator(torch.ones(1))
        names = dict(walk_call(count_in_decorator, (), {}))
        assert names["COUNT"] == names["random.shardscope_test_value"] == before + 1
    assert before == COUNT
    assert not hasattr(random, "shardscope_test_value")


def test_state_of_a_module_imported_by_the_call_is_listed_as_not_compared() -> None:
    def imports_late(x: torch.Tensor) -> torch.Tensor:
        import math

        import small_models

        small_models.counter = math.pi  # type: ignore[attr-defined]
        return x

    (note,) = list_uncompared(walk_call(imports_late, (torch.ones(1),), {}))
    assert note == (
        "imports_late imports small_models while it runs; changes in what it imports there are "
        "not seen."
    )


def test_what_lightning_adds_to_compiled_modules_is_no_state_of_the_program() -> None:
    module = nn.Linear(2, 2)
    module._compile_kwargs = {"backend": "eager"}  # as torch.compile does once it is imported
    assert not [name for name, _ in walk_call(module, (), {}) if "_compile_kwargs" in name]
