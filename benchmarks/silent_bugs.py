"""Proves the silent bugs of `benchmarks/silent/cases`, and scores what `shardscope parity` says.

    PYTHONPATH=src:. python benchmarks/silent_bugs.py                   # all cases
    PYTHONPATH=src:. python benchmarks/silent_bugs.py --case 'cp_*' --no-prove
    PYTHONPATH=src:. python benchmarks/silent_bugs.py --variant corrected --jobs 2

First each variant of each case is compared with a single device in double precision, on processes
of gloo and without shardscope: the buggy one has to differ, the corrected one must not. Then
`shardscope parity CASE.py --mesh …` runs on each, as a user would call it, in a process of its own.
A bug is found if parity has a finding that something is wrong; location and cause are those of its
first finding (`silent/scoring.py` says what is right). `--json FILE` saves a line for each run,
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

LIMIT_S = 60  # for a case, on two cores
TIMEOUT_S = 300
VARIANTS = ("buggy", "corrected")
PUBLISHED = """\
Published figures of other tools, each on its own set of bugs and as its authors report them; they
were not run here, and the sets are not comparable:

| tool | bugs | exact cause | false alarms | needs |
|---|---|---|---|---|
| TTrace (arXiv 2506.09280) | 14 in Megatron-LM, 11 known and 3 new | – | – | annotations of how tensors are sharded; GPUs |
| TrainCheck (OSDI '25) | 18 of 20 | 10 (near: 8) | under 2 % | 5 – 6 reference runs |
| spmd_types (meta-pytorch) | 11 in Megatron-LM | – | – | annotations of all inputs, parameters and collectives |
"""  # noqa: E501


def main() -> int:
    """Prove and score the cases that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--variant", choices=VARIANTS, help="run parity on this variant only")
    parser.add_argument("--no-prove", action="store_true", help="only run parity")
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--markdown", metavar="FILE")
    arguments = parser.parse_args()
    from benchmarks.silent.case import list_cases

    patterns = arguments.case or ["*"]
    names = [name for name in list_cases() if any(fnmatchcase(name, p) for p in patterns)]
    if not arguments.no_prove:
        from benchmarks.silent.case_proof import prove

        if prove(names):
            return 1
    results = []
    for result in run_all(names, arguments.variant, arguments.jobs):
        results.append(result)
        print_result(result)
    if arguments.json:
        lines = "".join(json.dumps(result) + "\n" for result in results)
        Path(arguments.json).write_text(lines)
    table = write_table(results)
    if arguments.markdown:
        Path(arguments.markdown).write_text(table)
    print(f"\n{table}")
    return 0


def run_all(names: Sequence[str], variant: str | None, jobs: int) -> Iterator[dict[str, Any]]:
    """The results of parity on each case, first of the buggy variant."""
    from benchmarks.silent.case import load_case

    runs = [(name, kind) for name in names for kind in ([variant] if variant else VARIANTS)]
    # Loading sets a variable of the environment, which is of the process and not of a thread.
    cases = [load_case(name, is_buggy=kind == "buggy").CASE for name, kind in runs]
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(run_parity, runs, cases)


def run_parity(run: tuple[str, str], case: Any) -> dict[str, Any]:
    """Run parity on a variant of a case, and score it; `run` is the name and the variant."""
    from benchmarks.silent.case import find_file

    name, variant = run
    mesh = ",".join(f"{axis}={size}" for axis, size in case.mesh.items())
    with tempfile.TemporaryDirectory() as folder:
        recording = os.path.join(folder, "recording.json")
        command = [sys.executable, "-m", "shardscope", "parity", str(find_file(name))]
        command += ["--mesh", mesh, "--steps", str(case.num_steps), "-o", recording]
        command += [word for axis in case.batch_axes for word in ("--batch-axis", axis)]
        command += ["--batch-dim", str(case.batch_dim)]
        environment = {**os.environ, "SILENT_BUG": variant, "OMP_NUM_THREADS": "1"}
        start, failure = time.perf_counter(), ""
        try:
            process = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
            )
            if process.returncode not in (0, 1):
                failure = (process.stderr or process.stdout).strip()[-1000:]
        except subprocess.TimeoutExpired:
            failure = f"no result within {TIMEOUT_S} s"
        seconds = time.perf_counter() - start
        result = {"case": name, "variant": variant, "source": case.source, "seconds": seconds}
        if failure:
            return result | {"failure": failure, "is_found": False}
        return result | score(name, case, json.loads(Path(recording).read_text()))


def score(name: str, case: Any, recording: dict[str, Any]) -> dict[str, Any]:
    """What parity found, and whether the location and the cause of its first finding are right."""
    from benchmarks.silent.scoring import has_cause, is_located, list_alarms

    alarms = list_alarms(recording.get("findings", []))
    return {
        "is_found": bool(alarms),
        "is_located": bool(alarms) and is_located(name, case, alarms[0]),
        "has_cause": bool(alarms) and has_cause(case, alarms[0]),
        "expected": {"causes": case.causes, "locations": case.locations},
        "alarms": alarms,
        "gaps": [f"{gap['place']}: {gap['fact']}" for gap in recording.get("gaps", [])],
    }


def print_result(result: dict[str, Any]) -> None:
    """Print what parity said on a variant of a case."""
    is_buggy = result["variant"] == "buggy"
    if "failure" in result:
        verdict = "FAILED"
    elif is_buggy:
        flags = (("found", "is_found"), ("location", "is_located"), ("cause", "has_cause"))
        verdict = ", ".join(word if result[key] else f"NO {word}" for word, key in flags)
    else:
        verdict = "FALSE ALARM" if result["is_found"] else "agrees"
    print(f"{result['case']} ({result['variant']}): {verdict}; {result['seconds']:.1f} s")
    if "failure" in result:
        print("    " + result["failure"].replace("\n", "\n    "))
    for finding in result.get("alarms", ()):
        source = finding.get("source")
        line = f" [{source['file']}:{source['line']} {source['function']}]" if source else ""
        print(f"    {finding['rule']} at {finding['subject']}: {finding['fact']}{line}")
    for gap in result.get("gaps", ()):
        print(f"    gap: {gap}")
    sys.stdout.flush()


def write_table(results: Sequence[dict[str, Any]]) -> str:
    """The scores per case and in total, in Markdown, with published figures of other tools."""
    rows = ["| case | source | found | location | cause | corrected | s |"]
    rows.append("|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(result["case"] for result in results):
        runs = {result["variant"]: result for result in results if result["case"] == name}
        buggy, corrected = runs.get("buggy"), runs.get("corrected")
        cells = [
            "" if buggy is None else "yes" if buggy.get(key) else "**no**"
            for key in ("is_found", "is_located", "has_cause")
        ]
        cells.append("" if corrected is None else describe_corrected(corrected))
        seconds = max(result["seconds"] for result in runs.values())
        source = next(iter(runs.values()))["source"]
        rows.append(f"| {name} | {source} | {' | '.join(cells)} | {seconds:.0f} |")
    return "\n".join([*rows, "", *describe_totals(results), "", PUBLISHED])


def describe_corrected(result: dict[str, Any]) -> str:
    """The cell of a corrected variant."""
    if "failure" in result:
        return "**failed**"
    return "**alarm**" if result["is_found"] else "agrees"


def describe_totals(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How many bugs are found, with the right location and cause, and how many alarms are false."""
    buggy = [result for result in results if result["variant"] == "buggy"]
    corrected = [result for result in results if result["variant"] == "corrected"]
    if buggy:
        counts = [
            (word, sum(bool(result.get(key)) for result in buggy))
            for word, key in (
                ("found", "is_found"),
                ("with the right location", "is_located"),
                ("with the right cause", "has_cause"),
            )
        ]
        parts = [f"{number} ({number / len(buggy):.0%}) {word}" for word, number in counts]
        yield f"Of {len(buggy)} silent bugs {', '.join(parts)}."
    if corrected:
        num_alarms = sum(result["is_found"] for result in corrected)
        num_failed = sum("failure" in result for result in corrected)
        yield (
            f"Of {len(corrected)} corrected versions {num_alarms} gave a false alarm and "
            f"{num_failed} failed."
        )
    seconds = sorted(result["seconds"] for result in results)
    if seconds:
        slow = sum(second > LIMIT_S for second in seconds)
        yield (
            f"Seconds per run: median {seconds[len(seconds) // 2]:.1f}, longest {seconds[-1]:.1f}; "
            f"{slow} above {LIMIT_S}."
        )


if __name__ == "__main__":
    sys.exit(main())
