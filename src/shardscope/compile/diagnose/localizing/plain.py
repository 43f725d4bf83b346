"""Fragments that run in one process: without DTensors, and without anybody to talk to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.localizing.collectives import has_collectives, make_local
from shardscope.compile.diagnose.localizing.desugar import desugar, needs_desugaring

__all__ = ["Plain", "make_plain"]

_DESUGARED = (
    "Its DTensors were replaced by this rank's pieces of them, and collectives by what they do "
    "where all ranks hold the same."
)
_LOCAL = "Collectives were replaced by what they do where all ranks hold the same."


@final
@dataclass(frozen=True)
class Plain:
    """A fragment for one process, and what was done to make it one."""

    fragment: Fragment
    notes: tuple[str, ...] = ()


def make_plain(fragment: Fragment) -> Plain:
    """The fragment as one process can run it."""
    if needs_desugaring(fragment):
        return Plain(desugar(fragment), (_DESUGARED,))
    if has_collectives(fragment):
        return Plain(make_local(fragment), (_LOCAL,))
    return Plain(fragment)
