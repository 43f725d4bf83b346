"""How pytest, run by a test, is told of our plugin."""

from __future__ import annotations

from importlib.metadata import entry_points

# Installed, pytest finds it by itself, and may not be told of it twice.
_IS_INSTALLED = any(one.name == "shardscope" for one in entry_points(group="pytest11"))
LOADED = () if _IS_INSTALLED else ("-p", "shardscope.plugins.pytest")
