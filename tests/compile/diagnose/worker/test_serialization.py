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
from shardscope.compile.diagnose.subgraph.subgraph import Subgraph
from shardscope.compile.diagnose.worker.pool import Workers
from shardscope.compile.diagnose.worker.serialization import decode_subgraph, encode_subgraph
from shardscope.errors import CompileError


def assert_same(got: Any, expected: Any) -> None:
    for expected_row, row in zip(expected, got, strict=True):
        for left, right in zip(expected_row, row, strict=True):
            assert (left is None and right is None) or torch.equal(left, right)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_worker_computes_what_a_captured_graph_computes_here(name: str, workers: Workers) -> None:
    program = PROGRAMS[name]
    subgraphs = capture(program.function, *program.args())
    assert subgraphs
    for subgraph in subgraphs:
        assert_same(workers.call(calls.compute, subgraph), run(subgraph))


@pytest.mark.parametrize("name", PROGRAMS)
def test_nodes_keep_their_names_targets_and_origins(name: str) -> None:
    program = PROGRAMS[name]
    for subgraph in capture(program.function, *program.args()):
        decoded = decode_subgraph(encode_subgraph(subgraph))
        nodes = list(zip(subgraph.graph.graph.nodes, decoded.graph.graph.nodes, strict=True))
        for node, value in nodes:
            assert (node.name, node.op, node.target) == (value.name, value.op, value.target)
            assert node.meta.get("stack_trace") == value.meta.get("stack_trace")
            assert list(node.meta.get("nn_module_stack", ())) == list(
                value.meta.get("nn_module_stack", ())
            )
            assert "example_value" not in value.meta
        assert any(node.meta.get("stack_trace") for node, _ in nodes)
        assert subgraph.with_gradients == decoded.with_gradients


def make_subgraph(target: Any, *inputs: Any, op: str = "call_function", **kwargs: Any) -> Subgraph:
    graph = fx.Graph()
    nodes = tuple(graph.placeholder(f"x_{order}") for order in range(len(inputs)))
    result = graph.create_node(op, target, nodes, kwargs)
    graph.output((result,))
    return Subgraph(fx.GraphModule({}, graph), inputs, with_gradients=False)


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
    decoded = decode_subgraph(encode_subgraph(make_subgraph(target, torch.ones(2))))
    (node,) = (node for node in decoded.graph.graph.nodes if node.op == "call_function")
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
    decoded = decode_subgraph(encode_subgraph(make_subgraph(torch.relu, torch.ones(2), **kwargs)))
    (node,) = (node for node in decoded.graph.graph.nodes if node.op == "call_function")
    assert dict(node.kwargs) == kwargs


def test_tensors_that_share_memory_share_it_there(workers: Workers) -> None:
    base = torch.zeros(4, 6)
    views = (base, base.t()[1:3], base, base.view(-1).as_strided((2, 2), (3, 1), 5))
    got = workers.call(calls.write_through, views)
    assert got[0] is got[2]
    assert all(
        torch.equal(value, torch.full(view.shape, 7.0))
        for value, view in zip(got, views, strict=True)
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
    got = workers.call(lambda context, sent: sent, tensors)
    assert [type(value) for value in got] == [type(tensor) for tensor in tensors]
    assert [value.is_leaf for value in got] == [tensor.is_leaf for tensor in tensors]
    assert all(torch.equal(left, right) for left, right in zip(got[:-1], tensors[:-1], strict=True))


def test_what_arrives_is_plain_whatever_the_receiver_is_doing() -> None:
    data = encode_subgraph(make_subgraph(torch.relu, torch.ones(2, requires_grad=True)))
    with torch._subclasses.FakeTensorMode(), torch.device("meta"), torch.inference_mode():
        (got,) = decode_subgraph(data).inputs
    assert torch.equal(got, torch.ones(2))
    assert got.requires_grad


def test_symbols_become_the_numbers_of_this_run() -> None:
    (subgraph,) = capture(
        lambda x: x.reshape(x.shape[1], x.shape[0]) * x.shape[0], torch.ones(3, 5), dynamic=True
    )
    decoded = decode_subgraph(encode_subgraph(subgraph))
    assert all(isinstance(value, int | torch.Tensor) for value in decoded.inputs)
    assert_same(run(decoded), run(subgraph))


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
    subgraph = make_subgraph(
        torch.ops.shardscope_tests.scaled.default, torch.ones(2), torch.zeros(2)
    )
    sent = workers.call(
        lambda context, subgraph: (subgraph.graph(*subgraph.inputs), subgraph.inputs), subgraph
    )
    assert torch.equal(sent[1][1], torch.full((2,), 6.0))
    out = workers.call(lambda context, out: (scaled(torch.ones(2), out), out)[1], torch.zeros(2))
    assert torch.equal(out, torch.full((2,), 6.0))
    op = torch.ops.shardscope_tests.scaled.default
    assert workers.call(lambda context: (op.tags, str(op._schema))) == (op.tags, str(op._schema))


_BARE_OPS = """
import torch

library = torch.library.Library("{name}", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")
"""


def test_an_op_of_a_file_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(_BARE_OPS.format(name="shardscope_tests_bare"))
    library = runpy.run_path(str(tmp_path / "ops.py"))["library"]
    subgraph = make_subgraph(torch.ops.shardscope_tests_bare.twice.default, torch.ones(2))
    with pytest.raises(CompileError, match=r"the op shardscope_tests_bare::twice is registered in"):
        encode_subgraph(subgraph)
    del library  # which took the op with it, had it gone earlier


def test_an_op_is_registered_by_an_import_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: Workers
) -> None:
    (tmp_path / "importable_ops.py").write_text(_BARE_OPS.format(name="shardscope_tests_module"))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("importable_ops")
    op = torch.ops.shardscope_tests_module.twice.default
    outputs, _ = workers.call(calls.compute, make_subgraph(op, torch.ones(2)))
    assert torch.equal(outputs[0], torch.full((2,), 2.0))


def test_tensors_without_data_are_refused_in_a_sentence() -> None:
    subgraph = make_subgraph(torch.relu, torch.ones(2, device="meta"))
    with pytest.raises(CompileError, match=r"'x_0' of the graph has no data \(it is on the meta"):
        encode_subgraph(subgraph)
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    with pytest.raises(CompileError, match=r"'x_0' of the graph has no data \(its memory has been"):
        encode_subgraph(make_subgraph(torch.relu, freed))
    with torch._subclasses.FakeTensorMode():
        subgraph = make_subgraph(torch.relu, torch.ones(2))
    with pytest.raises(CompileError, match=r"'x_0' of the graph has no data \(it is fake\)"):
        encode_subgraph(subgraph)


def test_constants_of_a_graph_and_tensors_that_it_holds_twice_travel() -> None:
    weight = nn.Parameter(torch.ones(3))
    graph = fx.Graph()
    left, right = graph.get_attr("deep.left"), graph.get_attr("right")
    total = graph.call_function(torch.add, (left, right))
    graph.output((total, left, None, 3))
    module = fx.GraphModule({"deep.left": weight, "right": weight}, graph)
    decoded = decode_subgraph(encode_subgraph(Subgraph(module, (), with_gradients=True)))
    assert decoded.graph.deep.left is decoded.graph.right
    assert isinstance(decoded.graph.right, nn.Parameter)
    assert_same([decoded.graph()[:2]], [module()[:2]])
    assert decoded.graph()[2:] == (None, 3)
