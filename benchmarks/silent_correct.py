"""Runs `shardscope.parity` on training programs that are right: every alarm is false.

    PYTHONPATH=src:. python benchmarks/silent_correct.py            # all programs
    PYTHONPATH=src:. python benchmarks/silent_correct.py gpt/fsdp   # those whose name contains this

Programs run in batches, each in a process of its own. `--prove` runs them in double precision on
processes of gloo instead, without shardscope, and compares the updated parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

BATCH = 40  # programs in a process


def main() -> int:
    """Run the programs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--prove", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--run", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        for name in arguments.run:
            print(json.dumps(check(name)), flush=True)
        return 0
    from benchmarks.silent.correct import PROGRAMS

    names = [name for name in PROGRAMS if arguments.pattern in name]
    if arguments.list:
        print("\n".join(names))
        return 0
    if arguments.prove:
        from benchmarks.silent.proof import prove

        return prove(names)
    return print_results(run_all(names), len(names))


def check(name: str) -> dict[str, Any]:
    """Run parity on a program: its findings, or the failure, and the time."""
    from benchmarks.silent.correct import PROGRAMS

    from shardscope import parity

    warnings.simplefilter("ignore")
    program, start = PROGRAMS[name], time.perf_counter()
    result: dict[str, Any] = {"name": name}
    try:
        recording = parity(
            program.make_model(),
            program.layout.mesh,
            parallelize=program.layout.parallelize,
            batches=program.make_batches(),
            train_step=program.train_step,
            parallel_train_step=program.rank_step,
            optimizer=program.make_trainer,
            batch_axes=program.layout.batch_axes,
            batch_dim=program.layout.batch_dim,
            precision=program.precision,
        )
        result["alarms"] = [
            f"{finding.severity} {finding.rule} at {finding.subject}: {finding.fact}"
            for finding in recording.findings
            if finding.severity in ("error", "warning")
        ]
        result["gaps"] = [f"{gap.place}: {gap.fact}" for gap in recording.gaps]
        result["num_tensors"] = sum(len(record.tensors) for record in recording.parity)
    except Exception as error:  # noqa: BLE001 - a failure is a result
        result["failure"] = f"{type(error).__name__}: {error}"
    result["seconds"] = time.perf_counter() - start
    return result


def run_all(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The results of all programs, each batch of them in a process of its own."""
    for start in range(0, len(names), BATCH):
        command = [sys.executable, __file__, "--run", *names[start : start + BATCH]]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)


def print_results(results: Iterator[dict[str, Any]], number: int) -> int:
    """Print alarms and failures, and the totals; 1 if there are any."""
    counts = {"ran": 0, "alarms": 0, "failures": 0, "gaps": 0}
    seconds: list[float] = []
    num_tensors = 0
    for result in results:
        counts["ran"] += 1
        seconds.append(result["seconds"])
        num_tensors += result.get("num_tensors", 0)
        for kind in ("alarms", "gaps"):
            counts[kind] += bool(result.get(kind))
        counts["failures"] += "failure" in result
        lines = [*result.get("alarms", ()), *(f"gap: {gap}" for gap in result.get("gaps", ()))]
        lines += [result["failure"]] if "failure" in result else []
        if lines:
            print(f"{result['name']}  {result['seconds']:.1f} s")
            for line in lines:
                print(f"    {line}", flush=True)
    median = sorted(seconds)[len(seconds) // 2] if seconds else 0.0
    print(
        f"{counts['ran']} of {number} programs ran, {counts['alarms']} with alarms, "
        f"{counts['failures']} failed, {counts['gaps']} with gaps; {num_tensors} tensors compared; "
        f"{sum(seconds):.0f} s, median {median:.1f} s, longest {max(seconds, default=0.0):.1f} s"
    )
    return int(counts["alarms"] + counts["failures"] + (number - counts["ran"]) > 0)


if __name__ == "__main__":
    sys.exit(main())
