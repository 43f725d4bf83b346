"""Proves that the correct programs end on gloo processes.

PYTHONPATH=src:. python -m benchmarks.hangs_correct.proof               # all programs
PYTHONPATH=src:. python -m benchmarks.hangs_correct.proof 'pipelines*'  # those that match
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.hangs.ranks import Launch, run
from benchmarks.hangs_correct.programs import load_programs


def prove_programs(names: Sequence[str]) -> int:
    """Run each program, print those that do not end on all ranks; 1 if there are any."""
    num_wrong = 0
    programs = load_programs()
    for name in names:
        program = programs[name]
        launch = Launch(program.script, program.nproc, program.arguments)
        with tempfile.TemporaryDirectory() as folder:
            result = run(launch, Path(folder))
        if result.outcome != "ended":
            num_wrong += 1
            print(f"{name}: {result.outcome}, {result.seconds:.1f} s")
            for rank, output in enumerate(result.outputs):
                print(f"    rank {rank}: {result.places[rank]}")
                for line in output.splitlines()[-12:]:
                    print(f"        {line[:160]}", flush=True)
    print(f"{len(names)} programs, {num_wrong} of which do not end")
    return int(num_wrong > 0)


if __name__ == "__main__":
    patterns = sys.argv[1:] or ["*"]
    sys.exit(
        prove_programs([n for n in load_programs() if any(fnmatchcase(n, p) for p in patterns)])
    )
