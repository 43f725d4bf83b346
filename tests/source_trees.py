"""Files of the package as trees, parsed once for all tests of how the source is written."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

__all__ = ["list_nodes", "parse"]


@cache
def parse(path: Path) -> ast.Module:
    """The tree of a file, which no test may change."""
    return ast.parse(path.read_text())


@cache
def list_nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's tree."""
    return tuple(ast.walk(parse(path)))
