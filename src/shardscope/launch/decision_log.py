"""Counts how often a rank comes to each site where it decides, and says what to change there."""

from __future__ import annotations

import dis
import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import final

import msgspec
import torch

from shardscope._torch.fake import is_fake
from shardscope._torch.process_groups.collective_inputs import GroupInputs
from shardscope._torch.process_groups.known_values import KnownValues
from shardscope.attribution.call_sites import TORCH_FOLDER, read_stack
from shardscope.launch.decisions import Change, Decisions, Exchange, Pass, Site, SiteKind
from shardscope.record import Source

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = f"{os.sep}site-packages{os.sep}"
# Files of torch whose functions only pass a call on to the tensor's method or to the op.
_WRAPPER_FILES = (
    "_compile.py",
    "_jit_internal.py",
    "_ops.py",
    "_python_dispatch.py",
    "_tensor.py",
    "eval_frame.py",
    "functional.py",
    "overrides.py",
)
_MAX_VALUES = 64  # of data that are counted
BATCH = "batch:"
"""How the labels of batches begin."""
_MAX_HASHED = 1 << 14  # elements of a tensor by which data is recognized
_MAX_PASSES = 5_000  # that are kept


@final
class DecisionLog:
    """The sites that a rank passes, and the changes of this run."""

    def __init__(
        self,
        rank: int,
        changes: Iterable[Change],
        path: Path,
        group_inputs: Iterable[GroupInputs] = (),
    ) -> None:
        self.rank = rank
        self.group_inputs = tuple(group_inputs)
        self.step = 0
        self._num_inputs = 0
        self.is_in_model = False
        self.num_flops = self.num_bytes = 0
        self.count_calls: Callable[[], int] = lambda: 0
        self.known: KnownValues | None = None  # of a rank that runs without the others
        self._changes = tuple(changes)
        self._path = path
        self._sites: dict[Site, int] = {}
        self._counts: list[int] = []
        self._passes: list[Pass] = []
        self._sources = {kind: hashlib.blake2b(digest_size=8) for kind in ("data", "random")}
        self._hashes: dict[str, list[str]] = {kind: [] for kind in self._sources}
        self._values: set[object] = set()  # of data
        self._batches: set[str] = set()  # their labels
        self._changed: dict[int, int] = {}
        self.exchanges: list[Exchange] = []
        self.unawaited: list[int] = []  # collectives, by their order
        self._iterations: dict[int, int] = {}  # in which changes were made, by position

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
        has_samples: bool = False,
        has_strings: bool = False,
    ) -> Change | None:
        """The rank has come to a site: what to change there, if anything."""
        site = Site(kind, *((what, source) if source else locate(what, sys._getframe(1))))
        index = self._sites.setdefault(site, len(self._sites))
        if index == len(self._counts):
            self._counts.append(0)
        number = self._counts[index]
        self._counts[index] += 1
        num_calls, iteration = self.count_calls(), max(self._num_inputs, self.step)
        if len(self._passes) < _MAX_PASSES:
            passed = Pass(
                index,
                number,
                num_calls,
                iteration,
                value,
                dtype,
                None if ranks is None else tuple(sorted(ranks)),
                tuple(sorted(sources)),
                is_handled,
                detail,
                has_samples,
                self.is_in_model,
                has_strings,
            )
            self._passes.append(passed)
        self._num_inputs += kind is SiteKind.INPUT
        return self._find_change(site, number, num_calls, iteration)

    def _find_change(
        self, site: Site, number: int, num_calls: int, iteration: int
    ) -> Change | None:
        for position, change in enumerate(self._changes):
            if change.site != site or self.rank not in change.ranks:
                continue
            if change.number == number:
                self._changed[position] = num_calls
                self._iterations[position] = iteration
                return change
            if change.is_repeated and self._iterations.get(position) == iteration:
                return change
        return None

    def note_source(self, kind: str, content: bytes, values: Iterable[object] = ()) -> None:
        """Note a tensor that is data or random numbers, and some of its values."""
        self._sources[kind].update(content)
        if len(self._values) < _MAX_VALUES:
            self._values.update(values)

    def label_batch(self, indices: str, tensors: Sequence[torch.Tensor]) -> str:
        """A label that batches with the same samples have on all ranks."""
        content = hashlib.blake2b(indices.encode(), digest_size=8)
        for tensor in tensors:
            content.update(read_start(tensor))
        label = f"{BATCH}{content.hexdigest()}"
        self._batches.add(label)
        return label

    def end_step(self) -> None:
        """A step has ended."""
        self.step += 1
        self._note_hashes()

    def _note_hashes(self) -> None:
        for kind, content in self._sources.items():
            self._hashes[kind].append(content.hexdigest())

    def save(self) -> None:
        """Write what was noted to the file."""
        self._note_hashes()
        known = self.known or KnownValues()
        decisions = Decisions(
            rank=self.rank,
            sites=tuple(self._sites),
            passes=tuple(self._passes),
            data=tuple(self._hashes["data"]),
            random=tuple(self._hashes["random"]),
            changed=self._changed,
            num_values=len(self._values),
            num_steps=self.step,
            num_flops=self.num_flops,
            num_bytes=self.num_bytes,
            inputs=tuple(known.inputs),
            object_inputs=tuple(known.object_inputs),
            batches=frozenset(self._batches),
            exchanges=tuple(self.exchanges),
            unawaited=tuple(self.unawaited),
        )
        self._path.write_bytes(msgspec.json.encode(decisions))


def read_start(tensor: torch.Tensor) -> bytes:
    """The first values of a tensor as bytes, by which data is recognized; empty without data."""
    if is_fake(tensor) or tensor.layout is not torch.strided:
        return b""
    # A copy, as numpy() would keep the program from resizing the tensor.
    part = tensor.detach().flatten()[:_MAX_HASHED].clone()
    return part.view(torch.uint8).numpy().tobytes()


def locate(what: str, frame: FrameType | None) -> tuple[str, Source | None]:
    """What is done at the line that is running, and the line.

    Of a library that the program calls, its line is named with what is done, and the line is that
    of the program.
    """
    source = read_stack(frame).source
    while frame is not None and not is_of_program(frame):
        frame = frame.f_back
    own = None if frame is None else read_stack(frame).source
    if source is None or own is None or not is_of_package(source):
        return what, source
    return f"{what} in {os.path.basename(source.file)}:{source.line}", own


def is_of_package(source: Source) -> bool:
    """Whether a line is of an installed package."""
    return _PACKAGES in os.path.abspath(source.file)


def find_line(frame: FrameType | None) -> Source | None:
    """The program's line that is running."""
    return locate("", frame)[1]


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
