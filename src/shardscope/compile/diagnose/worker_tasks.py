"""The tasks of the worker process: they compile, run and compare the subgraphs that it has loaded.

Each function marked with `runs_in_worker` is called by `WorkerClient`, with the worker's
`WorkerContext` as the first argument. The context stores the loaded subgraphs.
"""

from __future__ import annotations

import io
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

from shardscope._torch.inductor import apply_settings, probe_cpu_isa
from shardscope.compile.diagnose.accuracy import (
    CheckResult,
    affects_results,
    check_accuracy,
    check_forward_once,
    check_function_accuracy,
    find_affecting_node,
    is_same_failure,
)
from shardscope.compile.diagnose.repro import PASSING, Variant, find_passing, write_repro
from shardscope.compile.diagnose.stage_bisect import (
    StageToggles,
    check_with_parts_disabled,
    reported_stages,
)
from shardscope.compile.diagnose.subgraph import (
    Compiler,
    RecordedGraph,
    Subgraph,
    in_order,
    name_output,
)
from shardscope.compile.diagnose.subgraph.op_names import describe_ops
from shardscope.compile.diagnose.worker import (
    ScriptRun,
    SubgraphData,
    WorkerContext,
    build_subgraph,
    runs_in_worker,
    unpack,
)
from shardscope.record import Phase, Stage, SuspectOp


@final
@dataclass(frozen=True)
class SubgraphInfo:
    """What is known of a subgraph that the worker has loaded."""

    ops: tuple[str, ...]
    reads: Mapping[str, tuple[str, ...]]
    eager_s: float


@final
@dataclass(frozen=True)
class OpSubset:
    """Some ops of a loaded subgraph by name, or all of them if `keep` is None."""

    key: int
    keep: frozenset[str] | None = None


@final
@dataclass(frozen=True)
class ReproRequest:
    """What a repro script should show."""

    subset: OpSubset
    passing: OpSubset | None
    compiler: Compiler
    outcome: CheckResult
    folder: Path
    title: str
    stage: Stage | None
    limit_s: float
    settings: tuple[str, ...]
    may_try: bool  # call the backend for a better script


@final
@dataclass(frozen=True)
class ReproScript:
    """A script, how its passing variant differs, and how often the backend was called for it."""

    path: Path
    passing: str
    passing_calls_backend: bool
    num_calls: int


@runs_in_worker
def apply_user_settings(_: WorkerContext, settings: tuple[str, ...]) -> None:
    """Apply the user's torch settings in the worker."""
    apply_settings(settings)


@runs_in_worker
def probe_vector_instructions(_: WorkerContext) -> None:
    """Let Inductor detect the CPU's vector instructions before the first compilation."""
    probe_cpu_isa()


@runs_in_worker
def load_subgraph(context: WorkerContext, key: int, data: SubgraphData) -> None:
    """Build a subgraph, run it eagerly, and store both in the context."""
    began = time.monotonic()
    recorded = RecordedGraph(build_subgraph(data))
    loaded = SubgraphInfo(recorded.ops, recorded.reads, time.monotonic() - began)
    context.store[f"fragment {key}"], context.store[f"loaded {key}"] = recorded, loaded


@runs_in_worker
def read_subgraph_info(context: WorkerContext, key: int) -> SubgraphInfo:
    """What is known of a subgraph that was loaded."""
    loaded: SubgraphInfo = context.store[f"loaded {key}"]
    return loaded


@runs_in_worker
def check_ops(context: WorkerContext, subset: OpSubset, compiler: Compiler) -> CheckResult:
    """Check a subset of ops against eager execution."""
    return check_accuracy(_extract(context, subset), compiler, report_phase=context.report_phase)


@runs_in_worker
def check_all_values(context: WorkerContext, key: int, compiler: Compiler) -> CheckResult:
    """Check all values in a subgraph; the hint is the first wrong value."""
    return _check_with_hint(
        _with_all_values(context, key),
        partial(check_accuracy, report_phase=context.report_phase),
        compiler,
    )


@runs_in_worker
def find_first_wrong_op(context: WorkerContext, key: int, compiler: Compiler) -> CheckResult:
    """A quick form of `check_all_values` for a subgraph whose results are known to be wrong.

    The hint is the first value that makes the results wrong: other wrong values may have no effect.
    """
    exposed = _with_all_values(context, key)
    outcome, wrong = check_forward_once(exposed, compiler, report_phase=context.report_phase)
    values = {name_output(exposed, output): value for output, value in wrong.items()}
    values.pop("", None)
    name = find_affecting_node(_extract(context, OpSubset(key)), values)
    return replace(outcome, hints=(name,)) if name else outcome


@runs_in_worker
def check_affects_results(context: WorkerContext, subset: OpSubset, compiler: Compiler) -> bool:
    """Whether the wrong values of a subset make the results of its graph wrong."""
    subgraph, part = _extract(context, OpSubset(subset.key)), _extract(context, subset)
    return affects_results(subgraph, part, compiler, report_phase=context.report_phase)


@runs_in_worker
def check_program(
    context: WorkerContext, packed: Sequence[bytes], compiler: Compiler
) -> CheckResult:
    """Check an entire function under torch.compile."""
    return check_function_accuracy(
        lambda: unpack(packed), compiler, report_phase=context.report_phase
    )


@runs_in_worker
def describe_suspects(context: WorkerContext, subset: OpSubset) -> tuple[SuspectOp, ...]:
    """The ops of a subset, with their modules and source lines."""
    return describe_ops(_extract(context, subset))


@runs_in_worker
def check_with_toggles(
    context: WorkerContext,
    subset: OpSubset,
    compiler: Compiler,
    toggles: StageToggles,
    phase: Phase,
) -> CheckResult:
    """Check a subset with parts of the compiler disabled; the result has a log."""
    # Runs have a shorter time limit than compilations, so both phases are reported.
    check_and_report = partial(check_accuracy, report_phase=context.report_phase)
    with reported_stages(context.report_phase):
        return check_with_parts_disabled(
            _extract(context, subset),
            compiler,
            toggles,
            check_accuracy=check_and_report,
            phase=phase,
        )


@runs_in_worker
def write_script(context: WorkerContext, request: ReproRequest) -> ReproScript:
    """Write a script; raises NotPrintable if that cannot be done."""
    counting_check = _CountingCheck()
    subgraph = _extract(context, request.subset)

    def still_fails(inputs: tuple[Any, ...]) -> bool:
        outcome = counting_check(replace(subgraph, inputs=inputs), request.compiler)
        return is_same_failure(outcome, request.outcome)

    passing = _find_variant(context, request, subgraph, counting_check)
    path = write_repro(
        subgraph,
        request.compiler,
        request.outcome,
        folder=request.folder,
        passing=passing,
        title=request.title,
        stage=request.stage,
        still_fails=still_fails if request.may_try else None,
        limit_s=request.limit_s,
        settings=request.settings,
    )
    is_same = passing.compiler == request.compiler
    return ReproScript(path, passing.difference, is_same, counting_check.num_calls)


@runs_in_worker
def run_passing_variant(context: WorkerContext, path: Path) -> ScriptRun:
    """Run the passing variant of a script.

    Unlike a failure, passing needs no fresh process.
    """
    context.report_phase("running the passing variant")
    printed = io.StringIO()
    arguments = sys.argv
    sys.argv = [str(path), PASSING]
    try:
        with redirect_stdout(printed):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return ScriptRun(int(end.code or 0), printed.getvalue())
    finally:
        sys.argv = arguments
    return ScriptRun(0, printed.getvalue())


def _find_variant(
    context: WorkerContext,
    request: ReproRequest,
    subgraph: Subgraph,
    check_accuracy: Callable[..., CheckResult],
) -> Variant:
    smaller = None if request.passing is None else _extract(context, request.passing)
    max_calls = 1 if request.may_try else 0
    return find_passing(
        subgraph,
        compiler=request.compiler,
        check_accuracy=check_accuracy,
        smaller=smaller,
        missing=_name_missing(context, request),
        max_calls=max_calls,
    )


def _name_missing(context: WorkerContext, request: ReproRequest) -> str:
    subset, passing = request.subset, request.passing
    if passing is None or subset.keep is None or passing.keep is None:
        return ""
    missing = OpSubset(subset.key, subset.keep - passing.keep)
    return ", ".join(dict.fromkeys(suspect.op for suspect in describe_suspects(context, missing)))


@final
class _CountingCheck:
    """Checks subgraphs, and counts the calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, subgraph: Subgraph, compiler: Compiler) -> CheckResult:
        self.num_calls += 1
        return check_accuracy(subgraph, compiler)


def _with_all_values(context: WorkerContext, key: int) -> Subgraph:
    return in_order(_recorded_graph(context, key).output_all_values())


def _check_with_hint(
    exposed: Subgraph, check_accuracy: Callable[..., CheckResult], compiler: Compiler
) -> CheckResult:
    """The outcome, with the node of the first wrong value as a hint."""
    outcome = check_accuracy(exposed, compiler)
    name = name_output(exposed, outcome.deviation.tensor) if outcome.deviation else ""
    return replace(outcome, hints=(name,)) if name else outcome


def _extract(context: WorkerContext, subset: OpSubset) -> Subgraph:
    recorded = _recorded_graph(context, subset.key)
    return recorded.extract(recorded.ops if subset.keep is None else subset.keep)


def _recorded_graph(context: WorkerContext, key: int) -> RecordedGraph:
    recorded: RecordedGraph = context.store[f"fragment {key}"]
    return recorded
