"""Where a program decides by what only its rank sees, and what to change there.

A site is a line that reads a value, takes a batch, asks for the time, and so on. `DecisionLog`
counts how often each is passed, and says what to change at a pass: so a rank is run as if its loss
were NaN, its batch lacked an entry, or its data ended earlier than those of other ranks.
"""

from __future__ import annotations

import dis
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import final

import msgspec
from msgspec import Struct

from shardscope.attribution.call_sites import TORCH_FOLDER, read_stack
from shardscope.record import Source

DECISIONS = "decisions.json"
"""How the name of the file ends, in the scratch folder, with the decisions of a job."""
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = f"{os.sep}site-packages{os.sep}"
# Files of torch whose functions only pass a call on to the tensor's method or to the op.
_WRAPPER_FILES = (
    "_compile.py",
    "_ops.py",
    "_python_dispatch.py",
    "_tensor.py",
    "eval_frame.py",
    "functional.py",
    "overrides.py",
)
_MAX_PASSES = 5_000  # that are kept
_MAX_FINGERPRINTS = 200  # of tensors that are data


class SiteKind(StrEnum):
    """What a program does at a site."""

    VALUE = "value"  # reads a value of a tensor
    ROWS = "rows"  # selects elements of a tensor, as many as its values say
    BATCH = "batch"  # takes a batch of a data loader
    INPUT = "input"  # calls the model that is trained
    CLOCK = "clock"  # asks for the time
    SIGNAL = "signal"  # handles a signal
    FILE = "file"  # opens a file to read it
    SEED = "seed"  # seeds a random number generator
    OVERFLOW = "overflow"  # a gradient scaler steps an optimizer


class ChangeKind(StrEnum):
    """What is changed at a site."""

    NAN = "nan"  # the value, or all numbers of the batch
    ZERO = "zero"
    LARGE = "large"
    OPPOSITE = "opposite"  # True for False, and the reverse
    NO_ROWS = "no_rows"
    FEWER_ROWS = "fewer_rows"  # one less
    SAME_ROWS = "same_rows"  # all rows are the first
    WITHOUT = "without"  # an entry of the batch
    END = "end"  # of the data
    LATER = "later"  # than it is, from then on
    RAISED = "raised"  # an exception
    DELIVERED = "delivered"  # the signal
    OTHER = "other"  # seed


class Site(Struct, frozen=True):
    """A line of the program, and what it reads or does there: `item()`, `DataLoader`, `SIGTERM`."""

    kind: SiteKind
    what: str
    source: Source | None = None

    @property
    def place(self) -> str:
        """`train.py:41`, or what happens if the line is not known."""
        return self.what if self.source is None else f"{self.source.file}:{self.source.line}"


class Pass(Struct, frozen=True):
    """One time that a rank came to a site.

    `num_calls` is how many collectives it had issued, `ranks` those that have the same value there
    as far as its own data or random numbers matter; None if nothing of its own does. `is_handled`
    says that the program catches exceptions there, `detail` what there is to change.
    """

    site: int
    number: int  # of the site's passes
    num_calls: int
    step: int
    value: float | None = None
    dtype: str = ""
    ranks: tuple[int, ...] | None = None
    sources: tuple[str, ...] = ()
    is_handled: bool = False
    detail: tuple[str, ...] = ()


class Change(Struct, frozen=True, kw_only=True):
    """What to change where `ranks` come to a site for the time `number`, counted from 0."""

    site: Site
    number: int
    kind: ChangeKind
    ranks: tuple[int, ...]
    detail: str = ""


class Decisions(Struct, frozen=True, kw_only=True):
    """What a rank has decided by: its sites and passes, what it drew and loaded, what was changed.

    `data` and `random` are hashes of tensors that are data or random numbers, in order; `changed`
    maps the index of a change to the number of collectives that the rank had issued before it.
    """

    rank: int
    sites: tuple[Site, ...]
    passes: tuple[Pass, ...]
    data: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    changed: dict[int, int] = {}
    num_steps: int = 0


@final
class DecisionLog:
    """The sites that a rank passes, and the changes of this run."""

    def __init__(self, rank: int, changes: Iterable[Change], path: Path) -> None:
        self.rank = rank
        self.step = 0
        self.count_calls: Callable[[], int] = lambda: 0
        self._changes = tuple(changes)
        self._path = path
        self._sites: dict[Site, int] = {}
        self._counts: list[int] = []
        self._passes: list[Pass] = []
        self._fingerprints: dict[str, list[str]] = {"data": [], "random": []}
        self._changed: dict[int, int] = {}

    def visit(
        self,
        kind: SiteKind,
        what: str,
        *,
        source: Source | None = None,
        value: float | None = None,
        dtype: str = "",
        ranks: Iterable[int] | None = None,
        sources: Iterable[str] = (),
        is_handled: bool = False,
        detail: tuple[str, ...] = (),
    ) -> Change | None:
        """The rank has come to a site: what to change there, if anything."""
        site = Site(kind, what, source or find_line(sys._getframe(1)))
        index = self._sites.setdefault(site, len(self._sites))
        if index == len(self._counts):
            self._counts.append(0)
        number = self._counts[index]
        self._counts[index] += 1
        num_calls = self.count_calls()
        if len(self._passes) < _MAX_PASSES:
            same = None if ranks is None else tuple(sorted(ranks))
            self._passes.append(
                Pass(
                    index, number, num_calls, self.step, value, dtype, same, tuple(sorted(sources)),
                    is_handled, detail,
                )
            )  # fmt: skip
        for position, change in enumerate(self._changes):
            is_here = change.site == site and change.number == number
            if is_here and self.rank in change.ranks and position not in self._changed:
                self._changed[position] = num_calls
                return change
        return None

    def note_fingerprint(self, kind: str, fingerprint: str) -> None:
        """Note a tensor that is data or random numbers, by a hash of its values."""
        known = self._fingerprints[kind]
        if len(known) < _MAX_FINGERPRINTS:
            known.append(fingerprint)

    @property
    def wants_fingerprints(self) -> bool:
        """Whether further tensors that are data would be noted."""
        return any(len(known) < _MAX_FINGERPRINTS for known in self._fingerprints.values())

    def save(self) -> None:
        """Write what was noted to the file."""
        decisions = Decisions(
            rank=self.rank,
            sites=tuple(self._sites),
            passes=tuple(self._passes),
            data=tuple(self._fingerprints["data"]),
            random=tuple(self._fingerprints["random"]),
            changed=self._changed,
            num_steps=self.step,
        )
        self._path.write_bytes(msgspec.json.encode(decisions))


def find_line(frame: FrameType | None) -> Source | None:
    """The program's line that is running."""
    return read_stack(frame).source


def find_caller(frame: FrameType | None) -> FrameType | None:
    """The frame that called into torch or shardscope; None if that is torch's own code.

    Functions of torch that only pass a call on, such as `Tensor.__format__`, are left out.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS) and not _passes_on(file):
            return None if file.startswith((TORCH_FOLDER, "<frozen")) else frame
        frame = frame.f_back
    return None


def _passes_on(file: str) -> bool:
    return file.startswith(TORCH_FOLDER) and file.endswith(_WRAPPER_FILES)


def is_of_program(frame: FrameType | None) -> bool:
    """Whether a frame is of the user's program, and not of a library."""
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return not (file.startswith((_STDLIB, _OURS, "<")) or _PACKAGES in file)


def catches_exceptions(frame: FrameType | None) -> bool:
    """Whether the program catches exceptions that are raised now, in any of its callers."""
    while frame is not None:
        if is_of_program(frame) and _has_handler(frame.f_code, frame.f_lasti):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=1024)
def _has_handler(code: CodeType, offset: int) -> bool:
    """Whether an `except` clause covers an instruction; `with` and `finally` are none."""
    bytecode = dis.Bytecode(code)
    instructions = list(bytecode)
    positions = {instruction.offset: index for index, instruction in enumerate(instructions)}
    for entry in bytecode.exception_entries:  # type: ignore[attr-defined]
        if not entry.start <= offset < entry.end:
            continue
        first, *rest = instructions[positions[entry.target] :]
        if first.opname != "PUSH_EXC_INFO":
            continue  # what follows an exception in a handler
        if rest[0].opname == "POP_TOP":  # `except:`
            return True
        ends = ("WITH_EXCEPT_START", "RERAISE", "CHECK_EXC_MATCH", "CHECK_EG_MATCH")
        end = next((i.opname for i in rest if i.opname in ends), "")
        if end.startswith("CHECK"):
            return True
    return False
