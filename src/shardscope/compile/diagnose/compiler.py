"""The compiler under suspicion: a backend as torch.compile takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

__all__ = ["Compiler"]


@final
@dataclass(frozen=True)
class Compiler:
    """A backend by name or as a callable, and the arguments that torch.compile is given with it."""

    backend: str | Callable[..., Any]
    options: Mapping[str, Any] | None = None
    mode: str | None = None
    dynamic: bool | None = None
    config: Mapping[str, Any] = field(default_factory=dict)  # inductor's, patched while it runs

    @property
    def name(self) -> str:
        """As people would say it."""
        if isinstance(self.backend, str):
            return self.backend
        return getattr(self.backend, "__name__", type(self.backend).__name__)
