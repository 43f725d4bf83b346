"""Proves the hangs of `benchmarks/hangs/cases`, and scores what `shardscope check` says of them.

    PYTHONPATH=src:. python benchmarks/hangs.py                       # all cases
    PYTHONPATH=src:. python benchmarks/hangs.py --case 'fsdp*' --no-prove
    PYTHONPATH=src:. python benchmarks/hangs.py --correct             # the correct programs
    PYTHONPATH=src:. python benchmarks/hangs.py --correct 'pipeline*' --list

First each variant of each case runs on gloo processes, without shardscope: the wrong one has to
hang where its condition holds, the corrected one has to end (`hangs/case_proof.py`). Then
`shardscope check -- CASE.py` runs on each variant, where the condition does not hold: check has to
bring it about. A hang is found if check has a finding that something is wrong; line, ranks and
remedy are those of its first finding (`hangs/scoring.py` says what is right). `--correct` counts
false alarms on the programs of `hangs_correct`. `--json FILE` saves a line for each run,
`--markdown FILE` the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

LIMIT_S = 60  # for a case, on two cores
TIMEOUT_S = 300
VARIANTS = ("wrong", "corrected")


def main() -> int:
    """Prove and score the cases or the correct programs that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--variant", choices=VARIANTS, help="run check on this variant only")
    parser.add_argument("--correct", nargs="?", const="*", metavar="PATTERN")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    parser.add_argument("--no-prove", action="store_true", help="only run check")
    parser.add_argument("--jobs", type=int, default=1, help="programs at the same time")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--markdown", metavar="FILE")
    arguments = parser.parse_args()
    names = list_names(arguments.correct, arguments.case or ["*"])
    if arguments.list:
        print("\n".join(names))
        return 0
    if not arguments.no_prove and prove(names, is_correct=arguments.correct is not None):
        return 1
    if arguments.correct is not None:
        from benchmarks.hangs_correct.programs import load_programs

        programs = load_programs()
        runs: list[Callable[[], dict[str, Any]]] = [
            partial(check_correct, name, programs[name]) for name in names
        ]
    else:
        kinds = (arguments.variant,) if arguments.variant else VARIANTS
        runs = [partial(check_case, name, kind) for name in names for kind in kinds]
    results = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for result in pool.map(lambda run: run(), runs):
            results.append(result)
            print_result(result)
    if arguments.json:
        Path(arguments.json).write_text("".join(json.dumps(result) + "\n" for result in results))
    table = write_table(results)
    if arguments.markdown:
        Path(arguments.markdown).write_text(table)
    print(f"\n{table}")
    return 0


def list_names(correct: str | None, patterns: Sequence[str]) -> list[str]:
    """The names of the correct programs that match, or of the cases."""
    from benchmarks.hangs.case import list_cases
    from benchmarks.hangs_correct.programs import load_programs

    if correct is not None:
        return [name for name in load_programs() if fnmatchcase(name, correct)]
    return [name for name in list_cases() if any(fnmatchcase(name, p) for p in patterns)]


def prove(names: Sequence[str], *, is_correct: bool) -> int:
    """Run the programs on gloo; 1 if any does not do what it should."""
    if is_correct:
        from benchmarks.hangs_correct.proof import prove_programs

        return prove_programs(names)
    from benchmarks.hangs.case_proof import prove

    return prove(names)


def check_case(name: str, variant: str) -> dict[str, Any]:
    """Run check on a variant of a case, and score it."""
    from benchmarks.hangs.case import load_case
    from benchmarks.hangs.scoring import has_ranks, has_remedy, is_located, list_alarms

    case = load_case(name)
    result: dict[str, Any] = {"case": name, "variant": variant, "source": case.source}
    result |= {"class": case.kind, "condition": case.condition}
    result |= run_check(case.file, (), case.nproc, {"HANG": variant})
    alarms = list_alarms(result.pop("findings"))
    first = alarms[0] if alarms else None
    return result | {
        "is_found": first is not None,
        "is_located": first is not None and is_located(case, first),
        "has_ranks": first is not None and has_ranks(case, first),
        "has_remedy": first is not None and has_remedy(case, first),
        "alarms": alarms,
    }


def check_correct(name: str, program: Any) -> dict[str, Any]:
    """Run check on a correct program: each alarm is false."""
    from benchmarks.hangs.scoring import list_alarms

    result: dict[str, Any] = {"case": name, "variant": "correct", "source": "", "class": ""}
    result |= run_check(program.script, program.arguments, program.nproc, {})
    alarms = list_alarms(result.pop("findings"))
    return result | {"is_found": bool(alarms), "alarms": alarms}


def run_check(
    script: Path, arguments: Sequence[str], nproc: int, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run `shardscope check` on a program: findings, gaps, seconds, and the failure if any.

    This is all that is known here of the command line and of the recording.
    """
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "recording.json"
        command = [sys.executable, "-m", "shardscope", "check", "--nproc-per-node", str(nproc)]
        command += ["-o", str(recording), "--", str(script), *arguments]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        start, failure = time.perf_counter(), ""
        try:
            process = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S
            )
            if process.returncode not in (0, 1) or not recording.exists():
                failure = (process.stderr or process.stdout).strip()[-1000:]
        except subprocess.TimeoutExpired:
            failure = f"no result within {TIMEOUT_S} s"
        seconds = time.perf_counter() - start
        if failure:
            return {"seconds": seconds, "failure": failure, "findings": [], "gaps": []}
        contents = json.loads(recording.read_text())
    gaps = [f"{gap['place']}: {gap['fact']}" for gap in contents.get("gaps", [])]
    return {"seconds": seconds, "findings": contents.get("findings", []), "gaps": gaps}


def print_result(result: dict[str, Any]) -> None:
    """Print what check said of a program."""
    flags = (("found", "is_found"), ("line", "is_located"))
    flags += (("ranks", "has_ranks"), ("remedy", "has_remedy"))
    if "failure" in result:
        verdict = "FAILED"
    elif result["variant"] == "wrong":
        verdict = ", ".join(word if result[key] else f"NO {word}" for word, key in flags)
    else:
        verdict = "FALSE ALARM" if result["is_found"] else "silent"
    print(f"{result['case']} ({result['variant']}): {verdict}; {result['seconds']:.1f} s")
    if "failure" in result:
        print("    " + result["failure"].replace("\n", "\n    "))
    for finding in result["alarms"]:
        source = finding.get("source")
        line = f" [{source['file']}:{source['line']} {source['function']}]" if source else ""
        print(f"    {finding['rule']} at {finding['subject']}: {finding['fact']}{line}")
        print(f"        {finding.get('remedy')}")
    for gap in result["gaps"]:
        print(f"    gap: {gap}")
    sys.stdout.flush()


def write_table(results: Sequence[dict[str, Any]]) -> str:
    """The scores per case and in total, in Markdown; of correct programs the totals only."""
    rows = ["| case | source | condition | found | line | ranks | remedy | corrected | s |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    cases = [result for result in results if result["variant"] != "correct"]
    for name in dict.fromkeys(result["case"] for result in cases):
        runs = {result["variant"]: result for result in cases if result["case"] == name}
        wrong, corrected = runs.get("wrong"), runs.get("corrected")
        cells = [
            "" if wrong is None else "yes" if wrong[key] else "**no**"
            for key in ("is_found", "is_located", "has_ranks", "has_remedy")
        ]
        cells.append("" if corrected is None else describe_silence(corrected))
        cells.append(f"{max(result['seconds'] for result in runs.values()):.0f}")
        any_run = next(iter(runs.values()))
        condition = any_run["condition"] or "as it is"
        rows.append(f"| {name} | {any_run['source']} | {condition} | {' | '.join(cells)} |")
    lines = [*rows, ""] if cases else []
    return "\n".join([*lines, *describe_totals(results), ""])


def describe_silence(result: dict[str, Any]) -> str:
    """The cell of a variant that has nothing wrong."""
    if "failure" in result:
        return "**failed**"
    return "**alarm**" if result["is_found"] else "silent"


def describe_totals(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How many hangs are found, with the right line, ranks and remedy, and the false alarms."""
    wrong = [result for result in results if result["variant"] == "wrong"]
    if wrong:
        keys = {"is_found": "found", "is_located": "with a right line or module"}
        keys |= {"has_ranks": "with the right ranks", "has_remedy": "with a right remedy"}
        counts = {word: sum(result[key] for result in wrong) for key, word in keys.items()}
        parts = [f"{count} ({count / len(wrong):.0%}) {word}" for word, count in counts.items()]
        yield f"Of {len(wrong)} hangs {', '.join(parts)}."
    for variant, noun in (("corrected", "corrected variants"), ("correct", "correct programs")):
        group = [result for result in results if result["variant"] == variant]
        if group:
            num_failed = sum("failure" in result for result in group)
            num_alarms = sum(result["is_found"] for result in group)
            yield f"Of {len(group)} {noun} {num_alarms} gave an alarm and {num_failed} failed."
    seconds = sorted(result["seconds"] for result in results)
    if seconds:
        slow = sum(second > LIMIT_S for second in seconds)
        yield (
            f"Seconds per run: median {seconds[len(seconds) // 2]:.1f}, longest {seconds[-1]:.1f}; "
            f"{slow} above {LIMIT_S}."
        )


if __name__ == "__main__":
    sys.exit(main())
