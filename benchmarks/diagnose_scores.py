"""What the scoreboard says of a row, and of all of them against our bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diagnose_rows import Row
from torch_minifier import Attempt

__all__ = ["BARS", "Ours", "Score", "describe_attempt", "describe_ours", "find_faults"]

ONE_IN_100 = 15
DISTANT_IN_400 = 60


@dataclass(frozen=True, kw_only=True)
class Ours:
    """What diagnose found, and what it took, its processes' start included."""

    condition: str = ""
    stage: str | None = None
    part: str = ""
    ops: Sequence[str] = ()
    lines: Sequence[str] = ()
    is_minimal: bool = False
    is_verified: bool = False
    num_calls: int = 0
    notes: Sequence[str] = ()
    seconds: float = 0.0
    failure: str = ""  # how it ended, if not with an answer


@dataclass(frozen=True, kw_only=True)
class Score:
    """One row: ours, and torch's tools after it."""

    row: Row
    ours: Ours
    user_code: Sequence[Attempt] = field(default_factory=tuple)

    @property
    def is_located(self) -> bool:
        """Whether all of our answer is right."""
        ours, row = self.ours, self.row
        return (ours.condition, list(ours.ops), ours.stage, list(ours.lines)) == (
            row.condition,
            row.ops,
            row.blamed,
            row.lines,
        )

    @property
    def is_small(self) -> bool:
        """Whether a fresh process confirmed a program of which nothing can be spared."""
        return self.ours.is_minimal and self.ours.is_verified

    @property
    def num_calls_allowed(self) -> int | None:
        """Our bar for this row, if there is one."""
        bars = {(100, "one"): ONE_IN_100, (400, "distant"): DISTANT_IN_400}
        return bars.get((self.row.size, self.row.pattern))

    @property
    def is_cheap(self) -> bool:
        """Whether it took no more calls than the bar allows."""
        allowed = self.num_calls_allowed
        return allowed is None or 0 < self.ours.num_calls <= allowed

    @property
    def is_faster(self) -> bool:
        """Whether every tool of torch's that gave an answer, right or not, was slower."""
        answers = [one for one in self.user_code if one.outcome == "found"]
        return not self.ours.failure and all(one.seconds > self.ours.seconds for one in answers)


BARS: dict[str, Callable[[Score], bool | None]] = {
    "localised rightly: condition, ops, stage, line": lambda score: score.is_located,
    "1-minimal, and confirmed by a fresh process": lambda score: score.is_small,
    f"at most {ONE_IN_100} calls for one op in 100": lambda score: (
        score.is_cheap if score.num_calls_allowed == ONE_IN_100 else None
    ),
    f"at most {DISTANT_IN_400} calls for a distant pair in 400": lambda score: (
        score.is_cheap if score.num_calls_allowed == DISTANT_IN_400 else None
    ),
    "less wall time than every answer of torch's": lambda score: (
        score.is_faster if score.user_code else None
    ),
}
"""What is asked of a row; None where it is not asked."""


def find_faults(score: Score) -> list[str]:
    """The bars that a row does not reach."""
    return [name for name, is_met in BARS.items() if is_met(score) is False]


def describe_ours(score: Score) -> str:
    """Right, or what is wrong with it."""
    ours, row = score.ours, score.row
    if ours.failure:
        return ours.failure
    wanted = {
        "condition": (ours.condition, row.condition),
        "stage": (ours.stage, row.blamed),
        "ops": (list(ours.ops), row.ops),
        "lines": (list(ours.lines), row.lines),
    }
    wrong = [f"{what}: {got}" for what, (got, want) in wanted.items() if got != want]
    wrong += [] if ours.is_minimal else ["not minimal"]
    wrong += [] if ours.is_verified else ["not verified"]
    return "; ".join(wrong) or "right"


def describe_attempt(attempt: Attempt, limit_s: float) -> str:
    """Ops left, calls and seconds, or how it failed."""
    if attempt.outcome == "timed out":
        return f"> {limit_s:.0f} s ({attempt.num_calls} calls)"
    if attempt.outcome != "found":
        return f"{attempt.outcome} ({attempt.seconds:.1f} s)"
    left = f"{len(attempt.ops)} left" if attempt.tool != "bisector" else " ".join(attempt.ops)
    return f"{left}, {attempt.num_calls} calls, {attempt.seconds:.1f} s"
