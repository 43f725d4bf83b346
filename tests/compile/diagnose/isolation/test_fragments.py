"""Fragments in another process: the same names, targets and numbers."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import isolated_calls as calls
from captured_fragments import PROGRAMS, capture, run
from case_ids import without_address
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.isolation.payload import decode_fragment, encode_fragment
from shardscope.compile.diagnose.isolation.workers import Workers
from shardscope.errors import CompileError


def assert_same(got: Any, expected: Any) -> None:
    for ours, theirs in zip(expected, got, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_worker_computes_what_a_captured_graph_computes_here(name: str, workers: Workers) -> None:
    program = PROGRAMS[name]
    fragments = capture(program.function, *program.args())
    assert fragments
    for fragment in fragments:
        assert_same(workers.call(calls.compute, fragment), run(fragment))


@pytest.mark.parametrize("name", PROGRAMS)
def test_nodes_keep_their_names_targets_and_origins(name: str) -> None:
    program = PROGRAMS[name]
    for fragment in capture(program.function, *program.args()):
        made = decode_fragment(encode_fragment(fragment))
        nodes = list(zip(fragment.graph.graph.nodes, made.graph.graph.nodes, strict=True))
        for node, other in nodes:
            assert (node.name, node.op, node.target) == (other.name, other.op, other.target)
            assert node.meta.get("stack_trace") == other.meta.get("stack_trace")
            assert list(node.meta.get("nn_module_stack", ())) == list(
                other.meta.get("nn_module_stack", ())
            )
            assert "example_value" not in other.meta
        assert any(node.meta.get("stack_trace") for node, _ in nodes)
        assert fragment.with_gradients == made.with_gradients


def make_fragment(target: Any, *inputs: Any, op: str = "call_function", **kwargs: Any) -> Fragment:
    graph = fx.Graph()
    nodes = tuple(graph.placeholder(f"x_{order}") for order in range(len(inputs)))
    result = graph.create_node(op, target, nodes, kwargs)
    graph.output((result,))
    return Fragment(fx.GraphModule({}, graph), inputs, with_gradients=False)


@pytest.mark.parametrize(
    "target",
    [
        torch.ops.aten.relu.default,
        torch.ops.aten.relu,
        torch.nn.functional.relu,
        torch.relu,
        torch.nn.functional.gelu,
        torch.manual_seed,
        torch.nn.functional.max_pool2d,
        torch.unique,
        torch.Tensor.relu,
        torch.sym_max,
        len,
    ],
    ids=without_address,
)
def test_a_target_is_the_same_object_there(target: Any) -> None:
    made = decode_fragment(encode_fragment(make_fragment(target, torch.ones(2))))
    (node,) = (node for node in made.graph.graph.nodes if node.op == "call_function")
    assert node.target is target or node.target == target


def test_arguments_of_all_kinds_survive() -> None:
    kwargs = {
        "index": (slice(None, 1), Ellipsis, None, slice(-1)),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "layout": torch.strided,
        "memory_format": torch.channels_last,
        "size": torch.Size([1, 2]),
        "nested": [[1, 2.5], (True, "s"), {"a": complex(1, 2)}],
        "infinite": float("inf"),
        "span": range(3),
    }
    made = decode_fragment(encode_fragment(make_fragment(torch.relu, torch.ones(2), **kwargs)))
    (node,) = (node for node in made.graph.graph.nodes if node.op == "call_function")
    assert dict(node.kwargs) == kwargs


def test_tensors_that_share_memory_share_it_there(workers: Workers) -> None:
    base = torch.zeros(4, 6)
    views = (base, base.t()[1:3], base, base.view(-1).as_strided((2, 2), (3, 1), 5))
    got = workers.call(calls.write_through, views)
    assert got[0] is got[2]
    assert all(
        torch.equal(one, torch.full(view.shape, 7.0)) for one, view in zip(got, views, strict=True)
    )
    got[0].zero_()
    assert not got[1].any()
    assert workers.call(calls.look_at, views) == calls.look_at(None, views)  # type: ignore[arg-type]


def test_tensors_of_all_kinds_look_the_same_there(workers: Workers) -> None:
    tensors = (
        nn.Parameter(torch.ones(2, 3)),
        nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(3, requires_grad=True),
        torch.ones(3, requires_grad=True) * 2,
        torch.empty(0, 5),
        torch.tensor(3),
        torch.ones(2, 2, dtype=torch.complex64),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)[:, 1:],
        torch.ones(1).expand(4, 3),
        torch.tensor([True, False]),
        torch.ones(4).to(torch.float8_e4m3fn),
    )
    assert workers.call(calls.look_at, tensors) == calls.look_at(None, tensors)  # type: ignore[arg-type]
    got = workers.call(lambda bench, sent: sent, tensors)
    assert [type(one) for one in got] == [type(one) for one in tensors]
    assert [one.is_leaf for one in got] == [one.is_leaf for one in tensors]
    assert all(torch.equal(one, other) for one, other in zip(got[:-1], tensors[:-1], strict=True))


def test_what_arrives_is_plain_whatever_the_receiver_is_doing() -> None:
    data = encode_fragment(make_fragment(torch.relu, torch.ones(2, requires_grad=True)))
    with torch._subclasses.FakeTensorMode(), torch.device("meta"), torch.inference_mode():
        (got,) = decode_fragment(data).inputs
    assert torch.equal(got, torch.ones(2))
    assert got.requires_grad


def test_symbols_become_the_numbers_of_this_run() -> None:
    (fragment,) = capture(
        lambda x: x.reshape(x.shape[1], x.shape[0]) * x.shape[0], torch.ones(3, 5), dynamic=True
    )
    made = decode_fragment(encode_fragment(fragment))
    assert all(isinstance(one, int | torch.Tensor) for one in made.inputs)
    assert_same(run(made), run(fragment))


def test_an_op_that_is_defined_here_alone_is_defined_there(workers: Workers) -> None:
    @torch.library.custom_op(
        "shardscope_tests::scaled",
        mutates_args=("out",),
        tags=(torch.Tag.needs_fixed_stride_order,),
    )
    def scaled(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * factor)

    @scaled.register_kernel("cpu")
    def on_cpu(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * factor * 2)

    factor = 3
    fragment = make_fragment(
        torch.ops.shardscope_tests.scaled.default, torch.ones(2), torch.zeros(2)
    )
    sent = workers.call(lambda bench, one: (one.graph(*one.inputs), one.inputs), fragment)
    assert torch.equal(sent[1][1], torch.full((2,), 6.0))
    out = workers.call(lambda bench, out: (scaled(torch.ones(2), out), out)[1], torch.zeros(2))
    assert torch.equal(out, torch.full((2,), 6.0))
    op = torch.ops.shardscope_tests.scaled.default
    assert workers.call(lambda bench: (op.tags, str(op._schema))) == (op.tags, str(op._schema))


_BARE_OPS = """
import torch

library = torch.library.Library("{name}", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")
"""


def test_an_op_of_a_file_that_nobody_can_import_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(_BARE_OPS.format(name="shardscope_tests_bare"))
    library = runpy.run_path(str(tmp_path / "ops.py"))["library"]
    fragment = make_fragment(torch.ops.shardscope_tests_bare.twice.default, torch.ones(2))
    with pytest.raises(CompileError, match=r"the op shardscope_tests_bare::twice is registered in"):
        encode_fragment(fragment)
    del library  # which took the op with it, had it gone earlier


def test_an_op_is_registered_by_an_import_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: Workers
) -> None:
    (tmp_path / "importable_ops.py").write_text(_BARE_OPS.format(name="shardscope_tests_module"))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("importable_ops")
    op = torch.ops.shardscope_tests_module.twice.default
    outputs, _ = workers.call(calls.compute, make_fragment(op, torch.ones(2)))
    assert torch.equal(outputs[0], torch.full((2,), 2.0))


def test_tensors_without_data_are_refused_in_a_sentence() -> None:
    fragment = make_fragment(torch.relu, torch.ones(2, device="meta"))
    with pytest.raises(CompileError, match=r"'x_0' of the graph has no data \(it is on the meta"):
        encode_fragment(fragment)
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    with pytest.raises(CompileError, match=r"'x_0' of the graph has no data \(its memory has been"):
        encode_fragment(make_fragment(torch.relu, freed))
    with torch._subclasses.FakeTensorMode():
        fragment = make_fragment(torch.relu, torch.ones(2))
    with pytest.raises(CompileError, match=r"'x_0' of the graph has no data \(it is fake\)"):
        encode_fragment(fragment)


def test_constants_of_a_graph_and_tensors_that_it_holds_twice_travel() -> None:
    weight = nn.Parameter(torch.ones(3))
    graph = fx.Graph()
    left, right = graph.get_attr("deep.left"), graph.get_attr("right")
    total = graph.call_function(torch.add, (left, right))
    graph.output((total, left, None, 3))
    module = fx.GraphModule({"deep.left": weight, "right": weight}, graph)
    made = decode_fragment(encode_fragment(Fragment(module, (), with_gradients=True)))
    assert made.graph.deep.left is made.graph.right
    assert isinstance(made.graph.right, nn.Parameter)
    assert_same([made.graph()[:2]], [module()[:2]])
    assert made.graph()[2:] == (None, 3)
