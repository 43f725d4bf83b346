"""The page's data for the verdict: concerns, checks, commands, and the words that are explained."""

from __future__ import annotations

from msgspec import Struct


class ConcernItem(Struct, frozen=True, kw_only=True):
    """A part of the verdict; the worst comes first."""

    judgement: str  # wrong, fails, suspect, costly, not judged, fine
    label: str  # the same in words: `Costs more than it needs`
    rule: str  # heading of docs/guide/verdict.md, or the rule of a finding
    fact: str
    reason: str = ""  # why that is bad, or is not
    view: str = ""  # that shows more
    path: str = ""  # of the module, folded if it stands for several layers: `layers.*.attn`
    module: int = -1  # the first of them
    source: int = -1
    remedy: str = ""  # what to do about it, if that is known


class CheckItem(Struct, frozen=True, kw_only=True):
    """An instrument: whether it ran, and how to run it."""

    instrument: str
    question: str
    has_run: bool
    command: str


class CommandItem(Struct, frozen=True, kw_only=True):
    """A command to run next, and why."""

    command: str
    purpose: str


class VerdictItem(Struct, frozen=True, kw_only=True):
    """The verdict: `concerns` starts with what it is about, and is never empty."""

    sentence: str  # all of it, for the title of the document and for copying
    unchecked: str  # `Not checked: numerics, memory.`; empty if everything was
    concerns: tuple[ConcernItem, ...]
    checks: tuple[CheckItem, ...] = ()
    commands: tuple[CommandItem, ...] = ()


class EmptyView(Struct, frozen=True, kw_only=True):
    """A view that has no data, and the command that records it."""

    view: str
    command: str


class Term(Struct, frozen=True, kw_only=True):
    """A word of the page, and its meaning as in docs/glossary.md."""

    word: str
    meaning: str
