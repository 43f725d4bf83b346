"""Errors on the way to a parallel program, told with the op, module and line they are about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardscope.errors import ParallelError, ShardscopeError
from shardscope.parallel.flow import Origin

__all__ = ["blamed_on", "describe_origin"]


def describe_origin(origin: Origin) -> str:
    """`aten.linear.default (linear_3) in layers.0.wo (model.py:12: return self.wo(x))`."""
    node = f" ({origin.node})" if origin.node else ""
    module = f" in {origin.module}" if origin.module else ""
    line = f" ({origin.line})" if origin.line else ""
    return f"{origin.op or 'the program'}{node}{module}{line}"


@contextmanager
def blamed_on(origin: Origin, what: str) -> Iterator[None]:
    """Say of any error inside what could not be done to which op."""
    try:
        yield
    except (ShardscopeError, MemoryError):
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise ParallelError(
            f"{describe_origin(origin)} cannot be {what} ({type(error).__name__}: {first:.200}). "
            "Leave what goes into it whole, and please report it: this is a fault of shardscope's."
        ) from error
