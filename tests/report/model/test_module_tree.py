"""Identical layers fold; a layer that differs in anything does not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sample_recordings import make_collective, make_llama, make_recording
from shardscope.record import Module, Parameter, Phase, RankSpan
from shardscope.report.model.module_tree import build_tree, fold_repeated_layers
from shardscope.report.model.traffic_totals import fold_ranks


def _fold(recording):
    roots = build_tree(recording, fold_ranks(recording))
    return fold_repeated_layers(roots[0])


def _layers(recording):
    (layers,) = [child for child in _fold(recording).children if child.label == "layers"]
    return [(node.label, node.last_label, node.repeat) for node in layers.children]


def _stack(num_layers, **odd):
    """A stack of layers, each with one collective, but for the changes to some."""
    changes = {int(key[1:]): value for key, value in odd.items()}
    calls = tuple(
        make_collective(order=index, **({"owner": f"layers.{index}.mlp"} | changes.get(index, {})))
        for index in range(num_layers)
    )
    modules = tuple(
        Module(name=f"layers.{index}", type="Block", ranks=(RankSpan(0),))
        for index in range(num_layers)
    )
    return make_recording(calls, modules=modules)


def test_equal_layers_fold_into_a_single_node():
    assert _layers(make_llama()) == [("0", "31", 32)]


def test_a_layer_with_different_collectives_is_not_folded():
    assert _layers(_stack(6, _0={"wire_bytes": 1}, _5={"phase": Phase.BACKWARD})) == [
        ("0", "", 1),
        ("1", "4", 4),
        ("5", "", 1),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"type": "Other"},
        {"parameters": (Parameter(name="w", shape=(1,), local_shape=(1,), dtype="int8"),)},
    ],
)
def test_layer_of_another_type_or_with_other_parameters_breaks_the_run(change):
    recording = _stack(3)
    odd = replace(recording.modules[1], **change)
    recording = replace(recording, modules=(recording.modules[0], odd, recording.modules[2]))
    assert len(_layers(recording)) == 3


def test_identical_children_with_names_do_not_fold():
    calls = tuple(make_collective(owner=name, order=i) for i, name in enumerate(("wq", "wk")))
    assert [child.label for child in _fold(make_recording(calls)).children] == ["wq", "wk"]


def test_stacks_within_stacks_fold():
    calls = tuple(
        make_collective(owner=f"experts.{outer}.{inner}", order=outer * 4 + inner)
        for outer in range(3)
        for inner in range(4)
    )
    (experts,) = _fold(make_recording(calls)).children
    (outer,) = experts.children
    (inner,) = outer.children
    assert (outer.repeat, inner.repeat) == (3, 4)


def test_totals_include_children_and_own_does_not():
    root = _fold(_stack(4))
    assert root.count().high == 4
    assert root.own_totals().count == 0
    assert root.count(phase=Phase.FORWARD).high == 4
    assert root.count(phase=Phase.BACKWARD).high == 0
    assert root.wire_bytes().high == 4 * 7168
    assert root.input_bytes().high == 4 * 4096


def test_folding_keeps_the_totals():
    recording = make_llama()
    (root, _) = build_tree(recording, fold_ranks(recording))
    assert fold_repeated_layers(root).total == root.total


def test_owner_that_is_no_known_module_is_in_the_tree():
    root = _fold(make_recording((make_collective(owner="ghost.a"),)))
    assert [child.path for child in root.children] == ["ghost"]
    assert root.children[0].types == ()


def test_ranks_with_the_same_collectives_share_a_set():
    assert len(fold_ranks(make_llama(num_layers=2, dp=1, ranks=tuple(range(8))))) == 1
    calls = tuple(make_collective(rank=rank, wire_bytes=rank // 4) for rank in range(8))
    rank_sets = fold_ranks(make_recording(calls))
    assert [rank_set.ranks for rank_set in rank_sets] == [(RankSpan(0, 4),), (RankSpan(4, 4),)]


def test_recorded_rank_without_collectives_is_a_set():
    rank_sets = fold_ranks(make_recording((make_collective(),), ranks=(0, 1)))
    assert [len(rank_set.calls) for rank_set in rank_sets] == [1, 0]
