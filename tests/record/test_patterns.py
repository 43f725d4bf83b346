"""Which names a pattern matches."""

from __future__ import annotations

import pytest

from shardscope.record.patterns import is_pattern, matches_deeply, matches_parts


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("", ""),
        ("wq", "wq"),
        ("layers.*.wq", "layers.7.wq"),
        ("layers.[0-3].wq", "layers.3.wq"),
        ("layers.[8-15].wq", "layers.10.wq"),
        ("layers.?.w[qkv]", "layers.1.wk"),
        ("**", ""),
        ("**", "a.b.c"),
        ("**.wq", "wq"),
        ("**.wq", "layers.0.attn.wq"),
        ("layers.**", "layers"),
        ("layers.**.weight", "layers.0.attn.weight"),
        ("**.attn.**.weight", "a.attn.b.attn.c.weight"),
        ("odd[0]", "odd[0]"),
    ],
)
def test_a_pattern_matches_part_by_part_and_two_stars_match_any_number(
    pattern: str, name: str
) -> None:
    assert matches_deeply(pattern, name)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("", "wq"),
        ("*", ""),
        ("*", "layers.0"),
        ("layers.*.wq", "layers.0.attn.wq"),
        ("layers.[0-3].wq", "layers.4.wq"),
        ("layers.[8-15].wq", "layers.1.wq"),
        ("layers.[8-15].wq", "layers.-.wq"),
        ("**.wq", "wq.weight"),
        ("layers.**.bias", "layers.0.weight"),
        ("WQ", "wq"),
    ],
)
def test_a_pattern_matches_nothing_else(pattern: str, name: str) -> None:
    assert not matches_deeply(pattern, name)


def test_audits_match_as_torch_does_where_two_stars_are_one_part() -> None:
    assert matches_parts("layers.**.wq", "layers.0.wq")
    assert not matches_parts("layers.**.wq", "layers.0.attn.wq")


def test_a_name_without_wildcards_is_no_pattern() -> None:
    assert not is_pattern("layers.0.wq")
    assert all(map(is_pattern, ("a.*", "a.?", "a.[01]")))
