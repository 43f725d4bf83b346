"""Runs a diagnosis: checks each captured graph, then the entire function, and locates failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from msgspec.structs import replace

from shardscope._torch.inductor import read_settings
from shardscope._torch.preload import FOR_INDUCTOR, FOR_SCRIPTS
from shardscope.attribution.program_records import describe_run, find_torch_gaps, read_identity
from shardscope.compile.diagnose.accuracy import (
    NUMBERS,
    CheckResult,
    describe_error,
    describe_missing_error,
    find_failing_line,
    resolve_backend,
)
from shardscope.compile.diagnose.minimize import Minimizer, add_note, show_relative_path
from shardscope.compile.diagnose.repro_writer import ReproWriter
from shardscope.compile.diagnose.single_process import strip_distributed
from shardscope.compile.diagnose.stage_bisect import fails_the_same_way
from shardscope.compile.diagnose.subgraph import Compiler, Subgraph
from shardscope.compile.diagnose.target import TargetFunction
from shardscope.compile.diagnose.worker import (
    ForkServer,
    OutputFolder,
    Workers,
    pack,
    seed_inductor_cache,
)
from shardscope.compile.diagnose.worker_client import (
    ProgressReporter,
    Timeouts,
    WorkerClient,
    shown_progress,
)
from shardscope.compile.diagnose.worker_tasks import (
    OpSubset,
    SubgraphInfo,
    apply_user_settings,
    check_all_values,
    check_program,
    probe_vector_instructions,
)
from shardscope.errors import CompileError
from shardscope.record import Condition, Diagnosis, Finding, Phase, Recording, Severity, Stage

# Backends of torch that stop after a stage of Inductor's pipeline, in order.
_STAGES = {
    "eager": Stage.DYNAMO,
    "aot_eager": Stage.AOT,
    "aot_eager_decomp_partition": Stage.DECOMPOSITION,
}
# Conditions that are reported though they are no failures, the more important first.
_MILD = (Condition.RNG, Condition.MORE_ACCURATE)
_BY_VALUES = (*NUMBERS, Condition.NONDETERMINISTIC)


@final
class DiagnosisPipeline:
    """Compares a program with its compiled form, and locates the first failure."""

    def __init__(
        self,
        program: TargetFunction,
        compiler: Compiler,
        client: WorkerClient,
        minimizer: Minimizer,
        writer: ReproWriter,
        reporter: ProgressReporter,
    ) -> None:
        self._program = program
        self._compiler = compiler
        self._client = client
        self._minimizer = minimizer
        self._writer = writer
        self._reporter = reporter
        self._notes: list[str] = []
        self._has_graphs = False
        self._is_complete = True  # every graph was checked alone
        self._is_function_checked = False

    def run(self) -> Diagnosis:
        """Capture the graphs, check them and the entire function, and return the diagnosis."""
        self._note_compiled_parts()
        self._reporter.show_task("capturing graphs")
        captured = self._program.capture(dynamic=self._compiler.dynamic)
        if captured.error is not None:
            diagnosis = self._examine_failure(captured.error)
        else:
            self._writer.prepare()
            diagnosis = self._examine(captured.subgraphs)
        return replace(
            diagnosis,
            num_graphs=len(captured.subgraphs),
            num_queries=self._client.num_calls,
            notes=(*self._notes, *diagnosis.notes),
        )

    def _note_compiled_parts(self) -> None:
        """Note torch.compile wrappers in the program: they are inlined, their backends ignored."""
        names = self._program.compiled_parts
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
            self._notes.append(
                f"The program itself applies torch.compile to {shown}. That backend and its "
                f"options were ignored, and {self._compiler.name} was examined instead; pass them "
                "to diagnose to examine them."
            )

    def _examine(self, subgraphs: Sequence[Subgraph]) -> Diagnosis:
        outcomes = []
        for key, loaded in self._load(subgraphs):
            self._reporter.show_task(f"compiling graph {key} of {len(subgraphs)}")
            outcome = self._client.check(OpSubset(key))
            if outcome.is_bad:
                minimized = self._minimize_and_record(
                    self._start_diagnosis(outcome), key, loaded, outcome
                )
                if not self._fails_only_in_worker(minimized, outcome):
                    return (
                        minimized
                        if minimized.repro
                        else self._show_entire_function(minimized, outcome)
                    )
                self._writer.withdraw()
                self._skip_graph(key, outcome.fact)
                continue
            outcomes.append((key, loaded, outcome))
        has_rng_difference = any(outcome.condition is Condition.RNG for _, _, outcome in outcomes)
        diagnosis = self._examine_function(has_rng_difference)
        if (
            diagnosis is None
            and not outcomes
            and self._has_graphs
            and not self._is_function_checked
        ):
            raise CompileError(
                f"nothing of {self._program.name} could be compared. {' '.join(self._notes)}"
            )
        return diagnosis or self._check_values_inside(outcomes)

    def _minimize_and_record(
        self, diagnosis: Diagnosis, key: int, loaded: SubgraphInfo, graph_outcome: CheckResult
    ) -> Diagnosis:
        return self._writer.record(self._minimizer.find(diagnosis, key, loaded, graph_outcome))

    def _fails_only_in_worker(self, diagnosis: Diagnosis, outcome: CheckResult) -> bool:
        """Whether a failure shows in the worker only: neither in a script nor in the entire
        function.
        """
        is_doubtful = (
            diagnosis.repro and not diagnosis.is_verified and not self._writer.is_interrupted
        )
        if not is_doubtful or self._program.packed is None:
            return False
        self._reporter.show_task("compiling the function")
        try:
            function_outcome = self._client.run(check_program, self._program.packed, self._compiler)
        except CompileError:  # it does not run in another process
            return False
        return not function_outcome.is_bad

    def _show_entire_function(self, diagnosis: Diagnosis, outcome: CheckResult) -> Diagnosis:
        """Add a script of the entire function, because the ops cannot be written as source."""
        shown = self._writer.record_entire_function(diagnosis, self._program.call, outcome)
        if not shown.repro:
            return diagnosis
        return add_note(shown, "The script contains the entire function.")

    def _load(self, subgraphs: Sequence[Subgraph]) -> Iterator[tuple[int, SubgraphInfo]]:
        for key, subgraph in enumerate(subgraphs):
            try:
                prepared = strip_distributed(subgraph)
                loaded = self._client.load(key, prepared.subgraph)
            except CompileError as error:
                self._skip_graph(key, str(error))
                continue
            self._notes += prepared.notes
            if loaded.ops:
                self._has_graphs = True
                yield key, loaded

    def _skip_graph(self, key: int, why: str) -> None:
        """Note a graph that is checked as part of the entire function only."""
        self._has_graphs = True
        self._is_complete = False
        self._notes.append(f"Graph {key} could not be compared by itself ({why.rstrip('.')}).")

    def _examine_function(self, has_rng_difference: bool) -> Diagnosis | None:
        """Check the entire function: what dynamo does, and the code between graphs.

        Numbers are not compared if they are known to differ by random numbers.
        """
        packed = self._program.packed
        if packed is None:
            own_error = self._program.find_own_error()
            if own_error is not None:
                return self._report_missing_error(own_error)
            self._notes.append(
                "The function could not be sent to another process, so only its graphs were "
                "compared, not the code between them."
            )
            return None
        self._reporter.show_task("compiling the function")
        try:
            return self._check_function(packed, has_rng_difference)
        except CompileError as error:
            own_error = self._program.find_own_error()
            if own_error is not None:
                raise self._program.make_eager_failure(own_error) from own_error
            self._notes.append(
                f"The function could not be run in another process ({error}), so only its "
                "graphs were compared, not the code between them."
            )
            return None

    def _check_function(
        self, packed: Sequence[bytes], has_rng_difference: bool
    ) -> Diagnosis | None:
        outcome = self._client.run(check_program, packed, self._compiler)
        self._is_function_checked = True
        self._notes += outcome.notes
        if not outcome.is_bad or (has_rng_difference and outcome.condition in _BY_VALUES):
            return None
        diagnosis = replace(
            self._start_diagnosis(outcome),
            stage=self._find_stage(packed, outcome),
            suspects=tuple(map(show_relative_path, outcome.suspects)),
        )
        if not diagnosis.suspects and self._is_complete:
            note = "Each of its graphs alone is correct: no failing op was found."
            diagnosis = add_note(diagnosis, note)
        return self._writer.record_entire_function(diagnosis, self._program.call, outcome)

    def _find_stage(self, packed: Sequence[bytes], outcome: CheckResult) -> Stage | None:
        """The first stage after which the entire function fails, with later stages left out."""
        own_backend = self._compiler.backend
        for backend, stage in _STAGES.items():
            if backend == own_backend:
                return stage
            if (
                own_backend != "inductor"
                and own_backend not in _STAGES
                and stage is not Stage.DYNAMO
            ):
                break  # it is unknown which other stages it has
            compiler = Compiler(backend, dynamic=self._compiler.dynamic)
            try:
                stage_outcome = self._client.run(check_program, packed, compiler, num_calls=0)
            except CompileError:  # it fails as the function itself does
                continue
            if fails_the_same_way(stage_outcome, outcome):
                return stage
        return Stage.BACKEND

    def _check_values_inside(
        self, outcomes: Sequence[tuple[int, SubgraphInfo, CheckResult]]
    ) -> Diagnosis:
        """Look for wrong values inside graphs whose results are correct because later ops hide
        them.
        """
        for key, loaded, outcome in outcomes:
            if outcome.condition is Condition.FINE and len(loaded.ops) > 1:
                self._reporter.show_task(f"examining graph {key}")
                inner = self._check_all_values(key)
                if inner.is_bad:
                    note = "It does not affect the results, which are correct."
                    diagnosis = replace(self._start_diagnosis(inner), notes=(note,))
                    return self._minimize_and_record(diagnosis, key, loaded, inner)
        mild = [outcome for _, _, outcome in outcomes if outcome.condition in _MILD]
        mild.sort(key=lambda outcome: _MILD.index(outcome.condition))
        return self._start_diagnosis(
            mild[0] if mild else CheckResult(Condition.FINE, self._describe_agreement())
        )

    def _describe_agreement(self) -> str:
        if not self._has_graphs:
            return "nothing is compiled: the function produces no graph"
        return "compiled and eager results agree"

    def _check_all_values(self, key: int) -> CheckResult:
        try:
            outcome: CheckResult = self._client.run(check_all_values, key, self._compiler)
        except CompileError as error:
            self._notes.append(f"Not all values of graph {key} could be compared ({error}).")
            return CheckResult(Condition.FINE)
        return outcome

    def _examine_failure(self, error: Exception) -> Diagnosis:
        """Diagnose a failure in dynamo's uncompiled graphs: caused by dynamo or by the function
        itself.
        """
        own_error = self._program.find_own_error()
        if own_error is None:
            return self._report_dynamo_failure(error)
        packed = self._program.packed
        if packed is None:
            raise self._program.make_eager_failure(own_error) from own_error
        # It may still return, or raise something else, when it is compiled by the backend.
        self._reporter.show_task("compiling the function")
        try:
            diagnosis = self._check_function(packed, has_rng_difference=False)
        except CompileError:
            diagnosis = None
        if diagnosis is None:
            raise self._program.make_eager_failure(own_error) from own_error
        return diagnosis

    def _report_missing_error(self, own_error: Exception) -> Diagnosis:
        """Report an error that the function raises, but not the graphs captured of it."""
        outcome = describe_missing_error(own_error, find_failing_line(own_error))
        diagnosis = replace(
            self._start_diagnosis(outcome), stage=Stage.DYNAMO, suspects=outcome.suspects
        )
        return self._writer.record_entire_function(diagnosis, self._program.call, outcome)

    def _report_dynamo_failure(self, error: Exception) -> Diagnosis:
        outcome = dataclasses.replace(describe_error(error, "running"), phase=Phase.FORWARD)
        if outcome.condition is Condition.COMPILE_ERROR:
            outcome = dataclasses.replace(outcome, fact="dynamo cannot trace it")
        diagnosis = replace(
            self._start_diagnosis(outcome), stage=Stage.DYNAMO, suspects=outcome.suspects
        )
        return self._writer.record_entire_function(diagnosis, self._program.call, outcome)

    def _start_diagnosis(self, outcome: CheckResult) -> Diagnosis:
        rank, _ = read_identity()
        return Diagnosis(
            rank=rank,
            target=self._program.name,
            backend=self._compiler.name,
            condition=outcome.condition,
            fact=outcome.fact,
            phase=outcome.phase if outcome.is_bad else None,
            deviation=outcome.deviation,
            error=outcome.error,
        )


_MEANWHILE = {
    Stage.DYNAMO: ", and keep the function out of the compiler with @torch.compiler.disable "
    "until it is fixed.",
    Stage.AOT: "; rewriting the op may avoid it.",
    Stage.DECOMPOSITION: "; rewriting the op, so that it is decomposed differently, may avoid it.",
    Stage.PARTITION: "; under torch.no_grad() nothing is partitioned.",
}
_UNLOCATED = "; backend={} may help until it is fixed."


def make_recording(diagnosis: Diagnosis, *, world_size: int = 1) -> Recording:
    """A recording that contains this diagnosis only."""
    return Recording(
        run=describe_run(diagnosis.rank, world_size, (), instrument="diagnose"),
        diagnoses=(diagnosis,),
        findings=tuple(_find_problems(diagnosis)),
        gaps=find_torch_gaps(diagnosis.rank),
    )


def _find_problems(diagnosis: Diagnosis) -> Iterator[Finding]:
    if not diagnosis.condition.is_bad:
        return
    is_doubtful = diagnosis.condition is Condition.NONDETERMINISTIC
    yield Finding(
        rule=f"compiled-{diagnosis.condition.replace('_', '-')}",
        severity=Severity.WARNING if is_doubtful else Severity.ERROR,
        subject=_name_subject(diagnosis),
        fact=diagnosis.fact,
        remedy=_suggest(diagnosis),
        rank=diagnosis.rank,
        source=diagnosis.suspects[0].source if diagnosis.suspects else None,
    )


def _name_subject(diagnosis: Diagnosis) -> str:
    ops = ", ".join(dict.fromkeys(suspect.op for suspect in diagnosis.suspects[:3]))
    return (
        f"{ops} under {diagnosis.backend}" if ops else f"{diagnosis.target} ({diagnosis.backend})"
    )


def _suggest(diagnosis: Diagnosis) -> str:
    report = "Report it with the repro" if diagnosis.repro else "Report it"
    return report + _suggest_workaround(diagnosis)


def _suggest_workaround(diagnosis: Diagnosis) -> str:
    if diagnosis.stage is None:
        return _name_simpler(diagnosis.backend)
    what = "op" if len(diagnosis.suspects) == 1 else "ops"
    disabled = f", and keep the {what} out of the compiler with @torch.compiler.disable until "
    return _MEANWHILE.get(diagnosis.stage, f"{disabled}{diagnosis.backend} is fixed.")


def _name_simpler(backend: str) -> str:
    """Suggest backends with fewer stages than this one."""
    if backend == "eager":
        return "."
    return _UNLOCATED.format("'eager'" if backend == "aot_eager" else "'aot_eager' or 'eager'")


@final
@dataclass(frozen=True)
class Resources:
    """What a diagnosis works with: folder, workers, backend calls and seconds per call."""

    folder: OutputFolder
    workers: Workers
    fork_server: ForkServer | None
    budget: int
    compile_s: float


def run_diagnosis(target: TargetFunction, compiler: Compiler, resources: Resources) -> Recording:
    """Diagnose a compiler on a function; returns a recording with one diagnosis."""
    _check_can_be_sent(compiler)
    if "inductor" in compiler.name:
        seed_inductor_cache(resources.folder.sandbox)
    _, world_size = read_identity()
    return make_recording(_examine(target, compiler, resources), world_size=world_size)


def _check_can_be_sent(compiler: Compiler) -> None:
    resolve_backend(compiler)
    try:
        pack(compiler)
    except Exception as error:
        raise CompileError(
            f"the backend {compiler.name} cannot be sent to the process in which it is to run "
            f"({type(error).__name__}: {error}). Leave out of it, and of its options, what cannot "
            "be pickled: locks, files, generators."
        ) from error


def _examine(target: TargetFunction, compiler: Compiler, resources: Resources) -> Diagnosis:
    with shown_progress(resources.budget) as reporter:
        client = WorkerClient(
            resources.workers, compiler, Timeouts(resources.compile_s), reporter.show_num_queries
        )
        if "inductor" in compiler.name and not torch.accelerator.is_available():
            client.prepare(probe_vector_instructions, name="vector instructions")
        minimizer = Minimizer(client, compiler, reporter, budget=resources.budget)
        settings = read_settings()
        client.prepare(apply_user_settings, settings, name="settings")
        writer = ReproWriter(
            client,
            compiler,
            resources.folder,
            reporter,
            compile_s=resources.compile_s,
            settings=settings,
            fork_server=resources.fork_server,
            imports=FOR_INDUCTOR if "inductor" in compiler.name else FOR_SCRIPTS,
        )
        try:
            return DiagnosisPipeline(target, compiler, client, minimizer, writer, reporter).run()
        finally:
            writer.close()
