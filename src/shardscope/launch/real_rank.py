"""A rank that torchrun has started: runs the program on real process groups and traces it.

Started as `torchrun … -m shardscope.launch.real_rank REQUEST`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from shardscope.launch.program import Program
from shardscope.launch.rank_process import ProgramRun
from shardscope.launch.request import Job, Request

__frames__ = "outermost"  # our callers are not the user's program


def main() -> None:
    """Run the program of the request as the rank that the environment names."""
    request = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Request)
    del sys.path[0]  # this folder, because of -m
    job = Job(rank=int(os.environ["RANK"]), instrument=request.jobs[0].instrument)
    program = Program(request.script, request.args, request.is_module)
    code = ProgramRun(request, job, program).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the other ranks may have left the group already


if __name__ == "__main__":
    main()
