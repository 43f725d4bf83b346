"""A crash is a real one: the process ends by a signal, when the op runs."""

from __future__ import annotations

from pathlib import Path

from warm_python import run_python

TESTS = Path(__file__).parents[2]

# One process imports torch, and runs what does not crash; each crash ends a fork of it. Without
# gradients: autograd's threads do not outlive a fork.
PROGRAM = """
import os, resource, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a fork cannot use CUDA once its parent has
import torch
sys.path.insert(0, sys.argv[1])
from backend_cases import run
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for op in ("sin", "relu"):
    for stage in ("decomposed", "graph", "partitioned"):
        child = os.fork() if op == "relu" else 0
        if child == 0:
            run("shardscope_fault_crash", {"op": op, "stage": stage}, has_grad=False)
        if op == "relu" and child == 0:
            os._exit(0)
        status = os.waitpid(child, 0)[1] if child else 0
        end = os.waitstatus_to_exitcode(status)
        print(op, stage, f"signal {-end}" if end < 0 else f"exit {end}", flush=True)
"""


def test_a_crash_ends_the_process_and_only_where_the_op_is() -> None:
    done = run_python("-c", PROGRAM, str(TESTS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{op} {stage} {'signal 11' if op == 'relu' else 'exit 0'}"
        for op in ("sin", "relu")
        for stage in ("decomposed", "graph", "partitioned")
    ]
