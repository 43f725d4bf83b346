"""Which names a pattern matches."""

from __future__ import annotations

import pytest

from shardscope.record.patterns import NameTree, is_pattern, matches_inside, matches_name


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
    assert matches_name(pattern, name)


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
    assert not matches_name(pattern, name)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("", ""),
        ("", "layers.0"),
        ("layers", "layers.0.wq"),
        ("layers.*", "layers.0.wq.weight"),
        ("**.attn", "layers.0.attn.wq"),
    ],
)
def test_a_name_is_inside_a_module_that_matches(pattern: str, name: str) -> None:
    assert matches_inside(pattern, name)


@pytest.mark.parametrize(
    ("pattern", "name"), [("layers.0", "layers.01"), ("*.wq", "layers"), ("a.b", "a"), ("*", "")]
)
def test_a_name_is_not_inside_a_sibling_or_a_child(pattern: str, name: str) -> None:
    assert not matches_inside(pattern, name)


def test_a_tree_finds_what_a_pattern_matches() -> None:
    tree = NameTree()
    names = ["", "wq", "layers", "layers.3.wq", "layers.10.wq", "layers.10.attn.wq"]
    for name in names:
        tree.add(name, stands_for=name)
    for pattern in ("", "*", "**", "**.wq", "layers.*.wq", "layers.[8-15].**", "layers.?.wq", "no"):
        assert tree.find(pattern) == {name for name in names if matches_name(pattern, name)}
    tree.add("tied.wq", stands_for="wq")
    assert tree.find("tied.*") == {"wq"}


def test_a_number_of_a_thousand_digits_is_compared() -> None:
    digits = "1" * 5000
    assert not matches_name("layers.[8-15]", f"layers.{digits}")
    assert not matches_name(f"layers.[8-{digits}]", "layers.10")


def test_a_name_without_wildcards_is_no_pattern() -> None:
    assert not is_pattern("layers.0.wq")
    assert all(map(is_pattern, ("a.*", "a.?", "a.[01]")))
