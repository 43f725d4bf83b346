"""Score `shardscope hang` on injected faults, beside torch's analyzer of Flight Recorder dumps.

    python benchmarks/hang_dumps.py                  # 200 faults in worlds of 8 to 1,024 ranks
    python benchmarks/hang_dumps.py --cases 40       # fewer
    python benchmarks/hang_dumps.py --real           # real gloo processes, also with DETAIL mode
    python benchmarks/hang_dumps.py --large          # 1,024 dumps of 2,000 calls: time and memory

A fault is right if the first cause has the right rank, the right group and position, and a class
that these files can show. `hang/` has the schedule, the faults and the writers of each format.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from hang.scoring import Score, choose_cases, score_case, score_torch

CONSOLE = Console(width=150)


def main() -> None:
    """Run what was asked for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--large", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.real:
            from hang.real_scores import score_real

            score_real(Path(folder), CONSOLE)
        elif arguments.large:
            from hang.large_dumps import measure_large

            measure_large(Path(folder), CONSOLE)
        else:
            score_all(Path(folder), arguments)


def score_all(folder: Path, arguments: argparse.Namespace) -> None:
    """Score all cases and print them by kind of fault and by files."""
    scores: list[Score] = []
    torch_scores: dict[str, list[bool]] = defaultdict(list)
    for number, case in enumerate(choose_cases(arguments.cases, arguments.seed)):
        place = folder / str(number)
        score = score_case(case, place)
        scores.append(score)
        if not score.is_right:
            flags = f"rank {score.is_rank} place {score.is_place} class {score.is_class}"
            CONSOLE.print(f"{number} {case.name}\n    {flags}: {score.said}", style="yellow")
        if not arguments.no_torch:
            right = score_torch(case, place)
            if right is not None:
                torch_scores[case.fault.kind].append(right)
    print_table("fault", scores, lambda score: score.case.fault.kind, torch_scores)
    print_table("files", scores, lambda score: " + ".join(score.case.files), {})
    print_table("ranks", scores, lambda score: str(_count(score)), {})


def _count(score: Score) -> int:
    size = 1
    for length in score.case.axes.values():
        size *= length
    return size


def print_table(title, scores: list[Score], key, torch_scores: dict[str, list[bool]]) -> None:
    """Right answers by a property of the case."""
    table = Table(title=f"by {title}")
    for name in (title, "faults", "rank", "place", "class", "all right", "torchfrtrace"):
        table.add_column(name, justify="left" if name == title else "right")
    rows: dict[str, list[Score]] = defaultdict(list)
    for score in scores:
        rows[key(score)].append(score)
    ordered = sorted(rows, key=lambda name: (int(name) if name.isdigit() else 0, name))
    for name in [*ordered, "all"]:
        own = scores if name == "all" else rows[name]
        by_torch = torch_scores.get(name, [])
        if name == "all":
            by_torch = [right for found in torch_scores.values() for right in found]
        table.add_row(
            name,
            str(len(own)),
            *(str(sum(getattr(score, field) for score in own)) for field in
              ("is_rank", "is_place", "is_class", "is_right")),
            f"{sum(by_torch)} of {len(by_torch)}" if by_torch else "–",
        )  # fmt: skip
    CONSOLE.print(table)


if __name__ == "__main__":
    main()
