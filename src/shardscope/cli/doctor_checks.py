"""The checks of `shardscope doctor`, each a function that tries a part of the installation.

`python -m shardscope.cli.doctor_checks NAME…` runs them in this process and prints a line of JSON
when a check begins and when it ends. `shardscope doctor` starts that process, so that a check that
crashes or hangs ends only the process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from shardscope.record.text import describe_error

_COMPILE_S = 20  # for a compiler's empty program
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "firefox")


class Status(StrEnum):
    """What a check has shown."""

    OK = "ok"
    MISSING = "missing"  # something optional is not there
    FAILED = "failed"


class CheckResult(Struct, frozen=True, kw_only=True):
    """The result of a check: what was found, what does not work without it, and what to do."""

    name: str
    status: Status
    detail: str = ""
    disables: str = ""
    remedy: str = ""


class CheckStart(Struct, frozen=True, kw_only=True, tag="start"):
    """A check begins."""

    name: str


class CheckEnd(Struct, frozen=True, kw_only=True, tag="end"):
    """A check has ended."""

    result: CheckResult


class MissingPartError(Exception):
    """Something optional is not there; the text says what."""


def check_torch() -> str:
    """Versions of torch and what it was built with."""
    import torch

    cuda = torch.version.cuda or "none"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    get_version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    nccl = ".".join(map(str, get_version())) if gpus else "not loaded"
    return f"torch {torch.__version__}, built for CUDA {cuda}, NCCL {nccl}, {gpus} GPUs"


def check_private_names() -> str:
    """Import every shim, and look for names that this torch lacks."""
    import shardscope._torch as package
    from shardscope._torch.private import all_needs, missing_names

    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    sentences = missing_names()
    if sentences:
        raise MissingPartError(" ".join(sentences))
    return f"all {len(all_needs())} names that shardscope uses are there"


def check_simulated_world() -> str:
    """Trace a step of a sharded model on simulated GPUs."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from shardscope.comm.trace import trace
    from shardscope.world import simulate

    with simulate({"dp": 4}, device="cuda") as world:
        with torch.device("meta"):
            model = nn.Linear(8, 8)
        fully_shard(model, mesh=world.mesh)
        world.materialize(model)
        with trace(model) as traced:
            model(torch.randn(2, 8, device="cuda")).sum().backward()
    kinds = [str(call.kind) for call in traced.recording.collectives]
    if kinds != ["all_gather", "reduce_scatter"]:
        raise RuntimeError(f"a step of FSDP issued {kinds or 'nothing'}")
    return "a step of FSDP on 4 simulated GPUs"


def check_gloo() -> str:
    """Start two processes that reduce a tensor."""
    import torch
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(2):
            child = os.fork()
            if not child:
                code = 1
                try:
                    address = f"file://{folder}/store"
                    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
                    total = torch.ones(1) * (rank + 1)
                    dist.all_reduce(total)
                    code = int(total.item() != 3)
                finally:
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"processes that reduce a tensor exited with {codes}")
    return "two processes reduced a tensor"


def check_dynamo() -> str:
    """Capture a graph."""
    import torch

    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compile(lambda x: x.relu() + 1, backend=backend)(torch.ones(2))
    if len(graphs) != 1:
        raise RuntimeError(f"a function became {len(graphs)} graphs instead of 1")
    return "captured a graph"


def check_compiler() -> str:
    """Compile a C++ file that includes Python's headers, as Inductor does on the CPU."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    compiler = next((path for path in map(shutil.which, filter(None, names)) if path), None)
    if compiler is None:
        raise MissingPartError("no g++ or clang++ on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cpp")
        source.write_text("#include <Python.h>\nint answer() { return 42; }\n")
        include = sysconfig.get_paths()["include"]
        words = [compiler, "-shared", "-fPIC", f"-I{include}", str(source), "-o", f"{source}.so"]
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=_COMPILE_S
        )
    if done.returncode:
        raise MissingPartError(f"{compiler} fails: {(done.stderr.splitlines() or ['?'])[0]}")
    return f"{compiler}, with Python's headers"


def check_fork() -> str:
    """Fork this process, which has imported torch, and compute in the child."""
    import torch

    child = os.fork()
    if not child:
        os._exit(int(torch.ones(64, 64).matmul(torch.ones(64, 64))[0, 0].item() != 64))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise RuntimeError(f"a forked process that computes exited with {code}")
    return "forked a process that computes"


def check_landlock() -> str:
    """Let a child forbid itself to write, and try."""
    from shardscope.launch.write_guard import forbid_writes

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as outside:
        child = os.fork()
        if not child:
            code = 2
            try:
                if forbid_writes([folder]):
                    Path(folder, "inside").touch()
                    try:
                        Path(outside, "outside").touch()
                        code = 1
                    except OSError:
                        code = 0
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 2:
        raise MissingPartError("this kernel has no Landlock, or forbids it")
    if code:
        raise RuntimeError("a process wrote to a folder that was forbidden to it")
    return "writes outside of a folder are refused"


def check_tables() -> str:
    """Query an Arrow table with SQL."""
    duckdb, pyarrow = _import("duckdb"), _import("pyarrow")
    connection = duckdb.connect()
    connection.register("sizes", pyarrow.table({"size": [1, 2, 3]}))
    ((total,),) = connection.execute("SELECT sum(size) FROM sizes").fetchall()
    if total != 6:
        raise RuntimeError(f"DuckDB added 1, 2 and 3 up to {total}")
    return f"DuckDB {duckdb.__version__}, pyarrow {pyarrow.__version__}"


def check_mcp() -> str:
    """Import the SDK for coding agents' servers."""
    _import("mcp")
    version = importlib.metadata.version("mcp")
    try:
        importlib.import_module("shardscope.cli.mcp_server")
    except ImportError as error:
        raise MissingPartError(f"mcp {version} is too old") from error
    return f"mcp {version}"


def check_browser() -> str:
    """Look for a browser; none is started."""
    name = next((path for path in map(shutil.which, _BROWSERS) if path), None)
    if name is None:
        raise MissingPartError("no Chromium, Chrome or Firefox on the PATH")
    return name


def check_git() -> str:
    """Ask git for its version."""
    if shutil.which("git") is None:
        raise MissingPartError("git is not on the PATH")
    done = subprocess.run(["git", "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingPartError(f"{error.name} is not installed") from error


class Check(Struct, frozen=True, kw_only=True):
    """A check, and what a user loses without what it looks for."""

    run: Callable[[], str]
    disables: str
    remedy: str
    needs_torch: bool = True


_REPORT = "Run `shardscope --debug demo` and report its output."
_OTHER_TORCH = "Install a torch that was tested (see above), or a newer shardscope."
CHECKS = {
    "torch": Check(
        run=check_torch,
        disables="every command that runs a program",
        remedy="Install torch 2.11 or newer: pip install torch.",
    ),
    "fork": Check(
        run=check_fork,
        disables="run, and the fast workers of diagnose",
        remedy="Allow this user more processes (ulimit -u), or more memory.",
    ),
    "gloo": Check(
        run=check_gloo,
        disables="run --data, and real ranks on the CPU",
        remedy="Check that processes may be forked and that the loopback interface is up.",
    ),
    "private torch names": Check(
        run=check_private_names,
        disables="the feature that each sentence names; it is recorded as a gap",
        remedy=_OTHER_TORCH,
    ),
    "simulated worlds": Check(
        run=check_simulated_world,
        disables="trace, audit, memory and run without real ranks",
        remedy=_REPORT,
    ),
    "dynamo": Check(
        run=check_dynamo, disables="explain, diagnose and parallelize", remedy=_OTHER_TORCH
    ),
    "Landlock": Check(
        run=check_landlock,
        disables="refusing writes of a program that run observes; all else works",
        remedy="Use Linux 5.13 or newer, and a container that allows Landlock.",
        needs_torch=False,
    ),
    "C++ compiler": Check(
        run=check_compiler,
        disables="Inductor on the CPU, so diagnose with its default backend",
        remedy="Install g++ and Python's headers: apt-get install g++ python3-dev.",
        needs_torch=False,
    ),
    "tables": Check(
        run=check_tables,
        disables="query, and recordings as Parquet files and data frames",
        remedy="pip install duckdb pyarrow",
        needs_torch=False,
    ),
    "mcp": Check(
        run=check_mcp,
        disables="shardscope mcp, the server for coding agents",
        remedy="pip install 'mcp>=2'",
        needs_torch=False,
    ),
    "browser": Check(
        run=check_browser,
        disables="report --open; a page can be opened on another machine",
        remedy="Install one, or copy the page.",
        needs_torch=False,
    ),
    "git": Check(
        run=check_git,
        disables="shardscope ci with a base",
        remedy="Install git.",
        needs_torch=False,
    ),
}
"""The checks by name, in the order in which they run: those that fork before any starts threads."""


def run_check(name: str) -> CheckResult:
    """Run a check in this process; whatever it raises is its result."""
    check = CHECKS[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return CheckResult(name=name, status=Status.OK, detail=check.run())
    except MissingPartError as error:
        status, detail = Status.MISSING, str(error)
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        detail = "torch is not installed" if is_absent else describe_error(error)
        status = Status.FAILED
    return make_problem(name, status, detail)


def make_problem(name: str, status: Status, detail: str) -> CheckResult:
    """The result of a check that did not pass, with what that means."""
    check = CHECKS[name]
    return CheckResult(
        name=name, status=status, detail=detail, disables=check.disables, remedy=check.remedy
    )


def main(names: list[str]) -> None:
    """Run checks and print their results, a line each, as soon as they are there."""
    stream = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what checks print is not a result

    for name in names:
        stream.write(msgspec.json.encode(CheckStart(name=name)) + b"\n")
        stream.write(msgspec.json.encode(CheckEnd(result=run_check(name))) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
