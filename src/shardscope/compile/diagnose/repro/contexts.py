"""Modes that a graph enters and leaves by calls, as the `with` blocks that they came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

from torch import fx

from shardscope._torch.graph_nodes import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    SET_GRAD_ENABLED,
)
from shardscope.compile.diagnose.repro.literals import spell_value

__all__ = ["Block", "find_blocks"]

_EXIT_OF = {ENTER_AUTOCAST: EXIT_AUTOCAST, ENTER_INFERENCE: EXIT_INFERENCE}


@final
@dataclass(frozen=True)
class Block:
    """A `with` statement that a node opens, or None where it closes the innermost one."""

    header: str | None


@final
@dataclass
class _Open:
    node: fx.Node
    was_enabled: bool | None  # of gradients, before the block


def find_blocks(nodes: Iterable[fx.Node]) -> dict[fx.Node, Block]:
    """The nodes that open and close modes; empty if they do not nest, as blocks have to."""
    blocks: dict[fx.Node, Block] = {}
    stack: list[_Open] = []
    is_enabled = True
    for node in nodes:
        if node.op != "call_function":
            continue
        if node.target is SET_GRAD_ENABLED:
            wish = bool(node.args[0])
            if stack and stack[-1].was_enabled is wish:
                stack.pop()
                blocks[node] = Block(None)
            else:
                stack.append(_Open(node, is_enabled))
                blocks[node] = Block("torch.enable_grad()" if wish else "torch.no_grad()")
            is_enabled = wish
        elif node.target in _EXIT_OF:
            stack.append(_Open(node, None))
            blocks[node] = Block(_spell_entered(node))
        elif node.target in _EXIT_OF.values():
            if not stack or stack.pop().node is not node.args[0]:
                return {}
            blocks[node] = Block(None)
    return blocks


def _spell_entered(node: fx.Node) -> str:
    args: tuple[Any, ...] = node.args
    if node.target is ENTER_INFERENCE:
        return f"torch.inference_mode({spell_value(args[0])})"
    names = ("device_type", "dtype", "enabled", "cache_enabled")
    given = dict(zip(names, args, strict=False)) | dict(node.kwargs)
    parts = [spell_value(given.pop("device_type", "cpu"))]
    parts += [
        f"{name}={spell_value(value)}"
        for name, value in given.items()
        if value is not None and (name, value) != ("enabled", True)
    ]
    return f"torch.autocast({', '.join(parts)})"
