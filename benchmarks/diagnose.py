"""diagnose against torch's minifier and bisector, on faults that we planted ourselves.

    python benchmarks/diagnose.py --quick
    python benchmarks/diagnose.py --json scores.jsonl            # all of it: hours
    python benchmarks/diagnose.py --json scores.jsonl --resume   # go on where it was interrupted

Each row is a fault of some kind, planted at some stage of a compiler, in one op or in two that only
fail together, of a program of 100 or 400 ops. Ours runs first, then torch's, each as a user would
run it: in processes of their own, whose start counts. Torch's tools are stopped after `--patience`
times what ours took. The bisector replaces the backend by its own, so it is tried once for each
kind of fault; on faults of Inductor's own all of torch's tools are tried.
"""

from __future__ import annotations

import compileall
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch
from diagnose_rows import KINDS, PATTERNS, SIZES, STAGES, Row, list_rows
from diagnose_scores import BARS, Ours, Score, describe_attempt, describe_ours, find_faults
from rich.console import Console
from rich.table import Table
from torch_minifier import TOOLS, Attempt, Failed, Workplace, attempt, last_line

SOURCES = Path(__file__).parents[1] / "src" / "shardscope"
SCRIPT = Path(__file__).with_name("diagnose_user.py")
MINIFIER, BISECTOR = "minifier after dynamo", "bisector"
LEAST_S = 30.0
OURS_LIMIT_S = 900.0
# Only torch's bisector would be given old results, and only its calls of inductor are counted so.
OURS = {"TORCH_USER_COUNTS_INDUCTOR": "", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0"}
OUT, PROGRESS = Console(width=150), Console(stderr=True)


def run_ours(row: Row) -> Ours:
    """Diagnose in a process of its own, which starts others."""
    with tempfile.TemporaryDirectory(prefix="diagnose-") as folder:
        place = Workplace(Path(folder), row.task, OURS_LIMIT_S)
        start = time.perf_counter()
        try:
            done = place.run(str(SCRIPT), **OURS)
        except Failed as failure:
            return Ours(failure=str(failure), seconds=time.perf_counter() - start)
        seconds = time.perf_counter() - start
        told = [one for one in done.stdout.splitlines() if one.startswith("diagnosis: ")]
        if not told:
            return Ours(failure=f"crashed: {last_line(done.stderr)}", seconds=seconds)
        return Ours(**json.loads(told[0].partition(": ")[2]), seconds=seconds)


def run_row(row: Row, tools: Sequence[str], patience: float) -> tuple[Score, float]:
    """Ours, then each of torch's, and how long these were let."""
    PROGRESS.print(f"{row.name}: diagnose", style="dim")
    ours = run_ours(row)
    limit_s = max(LEAST_S, patience * ours.seconds)
    user_code = []
    for tool in tools:
        PROGRESS.print(f"{row.name}: {tool}, at most {limit_s:.0f} s", style="dim")
        user_code.append(attempt(tool, row.task, limit_seconds=limit_s))
    return Score(row=row, ours=ours, user_code=user_code), limit_s


def choose_tools(row: Row, done: Sequence[Score]) -> Sequence[str]:
    """All for Inductor; for others the bisector once for each kind."""
    if row.is_inductor:
        return list(TOOLS)
    has_bisected = any(
        score.row.kind == row.kind and any(one.tool == BISECTOR for one in score.user_code)
        for score in done
    )
    return [MINIFIER] if has_bisected else [MINIFIER, BISECTOR]


# ── Results ──────────────────────────────────────────────────────────────────────────────────


def read_scores(file: Path) -> Iterator[Score]:
    """What an earlier run wrote. Its last line may be cut off."""
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            told = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield Score(
            row=Row(**told["row"]),
            ours=Ours(**told["ours"]),
            user_code=[Attempt(**one) for one in told["theirs"]],
        )


def add_to(table: Table, score: Score, limit_s: float) -> None:
    row, by_tool = score.row, {one.tool: one for one in score.user_code}
    cells = [describe_attempt(by_tool[one], limit_s) if one in by_tool else "" for one in TOOLS]
    is_good = not find_faults(score)
    table.add_row(
        *(row.kind, row.stage, str(row.size), row.pattern),
        f"[{'green' if is_good else 'red'}]{describe_ours(score)}[/]",
        str(score.ours.num_calls),
        f"{score.ours.seconds:.1f}",
        *cells,
    )


def make_table(title: str = "", *, has_header: bool = True) -> Table:
    table = Table(title=title, show_header=has_header)
    for column, width in (
        *(("kind", 14), ("stage", 11), ("ops", 4), ("pattern", 8), ("ours", 26), ("calls", 5)),
        ("s", 6),
        *((tool, 18) for tool in TOOLS),
    ):
        table.add_column(column, width=width, overflow="fold")
    return table


def print_row(score: Score, limit_s: float, *, is_first: bool) -> None:
    version = f"torch {torch.__version__}, Python {platform.python_version()}"
    title = f"{datetime.now(UTC):%Y-%m-%d}: {version}" if is_first else ""
    table = make_table(title, has_header=is_first)
    add_to(table, score, limit_s)
    OUT.print(table)


def print_summary(scores: Sequence[Score]) -> None:
    """Each bar, and the rows that miss it."""
    table = Table(title=f"{len(scores)} rows")
    for column in ("bar", "rows", "met", "missed by"):
        table.add_column(column)
    for name, is_met in BARS.items():
        asked = [(score, is_met(score)) for score in scores]
        told = [(score, answer) for score, answer in asked if answer is not None]
        missing = [score.row.name for score, answer in told if not answer]
        verdict = "[green]met[/]" if not missing else "[red]missed[/]"
        counts = f"{len(told) - len(missing)} of {len(told)}"
        table.add_row(name, counts, verdict if told else "not asked", "\n".join(missing))
    OUT.print(table)
    OUT.print(_describe_theirs(scores))


def _describe_theirs(scores: Sequence[Score]) -> str:
    lines = []
    for tool in TOOLS:
        attempts = [(s, one) for s in scores for one in s.user_code if one.tool == tool]
        found = [(s, one) for s, one in attempts if one.outcome == "found"]
        late = sum(one.outcome == "timed out" for _, one in attempts)
        text = f"{tool}: {len(attempts)} tries, {len(found)} answers"
        if found and tool != BISECTOR:
            right = sum(len(one.ops) == len(s.row.ops) for s, one in found)
            text += f", of which {right} with as few ops as are to blame"
        if found:
            ratios = sorted(one.seconds / s.ours.seconds for s, one in found)
            text += f"; they took {ratios[0]:.1f} to {ratios[-1]:.1f} times as long as ours"
        lines.append(f"{text}; {late} stopped, {len(attempts) - len(found) - late} without answer")
    return "\n".join(lines)


def choose(option: str, known: Iterable[str]) -> Callable[[Any], Any]:
    """An option that takes some of the words that are known, all of them by default."""
    words = list(known)

    def read(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
        chosen = value.split(",")
        unknown = [one for one in chosen if one not in words]
        if unknown:
            raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(words)}.")
        return chosen

    return click.option(option, default=",".join(words), show_default=True, callback=read)


@click.command()
@choose("--kinds", KINDS)
@choose("--stages", (*STAGES, "inductor"))
@choose("--sizes", map(str, SIZES))
@choose("--patterns", PATTERNS)
@click.option("--theirs/--no-theirs", default=True, help="Torch's tools too.")
@click.option("--quick", is_flag=True, help="One row of each kind.")
@click.option("--patience", default=2.5, show_default=True, help="Torch's time ÷ ours, at most.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Add each row to this file.")
@click.option("--resume", is_flag=True, help="Leave out rows that the file has.")
def main(
    kinds: list[str],
    stages: list[str],
    sizes: list[str],
    patterns: list[str],
    user_code: bool,
    quick: bool,
    patience: float,
    file: Path | None,
    resume: bool,
) -> None:
    """Run the rows, print each, and say whether our bars are met."""
    most = 1 if quick else None
    rows = list_rows(
        kinds=kinds,
        stages=stages[:most],
        sizes=[int(one) for one in sizes[:most]],
        patterns=patterns[:most],
    )
    # As pip does; torch's own bytecode is there too.
    compileall.compile_dir(SOURCES, quiet=1)
    scores = list(read_scores(file)) if resume and file is not None else []
    known = {score.row.name for score in scores}
    is_first = True
    for row in [one for one in rows if one.name not in known]:
        tools = choose_tools(row, scores) if user_code else []
        score, limit_s = run_row(row, tools, patience)
        scores.append(score)
        if file is not None:
            with file.open("a") as sink:
                print(json.dumps(asdict(score)), file=sink)
        print_row(score, limit_s, is_first=is_first)
        is_first = False
    print_summary(scores)


if __name__ == "__main__":
    main()
