"""Errors of torch's on the way to a parallel program, as one sentence of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from shardscope.errors import ParallelError, ShardscopeError
from shardscope.parallel.flow import Origin

__all__ = ["blamed_on", "describe_origin", "explained", "raise_explained"]

_REPORT = "Please report the program: this is a bug in shardscope."


def describe_origin(origin: Origin) -> str:
    """`aten.linear.default (linear_3) in layers.0.wo (model.py:12: return self.wo(x))`."""
    node = f" ({origin.node})" if origin.node else ""
    module = f" in {origin.module}" if origin.module else ""
    line = f" ({origin.line})" if origin.line else ""
    return f"{origin.op or 'the program'}{node}{module}{line}"


def raise_explained(error: Exception, fact: str, remedy: str = _REPORT) -> NoReturn:
    """Raise an error of torch's as "fact (RuntimeError: its first line). Remedy".

    One of ours is raised as it is.
    """
    if isinstance(error, (ShardscopeError, MemoryError)):
        raise error
    lines = str(error).strip().splitlines()
    quoted = f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__
    raise ParallelError(f"{fact} ({quoted}). {remedy}") from error


@contextmanager
def explained(fact: str, remedy: str = _REPORT) -> Iterator[None]:
    """Raise any error inside as `raise_explained` does."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - it is raised again
        raise_explained(error, fact, remedy)


@contextmanager
def blamed_on(origin: Origin, what: str) -> Iterator[None]:
    """Raise any error inside as one that says what cannot be done to which op."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - it is raised again
        remedy = f"Leave the module out of the plan so that its inputs stay replicated. {_REPORT}"
        raise_explained(error, f"{describe_origin(origin)} cannot be {what}", remedy)
