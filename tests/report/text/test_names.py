"""Numbers and names as people can read them."""

from __future__ import annotations

import pytest

from shardscope.record.text import sanitize_text
from shardscope.record.units import format_bytes, format_count
from shardscope.report.model.traffic_totals import (
    format_spread,
    spread,
)
from shardscope.report.text.style import shorten


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 1024, "10.0 KiB"),
        (100 * 1024, "100 KiB"),
        (1023 * 1024, "1.00 MiB"),
        (224 * 1024**2, "224 MiB"),
        (1024**3, "1.00 GiB"),
        (5 * 1024**4, "5.00 TiB"),
        (2**63 - 1, "8.00 EiB"),
    ],
)
def test_bytes_have_three_digits_and_a_unit(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_zero_is_a_dot_and_thousands_are_separated():
    assert (format_count(0), format_count(1024)) == ("·", "1,024")


def test_spread_is_a_single_number_where_ranks_agree():
    assert format_spread(spread([3, 3, 0]), str) == "3"
    assert format_spread(spread([3, 5]), str) == "≤ 5"
    assert format_spread(spread([]), str) == "0"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain", "plain"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202eevil", "\\u202eevil"),
        ("\u2028", "\\u2028"),
        ("\udce9", "\\udce9"),
        ("ünï 日本 🚀", "ünï 日本 🚀"),
    ],
)
def test_control_characters_are_escaped(text, escaped):
    assert sanitize_text(text) == escaped


def test_shortened_text_keeps_both_ends():
    assert shorten("layers.0.attention.wq", 10) == "lay…ion.wq"
    assert shorten("short", 10) == "short"
    assert len(shorten("x" * 99, 12)) == 12
