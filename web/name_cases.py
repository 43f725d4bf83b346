"""Writes names.cases.json: what Python answers for module patterns and for formatted ranks."""

from __future__ import annotations

import json

from shardscope.record import compress_ranks, format_ranks
from shardscope.record.patterns import is_pattern, matches_inside, matches_name

_NAMES = ("", "layers", "layers.0", "layers.7.attn", "layers.12.attn.wq", "layers.12.attn.wk")
_NAMES += (
    "layers.a.mlp",
    "embed",
    "embed-1",
    "blocks.10000000000.x",
    "head.]x",
    "head.[x",
    "λ.é🦙x",
)
_PATTERNS = ("", "*", "**", "layers", "layers.*", "layers.**", "**.attn", "**.wq", "layers.*.attn")
_PATTERNS += ("layers.[0-9]", "layers.[8-15].**", "layers.[7]", "**.w[qk]", "**.w[!q]", "l*s.?")
_PATTERNS += ("layers.*.*", "*.*.*.w*", "**.attn.**", "e[a-z]bed", "embed[-+]1", "embed[+--]1")
_PATTERNS += ("[z-a]*", "[!z-a]*", "head.[]]x", "head.[[]x", "head.[x", "head.[!]]x", "head.[!")
_PATTERNS += ("?.*", "[a-c-e]*", "**.**", "blocks.[0-999999999].x", "?.é?x", "[b-da-l]ayers", "*.[")
_PATTERNS += ("**.*q",)
_RANKS = ([0], [0, 1, 2, 3], [0, 8, 16], [1, 5], [3, 4, 5, 9, 11, 13, 40], [2, 7, 8, 100])


def write_cases() -> str:
    """Every pattern with every name, and ranks with those that they include."""
    cases = {
        "patterns": {
            pattern: {
                "is_pattern": is_pattern(pattern),
                "names": [name for name in _NAMES if matches_name(pattern, name)],
                "inside": [name for name in _NAMES if matches_inside(pattern, name)],
            }
            for pattern in _PATTERNS
        },
        "names": _NAMES,
        "ranks": {format_ranks(compress_ranks(ranks)): ranks for ranks in _RANKS},
    }
    return json.dumps(cases, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(write_cases(), end="")
