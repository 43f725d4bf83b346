"""Sets of ranks survive being folded into spans, whatever is in them."""

from __future__ import annotations

import random

import msgspec
import pytest

from shardscope.record import (
    RankSpan,
    compress_ranks,
    count_ranks,
    expand_ranks,
    format_ranks,
    rank_at,
)
from shardscope.record.ranks import MAX_RANKS


def _make_sets():
    """Regular meshes, random sets, and sequences that are not sorted."""
    choose = random.Random(0)
    yield from ([], [0], [5], [0, 1], [0, 7], [3, 3], [9, 4], [0, 1, 2, 4, 8, 16, 17, 18])
    for step in (1, 2, 8, 128):
        yield list(range(choose.randrange(64), 1024, step))
    for size in range(1, 40):
        yield sorted(choose.sample(range(64), size))
        yield [choose.randrange(32) for _ in range(size)]
    yield sorted(choose.sample(range(MAX_RANKS), 500))


_SETS = list(_make_sets())


@pytest.mark.parametrize("ranks", _SETS, ids=lambda ranks: f"{len(ranks)} ranks {ranks[:4]}")
def test_spans_give_back_the_ranks_in_their_order(ranks):
    spans = compress_ranks(ranks)
    assert list(expand_ranks(spans)) == ranks
    assert count_ranks(spans) == len(ranks)
    assert [rank_at(spans, position) for position in range(len(ranks))] == ranks
    assert len(spans) <= len(ranks)


@pytest.mark.parametrize("ranks", _SETS, ids=lambda ranks: f"{len(ranks)} ranks {ranks[:4]}")
def test_spans_survive_json(ranks):
    spans = compress_ranks(ranks)
    encoded = msgspec.json.encode(spans)
    assert msgspec.json.decode(encoded, type=tuple[RankSpan, ...]) == spans


def _parse(text):
    for part in filter(None, text.split(",")):
        ends, _, step = part.partition("/")
        first, _, last = ends.partition("-")
        yield from range(int(first), int(last or first) + 1, int(step or 1))


@pytest.mark.parametrize("ranks", _SETS, ids=lambda ranks: f"{len(ranks)} ranks {ranks[:4]}")
def test_written_out_ranks_name_each_one(ranks):
    assert list(_parse(format_ranks(compress_ranks(ranks)))) == ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        (range(8), "0-7"),
        (range(0, 1024, 8), "0-1016/8"),
        ([0, 1, 5], "0-1,5"),
        ([0, 7], "0-7/7"),
        ([0, 1, 2, 10, 20], "0-2,10,20"),
    ],
)
def test_ranks_are_written_as_people_read_them(ranks, text):
    assert format_ranks(compress_ranks(ranks)) == text


def test_axis_of_a_mesh_is_one_span():
    for first in range(8):
        assert compress_ranks(range(first, 16_384, 8)) == (RankSpan(first, 2048, 8),)


@pytest.mark.parametrize("spans", [(), (RankSpan(4),), (RankSpan(0, 2), RankSpan(8, 3, 2))])
def test_position_past_the_last_rank_is_an_index_error(spans):
    with pytest.raises(IndexError, match="there is no rank at position"):
        rank_at(spans, count_ranks(spans))
