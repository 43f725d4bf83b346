"""Whether a parallel version computes what the single device does, tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from shardscope.record import (
    FINE,
    TOLERABLE,
    Agreement,
    Finding,
    Parity,
    Recording,
    Suspect,
    TensorVerdict,
    format_ranks,
)
from shardscope.report.grid import Cell, Column, Grid, Look, Row, leave_out
from shardscope.report.layout import make_text, make_title, plural

__all__ = ["render_parity", "summarize_parity"]

_NUMBER = re.compile(r"(?<![^.\[])\d+(?![^.\]])")
_STYLES: dict[Agreement, str] = {
    Agreement.EQUAL: "green",
    Agreement.CLOSE: "green",
    Agreement.ROUNDED: "yellow",
    Agreement.RANDOM: "yellow",
}
_WRONG = "bold red"
_COLUMNS = {
    "tensor": Column("tensor", Look.NAME, 18),
    "kind": Column("", Look.NAME, 8),
    "verdict": Column("verdict", Look.WORDS),
    "error": Column("error"),
    "noise": Column("noise"),
    "ranks": Column("ranks"),
    "suspect": Column("likely cause", Look.WORDS),
    "detail": Column("", Look.PROSE, 30),
}


def render_parity(recording: Recording, *, is_folded: bool = True) -> Iterator[RenderableType]:
    """A line that says it all, and a table of the tensors; nothing if nothing was compared."""
    for parity in recording.parity:
        yield make_title("Parity", _note(parity))
        yield summarize_parity(parity, recording.findings)
        if parity.tensors:
            yield _render_tensors(parity, is_folded=is_folded)


def _note(parity: Parity) -> str:
    mesh = " × ".join(f"{axis.name}={axis.size:,}" for axis in parity.axes)
    where = "in separate processes" if parity.is_in_processes else "in one process"
    noise = "double precision" if parity.has_exact else "perturbed weights"
    return f"on {mesh}, all ranks {where}; relative errors, noise measured with {noise}"


def summarize_parity(parity: Parity, findings: Sequence[Finding]) -> Text:
    """A line that says it all; `findings` are the recording's, which say what is too noisy."""
    wrong = [one for one in parity.tensors if one.agreement not in TOLERABLE]
    count = plural(len(parity.tensors), "tensor")
    what = "outputs, gradients and changed buffers" if parity.has_backward else "outputs"
    if not parity.tensors:
        return Text("Nothing was compared: the step produced no tensors.", _WRONG)
    if wrong:
        return Text(f"{len(wrong):,} of {count} differ", _WRONG).append(f" ({what}).", "")
    odd = [one for one in parity.tensors if one.agreement not in FINE]
    line = Text(f"All {count} agree", "bold green").append(f" ({what})", "")
    if odd:
        line.append(f", {len(odd):,} of them up to random numbers or rounding", "yellow")
    num_noisy = sum(finding.rule == "parity-noisy" for finding in findings)
    if num_noisy:
        line.append(f", but {num_noisy:,} of them would agree with almost any result", "yellow")
    return line.append(".", "")


def _render_tensors(parity: Parity, *, is_folded: bool) -> RenderableType:
    folded: dict[object, list[TensorVerdict]] = {}
    for index, one in enumerate(parity.tensors):
        key = (one.kind, _NUMBER.sub("*", one.name), one.agreement, one.suspect)
        folded.setdefault(key if is_folded else index, []).append(one)
    # What is wrong comes first, each kind in the order of the model.
    groups = sorted(folded.values(), key=lambda some: some[0].agreement in TOLERABLE)
    layouts = leave_out(list(_COLUMNS), "detail", "ranks", "kind", "noise")
    # Where it begins has a cause; what follows from it needs none of its own.
    hidden = Suspect.UNKNOWN if parity.divergences else None
    return Grid(_COLUMNS, [_make_row(some, hidden) for some in groups], layouts)


def _make_row(some: Sequence[TensorVerdict], hidden: Suspect | None) -> Row:
    worst = max(some, key=lambda one: one.error or 0.0)
    suspect = "" if worst.suspect in (None, hidden) else str(worst.suspect)
    row: dict[str, Cell] = {
        "tensor": _name(some),
        "kind": worst.kind,
        "verdict": make_text(
            worst.agreement.replace("_", " "), _STYLES.get(worst.agreement, _WRONG)
        ),
        "error": _format_error(worst.error),
        "noise": _format_error(worst.noise),
        "ranks": format_ranks(worst.ranks),
        "suspect": make_text(suspect.replace("_", " ")),
        "detail": make_text(worst.detail, "dim", width=300),
    }
    return row


def _name(some: Sequence[TensorVerdict]) -> Text:
    name = some[0].name or "the output"
    if len(some) == 1:
        return make_text(name)
    return make_text(_NUMBER.sub("*", name)).append(f" ×{len(some)}", "dim")


def _format_error(error: float | None) -> str:
    if error is None:
        return ""
    # Where the right values are zero but for noise, a relative error says nothing.
    return "noise" if error > 1e3 else f"{error:.1e}" if error else "0"
