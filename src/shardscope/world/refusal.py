"""The sentence with which a simulated world refuses what a real process group would not do."""

from __future__ import annotations

from typing import NoReturn

from shardscope._torch.calls import CollectiveCall
from shardscope._torch.meshes import group_label
from shardscope.errors import CollectiveError

__all__ = ["refuse"]


def refuse(call: CollectiveCall, fact: str, remedy: str) -> NoReturn:
    """Raise for `call`: what is wrong with it, and what to do."""
    group = call.group
    description = group.group_desc if group.group_desc != "undefined" else group.group_name
    label = group_label(group) or description
    raise CollectiveError(
        f"{call.op} in group {label!r} ({group.size()} ranks): {fact}; a real process group would "
        f"fail or hang here, so the simulated one stops. {remedy}"
    )
