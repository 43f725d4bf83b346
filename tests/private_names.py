"""Finds the private names of torch in a source file: imported, as attributes, or in strings.

`torch.autograd._get_sequence_nr` is a name below torch, `._sequence_nr` an attribute of an object
of torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["find_early_names", "find_private_names"]

_PRIVATE_NAME = re.compile(r"_[a-z][a-z0-9_]*")
_NOT_TORCHS = {"self", "sys"}


def find_private_names(path: Path) -> set[str]:
    """The private names of torch in the file at `path`."""
    tree = ast.parse(path.read_text())
    imported = dict(_imports(tree))
    names = {name for name in imported.values() if _is_private(name)} - {"torch._C"}
    skipped = _positions_of_own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private_part(node.attr):
            names |= _attribute(node, imported)
        elif isinstance(node, ast.Constant) and id(node) not in skipped:
            names |= _names_in_string(node)
    return names


def find_early_names(path: Path) -> set[str]:
    """The private names that the file at `path` uses or imports while it is imported."""
    tree = ast.parse(path.read_text())
    imported = dict(_imports(tree))
    early = _Early().visit(tree)
    names = {name for _, name in _imports(early) if _is_private(name)}
    for node in ast.walk(early):
        if isinstance(node, ast.Attribute) and _is_private_part(node.attr):
            names |= {name for name in _attribute(node, imported) if name.startswith("torch.")}
    return names


class _Early(ast.NodeTransformer):
    """Reduces a module to the code that runs on import: no function bodies, no annotations."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return ast.Module([*node.decorator_list, *node.args.defaults], [])

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return ast.Constant(None)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return None if node.value is None else self.visit(node.value)

    def visit_If(self, node: ast.If) -> ast.AST:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return ast.Module([self.visit(line) for line in node.orelse], [])
        return self.generic_visit(node)


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names of this file that are bound to objects of torch, with the objects' full names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    yield alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _attribute(node: ast.Attribute, imported: dict[str, str]) -> set[str]:
    """The private name at `node`: a full name below torch, or an attribute of an object."""
    chain = ast.unparse(node)
    root = re.match(r"\w+", chain)
    if root is None or root[0] in _NOT_TORCHS:
        return set()
    if not re.fullmatch(r"[\w.]+", chain):
        return {f".{node.attr}"}
    full_name = next(
        (
            imported[name] + chain.removeprefix(name)
            for name in sorted(imported, key=len, reverse=True)
            if chain == name or chain.startswith(f"{name}.")
        ),
        chain,
    )
    return {full_name} if full_name.startswith("torch.") else {f".{node.attr}"}


def _names_in_string(node: ast.Constant) -> set[str]:
    is_name = isinstance(node.value, str) and _PRIVATE_NAME.fullmatch(node.value)
    return {f".{node.value}"} if is_name else set()


def _positions_of_own_names(tree: ast.Module) -> set[int]:
    """Identities of string nodes that are not names of torch: in `__slots__` and in f-strings."""
    return {
        id(constant)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__")
        or isinstance(node, ast.JoinedStr)
        for constant in ast.walk(node)
    }


def _is_private(name: str) -> bool:
    return any(_is_private_part(part) for part in name.split("."))


def _is_private_part(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")
