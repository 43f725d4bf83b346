"""The words that a report explains are those of the glossary."""

from __future__ import annotations

from pathlib import Path

from shardscope.report.model.terms import TERMS

_GLOSSARY = Path(__file__).parents[3] / "docs" / "glossary.md"


def test_every_term_has_the_meaning_that_the_glossary_gives_it() -> None:
    rows = [line.strip("|\n ").split(" | ") for line in _GLOSSARY.read_text().splitlines()]
    meanings = {row[0]: row[1] for row in rows if len(row) == 3}
    assert {word: meanings.get(word) for word in TERMS} == TERMS
