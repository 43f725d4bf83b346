"""Keeps shardscope's backends out of `torch.compiler.list_backends()`.

torch finds the backends by their entry points, so that their names work without importing
shardscope, and lists every entry point. Only registered backends have tags, and the list omits
those tagged "debug". So torch calls `tag_backends` when it is imported (the entry-point group
`torch.backends`). `tag_backends` imports nothing of torch: it waits until torch has discovered its
backends, and then registers ours as functions that load the real backend when they are called.

Without it (TORCH_DEVICE_BACKEND_AUTOLOAD=0) our backends are listed; nothing else changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, final

_REGISTRY = "torch._dynamo.backends.registry"
_OURS = "shardscope."


def tag_backends() -> None:
    """Arrange that our backends are registered with a tag as soon as torch discovers backends."""
    with suppress(Exception):  # importing torch must never fail because of us
        registry = sys.modules.get(_REGISTRY)
        if registry is None:
            sys.meta_path.insert(0, _RegistryFinder())
        else:
            _watch_discovery(registry)


@final
class _RegistryFinder(MetaPathFinder):
    """An import hook that patches torch's registry of backends once, after it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                execute(module)
                with suppress(Exception):
                    _watch_discovery(module)

            spec.loader.exec_module = execute_and_watch
        return spec


def _watch_discovery(registry: Any) -> None:
    """Wrap torch's discovery of entry points, which runs once, to register our backends then."""
    discover = registry._discover_entrypoint_backends

    def discover_and_register() -> None:
        discover()
        with suppress(Exception):
            _register(registry)

    registry._discover_entrypoint_backends = discover_and_register


def _register(registry: Any) -> None:
    entry_points = [
        (name, entry) for name, entry in registry._BACKENDS.items() if entry is not None
    ]
    for name, entry in entry_points:
        if entry.value.startswith(_OURS) and name not in registry._COMPILER_FNS:
            registry.register_backend(_load_when_called(name, entry), name=name, tags=("debug",))


def _load_when_called(name: str, entry: Any) -> Callable[..., Any]:
    def backend(*args: Any, **kwargs: Any) -> Any:
        return entry.load()(*args, **kwargs)

    backend.__name__ = backend.__qualname__ = name
    return backend
