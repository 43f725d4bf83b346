"""Dispatch modes of torch's that check each op: against its schema, against its fake twin.

They know no ops that take functions, as `torch.cond` does: those, and all in them, run unchecked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from shardscope._torch.dispatch import is_higher_order
from shardscope._torch.private import find_name

__all__ = ["check_fakes", "check_schemas"]

CrossRefFakeMode = find_name(
    "torch._subclasses.CrossRefFakeMode", "compare ops with their fake implementations"
)
SchemaCheckMode = find_name(
    "torch._subclasses.schema_check_mode.SchemaCheckMode", "compare ops with their schemas"
)


def check_schemas() -> AbstractContextManager[Any]:
    """Raise where an op mutates or aliases what its schema does not say."""
    mode: AbstractContextManager[Any] = _letting_functions_pass(SchemaCheckMode)()
    return mode


def check_fakes(is_trusted: Callable[[Any], bool] | None = None) -> AbstractContextManager[Any]:
    """Raise where an op that is not trusted returns another tensor than its fake says."""
    mode: AbstractContextManager[Any] = _letting_functions_pass(CrossRefFakeMode)(is_trusted)
    return mode


def _letting_functions_pass(mode: type[Any]) -> type[Any]:
    """The mode, for graphs that have such ops too."""

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_higher_order(func):
            return func(*args, **(kwargs or {}))
        return mode.__torch_dispatch__(self, func, types, args, kwargs)

    members = {"supports_higher_order_operators": True, "__torch_dispatch__": dispatch}
    return type(mode.__name__, (mode,), members)
