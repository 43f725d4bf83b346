"""Messages that the page on troubleshooting quotes are messages of the package."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from page_blocks import ROOT
from source_trees import list_nodes

PAGE = ROOT / "docs" / "troubleshooting.md"


def quoted_messages() -> list[str]:
    """The fragments in code quotes at the start of each row of a table."""
    rows = re.findall(r"^\| (`.+?) \|", PAGE.read_text(), re.M)
    fragments = (re.findall(r"`([^`]+)`", row) for row in rows)
    return [fragment for found in fragments for fragment in found if fragment != "shardscope"]


@cache
def all_strings() -> str:
    """Every string constant of the package; parts of a formatted string are joined by a blank."""
    return "\n".join(
        " ".join(_constants(node))
        for path in sorted((ROOT / "src").rglob("*.py"))
        for node in list_nodes(path)
        if isinstance(node, ast.JoinedStr | ast.Constant)
    )


def _constants(node: ast.AST) -> list[str]:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return [
        part.value
        for part in parts
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]


def test_the_page_quotes_messages() -> None:
    assert len(quoted_messages()) >= 12


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_one_of_the_package(message: str) -> None:
    assert " ".join(message.split()) in " ".join(all_strings().split())
