"""Any part of a program, run alone, computes what it computed in the full graph."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import fx

from captured_models import CASES, capture
from shardscope.compile.diagnose.minimize import Answer, OpSearch
from shardscope.compile.diagnose.subgraph.extract import RecordedGraph
from shardscope.compile.diagnose.subgraph.subgraph import (
    Subgraph,
    copy_tensor,
    map_tensors,
    tensors_in,
)

SEED = 3
RANDOM = {"dropout", "random_numbers"}


class Watched(fx.Interpreter):
    """Keeps a copy of what every node makes, right after it made it."""

    def __init__(self, subgraph: Subgraph) -> None:
        super().__init__(subgraph.graph)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "placeholder" and "functorch" not in str(getattr(n.target, "__module__", "")):
            with suppress(RuntimeError, NotImplementedError):  # what vmap makes has no memory
                self.values[n.name] = map_tensors(value, _copy)
        return value


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return copy_tensor(tensor).requires_grad_(tensor.requires_grad)


def run_full_graph(subgraph: Subgraph) -> dict[str, Any]:
    """What a program computes that may write to inputs of which gradients are wanted."""
    return run_eagerly(subgraph, copy=lambda value: _copy(value).clone())[0]


def run_eagerly(
    subgraph: Subgraph, copy: Callable[[torch.Tensor], torch.Tensor] = _copy
) -> tuple[dict[str, Any], list[Any], Any]:
    watched = Watched(subgraph)
    leaves = map_tensors(list(subgraph.inputs), copy)
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(subgraph.with_gradients):
        torch.manual_seed(SEED)
        outputs = watched.run(*leaves)
    return watched.values, leaves, outputs


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
    for left, right in zip(tensors_in(got), tensors_in(expected), strict=True):
        assert (left.dtype, left.size()) == (right.dtype, right.size()), where
        assert left.requires_grad == right.requires_grad, where
        assert torch.equal(left, right) or left.isnan().any(), where


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("max_bytes", [1 << 30, 0], ids=["held", "computed again"])
@pytest.mark.parametrize("case", [name for name in CASES if name not in RANDOM])
def test_every_part_computes_what_the_full_graph_did(case: str, max_bytes: int) -> None:
    torch.manual_seed(0)
    function, args = CASES[case]()
    rng = random.Random(case)
    for subgraph in capture(function, *args):
        expected = run_full_graph(subgraph)
        recorded = RecordedGraph(subgraph, seed=SEED, max_bytes=max_bytes)
        assert len(recorded.ops) >= 3
        for keep in parts_of(recorded.ops, rng, 12):
            part = recorded.extract(keep)
            part.graph.graph.lint()
            got, leaves, outputs = run_eagerly(part)
            computed = {name for name in list(got)[:-1] if "_written_" not in name}
            assert computed <= set(expected), keep
            assert set(keep) <= {node.name for node in part.graph.graph.nodes}
            for name in computed:
                assert_same(got[name], expected[name], f"{name} of {keep}")
            assert_has_gradients(part, leaves, outputs)


def assert_has_gradients(part: Subgraph, leaves: list[Any], outputs: Any) -> None:
    differentiable = [
        output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad
    ]
    assert bool(differentiable) <= part.with_gradients
    if differentiable:
        torch.autograd.backward(
            differentiable, [torch.ones_like(value) for value in differentiable]
        )
        assert any(leaf.grad is not None for leaf in leaves if isinstance(leaf, torch.Tensor))


@pytest.mark.parametrize("case", sorted(RANDOM))
def test_what_is_drawn_at_random_is_drawn_again_from_the_same_seed(case: str) -> None:
    torch.manual_seed(0)
    function, args = CASES[case]()
    (subgraph,) = capture(function, *args)
    expected = run_full_graph(subgraph)
    recorded = RecordedGraph(subgraph, seed=SEED)
    before = torch.get_rng_state()
    for last in range(1, len(recorded.ops) + 1):
        got, _, _ = run_eagerly(recorded.extract(recorded.ops[:last]))
        for name in recorded.ops[:last]:
            assert_same(got[name], expected[name], name)
    assert torch.equal(before, torch.get_rng_state())


def captured(function: Callable[..., Any], *args: Any, **options: Any) -> RecordedGraph:
    (subgraph,) = capture(function, *args, **options)
    return RecordedGraph(subgraph, seed=SEED)


def code_of(part: Subgraph) -> list[str]:
    return [
        f"{node.name} = {getattr(node.target, '__name__', node.target)}{node.args}"
        for node in part.graph.graph.nodes
        if node.op not in ("placeholder", "output")
    ]


def outputs_of(part: Subgraph) -> list[str]:
    (outputs,) = part.graph.graph.output_node().args
    assert isinstance(outputs, tuple)
    return [node.name for node in outputs if isinstance(node, fx.Node)]


def inputs_of(part: Subgraph) -> list[str]:
    return [node.name for node in part.graph.graph.find_nodes(op="placeholder")]


def test_getitem_nodes_belong_to_the_op_that_made_the_tuple() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2)
        return (a + b)[0]

    recorded = captured(function, torch.ones(2, 2))
    assert recorded.ops == ("chunk", "add", "getitem_2")
    assert recorded.reads == {"chunk": (), "add": ("chunk",), "getitem_2": ("add",)}
    part = recorded.extract(["chunk"])
    assert [line.split(" = ")[0] for line in code_of(part)] == ["chunk", "a", "b"]
    assert outputs_of(part) == ["a", "b"]


def test_inputs_replace_removed_producers_and_outputs_feed_removed_consumers() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        b = a.cos()
        c = a * b
        d = c.exp()
        return d + b

    recorded = captured(function, torch.ones(2))
    part = recorded.extract(["b", "c"])
    assert inputs_of(part) == ["a"]
    assert torch.equal(part.inputs[0], torch.ones(2).sin())
    assert outputs_of(part) == ["b", "c"]
    assert outputs_of(recorded.extract(["add"])) == ["add"]
    assert [node.meta["stack_trace"] for node in part.graph.graph.find_nodes(op="placeholder")]


def test_a_value_that_is_written_to_in_between_is_given_twice() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        early = y.exp()
        y.zero_()
        late = y + 1
        return early + late

    recorded = captured(function, torch.ones(2))
    part = recorded.extract(["early", "late"])
    assert inputs_of(part) == ["y", "y_given_1"]
    assert torch.equal(part.inputs[0], torch.ones(2).sin())
    assert torch.equal(part.inputs[1], torch.zeros(2))
    assert inputs_of(recorded.extract(["early", "zero_", "late"])) == ["y"]


def test_a_kept_value_that_removed_ops_write_to_keeps_its_name() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.zero_()
        return y + 1

    part = captured(function, torch.ones(2)).extract(["y", "add"])
    assert code_of(part) == ["y = sin(l_x_,)", "add = add(y_given_1, 1)"]


def test_a_write_whose_result_is_not_read_shows_in_its_input() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y[0] = 3
        return y + 1

    part = captured(function, torch.ones(2)).extract(["setitem"])
    assert outputs_of(part) == ["y"]


@pytest.mark.parametrize("max_bytes", [1 << 30, 0], ids=["held", "computed again"])
def test_inputs_that_share_memory_do_so_in_the_run(max_bytes: int) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    (subgraph,) = capture(function, torch.zeros(4), torch.zeros(2))
    full = torch.zeros(4)
    shared = Subgraph(subgraph.graph, (full, full[2:]), False)
    recorded = RecordedGraph(shared, max_bytes=max_bytes)
    part = recorded.extract([recorded.ops[-1]])
    assert torch.equal(part.inputs[0], torch.ones(2))
    assert torch.equal(full, torch.zeros(4))
    # The two are apart in a part: what is read after the write is given as it was then.
    both = recorded.extract(recorded.ops)
    assert [value.tolist() for value in both.inputs] == [[0] * 4, [1] * 2]


def test_writes_to_what_needs_gradients_go_to_a_copy() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().relu_() * 2

    part = captured(function, torch.ones(2, requires_grad=True)).extract(["relu_"])
    assert code_of(part) == ["sin_written_1 = clone(sin,)", "relu_ = relu_(sin_written_1,)"]
    plain = captured(function, torch.ones(2)).extract(["relu_"])
    assert code_of(plain) == ["relu_ = relu_(sin,)"]


def test_ops_run_in_the_modes_in_which_they_ran() -> None:
    function, args = CASES["autocasts"]()
    recorded = captured(function, *args)
    assert not [name for name in recorded.ops if "autocast" in name]
    inner, outer = recorded.ops[3], recorded.ops[4]
    lines = "\n".join(code_of(recorded.extract([inner, outer])))
    assert lines.count("_enter_autocast(") == lines.count("_exit_autocast(") == 2
    assert "autocast" not in "\n".join(
        code_of(recorded.extract([recorded.ops[0], recorded.ops[-1]]))
    )


def test_modes_are_as_before_when_a_run_ends_early() -> None:
    function, args = CASES["autocasts"]()
    (subgraph,) = capture(function, *args)
    recorded = RecordedGraph(subgraph, seed=SEED, max_bytes=0)
    recorded.extract([recorded.ops[3]])
    assert not torch.is_autocast_enabled("cpu")
    node = next(iter(subgraph.graph.graph.find_nodes(op="call_method", target="float")))
    node.target = "not_there"
    with pytest.raises(AttributeError, match="not_there"):
        RecordedGraph(subgraph, seed=SEED)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


def test_sizes_that_are_left_out_are_numbers_in_what_is_left() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().reshape(x.shape[0] * 2, -1) + x.shape[1]

    recorded = captured(function, torch.ones(4, 6), dynamic=True)
    assert recorded.ops == ("sin", "mul", "reshape", "add")
    part = recorded.extract(["reshape"])
    assert code_of(part) == ["reshape = reshape(sin, 8, -1)"]
    for keep in parts_of(recorded.ops, random.Random(0), 5):
        run_eagerly(recorded.extract(keep))


def test_modules_that_a_graph_calls_are_copied_with_their_state() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    graph = fx.symbolic_trace(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    output = graph.graph.output_node()
    output.args = ((output.args[0],),)
    graph.recompile()
    recorded = RecordedGraph(Subgraph(graph, (torch.randn(3, 4),), True))
    assert recorded.ops == ("_0", "_1")
    part = recorded.extract(["_1"])
    part.graph(*part.inputs)
    after = model.state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_every_tensor_on_the_way_can_be_exposed() -> None:
    function, args = CASES["several_outputs"]()
    (subgraph,) = capture(function, *args)
    exposed = RecordedGraph(subgraph).output_all_values()
    expected = run_full_graph(subgraph)
    _, _, outputs = run_eagerly(exposed)
    names = outputs_of(exposed)
    tensors = {name for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert set(names) == tensors
    assert names[: len(outputs_of(subgraph))] == outputs_of(subgraph)
    for name, value in zip(names, outputs, strict=True):
        assert_same(value.detach(), expected[name].detach(), name)


def test_a_bad_op_in_a_hundred_that_the_outputs_hide_is_found_by_exposing_parts() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for step in range(25):
            x = (x.sin() + step).tanh() * 2  # which is 2 before long: it hides what was wrong
            x = x.cos() if step == 17 else x.sin()
        return x.relu()

    recorded = captured(function, torch.linspace(-1, 1, 8))

    def ask(keep: frozenset[str]) -> Answer:
        part = recorded.extract(keep, outputs_all=True)
        wrong = fx.GraphModule(part.graph, fx.Graph())
        wrong.graph.output(wrong.graph.graph_copy(part.graph.graph, {}))
        for node in wrong.graph.find_nodes(op="call_method", target="cos"):
            node.target = "sin"
        wrong.recompile()
        pairs = zip(part.graph(*part.inputs), wrong(*part.inputs), strict=True)
        is_same = all(torch.equal(left, right) for left, right in pairs)
        return Answer.PASSES if is_same else Answer.FAILS

    assert len(recorded.ops) > 100
    shrunk = OpSearch(recorded.ops, ask)
    shrunk.run(reads=recorded.reads)
    found = recorded.extract(shrunk.keep).graph.graph.find_nodes(op="call_method", target="cos")
    assert [node.name for node in found] == list(shrunk.keep)
    assert shrunk.is_minimal
    assert shrunk.num_queries <= 8
