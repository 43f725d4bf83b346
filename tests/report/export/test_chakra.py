"""The traces are read by protobuf's own library, with Chakra's schema written down apart."""

from __future__ import annotations

import json

import pytest

from sample_recordings import HOSTILE_NAMES, make_collective, make_llama, make_recording
from shardscope.record import (
    CollectiveKind,
    Group,
    RankSpan,
    Recording,
    Source,
    escape_controls,
)
from shardscope.report.export.chakra import list_chakra_ranks, render_chakra, render_chakra_groups

pytest.importorskip("google.protobuf")
from chakra_schema import attributes, read_chakra

COMM_SEND, COMM_RECV, COMM_COLL = 5, 6, 7


def read_nodes(recording: Recording, rank: int = 0) -> list:
    return read_chakra(dict(render_chakra(recording))[rank])[1]


def test_every_collective_of_any_recording_is_a_node(any_recording: Recording) -> None:
    traces = dict(render_chakra(any_recording))
    assert list(traces) == list_chakra_ranks(any_recording)
    for rank, trace in traces.items():
        metadata, nodes = read_chakra(trace)
        assert metadata.version == "0.0.4"
        assert attributes(metadata)["rank"] == rank
        calls = [call for call in any_recording.collectives if call.rank == rank]
        assert [node.id for node in nodes] == list(range(1, len(calls) + 1))
        for node, call in zip(nodes, sorted(calls, key=lambda call: call.order), strict=True):
            assert attributes(node)["comm_size"] == call.input_bytes
            start_ns = None if any_recording.run.is_simulated else call.start_ns
            assert node.start_time_micros == (start_ns or 0) // 1000
            assert node.duration_micros == 0
    assert traces == dict(render_chakra(any_recording))


def test_a_node_says_what_feeders_ask_for_and_where_it_comes_from() -> None:
    node = read_nodes(make_llama(num_layers=1))[1]
    values = attributes(node)
    assert node.name == "all_gather layers.0"
    assert node.type == COMM_COLL
    assert values["comm_type"] == 2
    assert values["is_cpu_op"] is False
    assert values["phase"] == "forward"
    assert values["cause"] == "unshard"
    assert values["source"] == "shardscope/cli/_llama.py:210"
    assert (values["axis"], values["module"]) == ("dp", "layers.0")


def test_kinds_have_the_numbers_of_the_schema() -> None:
    kinds = "all_reduce reduce all_gather gather scatter broadcast all_to_all reduce_scatter"
    calls = tuple(
        make_collective(order=order, kind=CollectiveKind(kind))
        for order, kind in enumerate(kinds.split())
    )
    nodes = read_nodes(make_recording(calls))
    assert [attributes(node)["comm_type"] for node in nodes] == list(range(8))


def test_barriers_and_messages_have_types_of_their_own() -> None:
    calls = (
        make_collective(kind=CollectiveKind.BARRIER),
        make_collective(rank=3, kind=CollectiveKind.SEND, peer=5, input_bytes=64),
        make_collective(rank=3, order=1, kind=CollectiveKind.RECV, peer=6),
        make_collective(rank=3, order=2, kind=CollectiveKind.SEND),
    )
    recording = make_recording(calls)
    assert attributes(read_nodes(recording)[0])["comm_type"] == 9
    sent, received, unknown = read_nodes(recording, 3)
    assert (sent.type, received.type) == (COMM_SEND, COMM_RECV)
    values = attributes(sent)
    assert (values["comm_src"], values["comm_dst"], values["comm_size"]) == (3, 5, 64)
    values = attributes(received)
    assert (values["comm_src"], values["comm_dst"], values["comm_tag"]) == (6, 3, 0)
    assert "comm_dst" not in attributes(unknown)


def test_collectives_of_a_group_wait_for_each_other_and_groups_do_not() -> None:
    calls = tuple(
        make_collective(order=order, group=group) for order, group in enumerate("abab")
    ) + tuple(
        make_collective(order=4 + order, group="a", kind=CollectiveKind(kind), peer=peer)
        for order, (kind, peer) in enumerate([("send", 1), ("recv", 1), ("send", 1), ("send", 2)])
    )
    nodes = read_nodes(make_recording(calls))
    assert [list(node.data_deps) for node in nodes] == [[], [], [1], [2], [], [], [5], []]
    assert not any(node.ctrl_deps for node in nodes)


def test_groups_have_numbers_and_all_ranks_are_number_zero() -> None:
    groups = tuple(
        Group(name=name, torch_name=name, ranks=ranks, num_ranks=sum(span.count for span in ranks))
        for name, ranks in {
            "tp[0-3]": (RankSpan(0, 4),),
            "world": (RankSpan(0, 8),),
            "dp": (RankSpan(1, 2, 4),),
        }.items()
    )
    calls = tuple(
        make_collective(order=order, group=name, rank=1)
        for order, name in enumerate(("world", "tp[0-3]", "dp", "lost"))
    )
    recording = make_recording(calls, groups=groups)
    names = [attributes(node)["pg_name"] for node in read_nodes(recording, 1)]
    assert names == ["0", "1", "2", "3"]
    assert json.loads(render_chakra_groups(recording)) == {"1": [0, 1, 2, 3], "2": [1, 5]}


def test_names_that_no_text_can_hold_do_not_break_a_trace() -> None:
    names = (*HOSTILE_NAMES, "lone \udcff surrogate")
    calls = tuple(
        make_collective(order=order, owner=name, source=Source(file=name, line=1))
        for order, name in enumerate(names)
    )
    nodes = read_nodes(make_recording(calls))
    escaped = [escape_controls(name) for name in HOSTILE_NAMES]
    assert [attributes(node)["module"] for node in nodes[:-1]] == escaped
    assert all(name.isprintable() for name in escaped)
    assert attributes(nodes[-1])["module"] == "lone \\udcff surrogate"


def test_the_largest_numbers_fit() -> None:
    most = 2**63 - 1
    call = make_collective(
        input_bytes=most, start_ns=most, kind=CollectiveKind.RECV, peer=2**20 - 1
    )
    (node,) = read_nodes(make_recording((call,)))
    assert attributes(node)["comm_size"] == most
    assert attributes(node)["comm_src"] == 2**20 - 1
