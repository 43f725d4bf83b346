"""Dispatch modes of torch's that check each op: against its schema, against its fake twin."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch._subclasses import CrossRefFakeMode
from torch._subclasses.schema_check_mode import SchemaCheckMode

__all__ = ["check_fakes", "check_schemas"]


def check_schemas() -> AbstractContextManager[Any]:
    """Raise where an op mutates or aliases what its schema does not say."""
    mode: AbstractContextManager[Any] = SchemaCheckMode()
    return mode


def check_fakes(is_trusted: Callable[[Any], bool] | None = None) -> AbstractContextManager[Any]:
    """Raise where an op that is not trusted returns another tensor than its fake says."""
    mode: AbstractContextManager[Any] = CrossRefFakeMode(is_trusted)
    return mode
