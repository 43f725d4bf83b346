"""See what a PyTorch model does when it is compiled and sharded.

The whole public API is here. Names load when first used: reading a recording needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardscope.comm.trace import Trace as Trace
    from shardscope.comm.trace import trace as trace
    from shardscope.errors import ShardscopeError as ShardscopeError
    from shardscope.record import Recording as Recording
    from shardscope.record import load as load
    from shardscope.record import merge as merge
    from shardscope.record import save as save
    from shardscope.shard.coverage import coverage as coverage
    from shardscope.version import __version__ as __version__
    from shardscope.world import World as World
    from shardscope.world import simulate as simulate

_HOMES = {
    "Recording": "shardscope.record",
    "ShardscopeError": "shardscope.errors",
    "Trace": "shardscope.comm.trace",
    "World": "shardscope.world",
    "__version__": "shardscope.version",
    "coverage": "shardscope.shard.coverage",
    "load": "shardscope.record",
    "merge": "shardscope.record",
    "save": "shardscope.record",
    "simulate": "shardscope.world",
    "trace": "shardscope.comm.trace",
}

__all__ = [
    "Recording",
    "ShardscopeError",
    "Trace",
    "World",
    "__version__",
    "coverage",
    "load",
    "merge",
    "save",
    "simulate",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardscope' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
