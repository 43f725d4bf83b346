"""A rank that torchrun has started: runs the program on real process groups and traces it.

Started as `torchrun … -m shardscope.launch.real_rank REQUEST`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from shardscope.launch.instruments import make_instrument
from shardscope.launch.program import Program
from shardscope.launch.rank_process import run_program, save_results
from shardscope.launch.request import Job, Request

__frames__ = "outermost"  # our callers are not the user's program


def main() -> None:
    """Run the program of the request as the rank that the environment names."""
    request = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Request)
    job = Job(rank=int(os.environ["RANK"]), instrument=request.jobs[0].instrument)
    program = Program(request.script, request.args, request.is_module)
    ending, recording = run_program(
        program,
        request.num_steps,
        make_instrument(job.instrument, request.gpu),
        is_simulated=False,
    )
    save_results(request, job, ending, recording)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if ending.failure else 0)  # the other ranks may have left the group already


if __name__ == "__main__":
    main()
