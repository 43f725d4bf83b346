"""Refuses a site whose API reference lacks a public name."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import BuildError

PUBLIC_MODULES = (
    "shardscope",
    "shardscope.compat",
    "shardscope.compile.backends",
    "shardscope.contract",
    "shardscope.errors",
    "shardscope.parallel",
    "shardscope.plugins.lightning",
    "shardscope.plugins.pytest",
    "shardscope.plugins.transformers",
    "shardscope.record",
    "shardscope.testing",
    "shardscope.world",
)


def on_post_build(config: MkDocsConfig) -> None:
    """Compare `__all__` of every public module with the site's inventory."""
    missing = find_missing(read_inventory(Path(config.site_dir) / "objects.inv"))
    if missing:
        raise BuildError(f"the API reference lacks {', '.join(missing)}")


def read_inventory(path: Path) -> set[str]:
    """The names of a Sphinx inventory: four lines of header, then compressed lines."""
    *_, body = path.read_bytes().split(b"\n", 4)
    return {line.split(" ", 1)[0] for line in zlib.decompress(body).decode().splitlines()}


def find_missing(documented: Iterable[str]) -> list[str]:
    """The public names that are documented neither where they are exported nor where defined."""
    names = {*documented}
    return sorted(
        f"{module}.{name}"
        for module in PUBLIC_MODULES
        for name, value in list_public(module).items()
        if not names & {f"{module}.{name}", f"{getattr(value, '__module__', '')}.{name}"}
    )


def list_public(module: str) -> dict[str, Any]:
    """What a module exports, by name."""
    imported = import_module(module)
    return {name: getattr(imported, name) for name in imported.__all__}
