"""The rows of the scoreboard: faults that we planted, so that the right answer is known."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import fault_programs
from torch_minifier import Task

__all__ = ["INDUCTOR", "KINDS", "PATTERNS", "SIZES", "STAGES", "Row", "list_rows"]

KINDS = {
    "compile_error": "compile_error",
    "runtime_error": "runtime_error",
    "accuracy_error": "wrong_result",
    "nan": "nan",
    "hang": "hang",
    "crash": "crash",
}
"""Kinds of faults, and what they are to be called."""
STAGES = {"graph": "backend", "decomposed": "decomposition", "partitioned": "partition"}
"""Where they are planted, and which part of the compiler is to blame then."""
SIZES = (100, 400)
PATTERNS = ("one", "adjacent", "distant")
# Inductor's own switch has these. What a kernel throws reaches Python, on one thread at least.
INDUCTOR = {
    "compile_error": "compile_error",
    "runtime_error": "runtime_error",
    "accuracy": "wrong_result",
}
_INDUCTOR_SIZE = 20
_NUMBERS = ("accuracy_error", "accuracy", "nan")
_OPS = ("relu", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault in one program."""

    kind: str
    stage: str
    size: int
    pattern: str = "one"

    @property
    def name(self) -> str:
        """By which a file of results knows it."""
        return f"{self.kind} {self.stage} {self.size} {self.pattern}"

    @property
    def is_inductor(self) -> bool:
        """Whether the fault is one of Inductor's own."""
        return self.stage == "inductor"

    @property
    def ops(self) -> list[str]:
        """What a right answer names."""
        return [f"torch.{name}" for name in self._places]

    @property
    def condition(self) -> str:
        """What a right answer says."""
        return INDUCTOR[self.kind] if self.is_inductor else KINDS[self.kind]

    @property
    def blamed(self) -> str:
        """The stage that a right answer blames."""
        return STAGES.get(self.stage, "backend")

    @property
    def lines(self) -> list[str]:
        """The user's lines that a right answer names."""
        source, start = inspect.getsourcelines(fault_programs.chain)
        (offset,) = (at for at, line in enumerate(source) if "getattr(torch, name)" in line)
        return [f"fault_programs.py:{start + offset}"] * len(self.ops)

    @property
    def task(self) -> Task:
        """The same for a tool."""
        config = {"cpp.inject_relu_bug_TESTING_ONLY": self.kind} if self.is_inductor else {}
        return Task(
            program="fault_programs:chain",
            backend="inductor" if self.is_inductor else f"shardscope_fault_{self.kind}",
            has_wrong_numbers=self.kind in _NUMBERS,
            arguments={"num_ops": self.size, "places": self._places},
            options={} if self.is_inductor else self._options,
            config=config,
        )

    @property
    def _places(self) -> dict[str, int]:
        first = self.size // 5 if self.pattern == "distant" else self.size // 2
        second = {"adjacent": first + 1, "distant": self.size - self.size // 5}
        places = [first, *([second[self.pattern]] if self.pattern in second else [])]
        return dict(zip(_OPS, places, strict=False))

    @property
    def _options(self) -> dict[str, Any]:
        also = {} if self.pattern == "one" else {"also": _OPS[1]}
        return {"op": _OPS[0], "stage": self.stage, **also}


def list_rows(
    *,
    kinds: Sequence[str],
    stages: Sequence[str],
    sizes: Sequence[int],
    patterns: Sequence[str],
) -> Iterator[Row]:
    """Rows in the order in which they are run: small ones first, Inductor's last."""
    planted = [stage for stage in stages if stage != "inductor"]
    for size, pattern, stage, kind in product(sizes, patterns, planted, kinds):
        yield Row(kind=kind, stage=stage, size=size, pattern=pattern)
    if "inductor" in stages:
        for kind in INDUCTOR:
            yield Row(kind=kind, stage="inductor", size=_INDUCTOR_SIZE)
