"""A class of ours is abstract or final: nobody wonders what may be overridden."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "shardscope"
# Abstract, or records without behaviour to override, or errors, which are made to be inherited.
_OPEN_BASES = (
    "Protocol",
    "Struct",
    "Record",
    "Enum",
    "NamedTuple",
    "TypedDict",
    "Exception",
    "Error",
    "threading.local",
)
# People subclass torch's, and so may these; the demo's model plays the user's.
_OPEN = ("CommDebugMode", "SimpleProfiler", "nn.Module")


def open_classes() -> Iterator[str]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not _is_settled(node):
                yield f"{path.relative_to(SOURCE)}: {node.name}"


def _is_settled(node: ast.ClassDef) -> bool:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    bases = [ast.unparse(base) for base in node.bases]
    return (
        "final" in decorators
        or any(decorator.startswith("dataclass") for decorator in decorators)
        or any(base.endswith(_OPEN_BASES) for base in bases)
        or node.name in _OPEN
        or any(base in _OPEN for base in bases)
    )


def test_every_class_is_abstract_or_final() -> None:
    assert list(open_classes()) == []
