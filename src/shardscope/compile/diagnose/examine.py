"""The examination: each graph in turn, then the whole function, then whoever is to blame."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import final

from msgspec.structs import replace

from shardscope.comm.run import read_identity
from shardscope.compile.diagnose.at_bench import Loaded, Piece, check_exposed, check_program
from shardscope.compile.diagnose.blaming.switching import fails_alike
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.culprit import Culprit, add_note, as_seen_from_here
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.judging.judge import describe_error
from shardscope.compile.diagnose.judging.program import describe_missing
from shardscope.compile.diagnose.localizing.plain import make_plain
from shardscope.compile.diagnose.outcome import NUMBERS, Outcome
from shardscope.compile.diagnose.progress import Teller
from shardscope.compile.diagnose.queries import Queries
from shardscope.compile.diagnose.scribe import Scribe
from shardscope.compile.diagnose.subject import Subject
from shardscope.compile.diagnose.suspects import find_failing_line
from shardscope.errors import CompileError
from shardscope.record import Condition, Diagnosis, Phase, Stage

__all__ = ["Examination"]

# Backends of torch's that stop after a stage of Inductor's, in order.
_STAGES = {
    "eager": Stage.DYNAMO,
    "aot_eager": Stage.AOT,
    "aot_eager_decomp_partition": Stage.DECOMPOSITION,
}
# What is not bad is told in this order: the first that was met says most.
_TOLD = (Condition.RNG, Condition.MORE_ACCURATE)
_BY_VALUES = (*NUMBERS, Condition.NONDETERMINISTIC)


@final
class Examination:
    """Finds out what a compiler makes of a program."""

    def __init__(
        self,
        program: Subject,
        compiler: Compiler,
        queries: Queries,
        culprit: Culprit,
        scribe: Scribe,
        teller: Teller,
    ) -> None:
        self._program = program
        self._compiler = compiler
        self._queries = queries
        self._culprit = culprit
        self._scribe = scribe
        self._teller = teller
        self._notes: list[str] = []
        self._has_graphs = False
        self._is_complete = True  # every graph was judged alone
        self._is_whole_judged = False

    def run(self) -> Diagnosis:
        """The diagnosis."""
        self._note_compiled_parts()
        self._teller.doing("capturing graphs")
        captured = self._program.capture(dynamic=self._compiler.dynamic)
        if captured.error is not None:
            found = self._examine_failure(captured.error)
        else:
            self._scribe.prepare()
            found = self._examine(captured.fragments)
        return replace(
            found,
            num_graphs=len(captured.fragments),
            num_queries=self._queries.num_calls,
            notes=(*self._notes, *found.notes),
        )

    def _note_compiled_parts(self) -> None:
        """The program's own torch.compile wrappers are inlined: their backends are not examined."""
        names = self._program.compiled_parts
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
            self._notes.append(
                f"The program itself applies torch.compile to {shown}. That backend and its "
                f"options were ignored, and {self._compiler.name} was examined instead; pass them "
                "to diagnose to examine them."
            )

    def _examine(self, fragments: Sequence[Fragment]) -> Diagnosis:
        outcomes = []
        for key, loaded in self._load(fragments):
            self._teller.doing(f"compiling graph {key} of {len(fragments)}")
            outcome = self._queries.ask(Piece(key))
            if outcome.is_bad:
                told = self._pin_down(self._begin(outcome), key, loaded, outcome)
                if not self._is_ours_alone(told, outcome):
                    return told if told.repro else self._show_whole(told, outcome)
                self._scribe.withdraw()
                self._leave_out(key, outcome.fact)
                continue
            outcomes.append((key, loaded, outcome))
        is_by_chance = any(one.condition is Condition.RNG for _, _, one in outcomes)
        found = self._examine_whole(is_by_chance)
        if found is None and not outcomes and self._has_graphs and not self._is_whole_judged:
            raise CompileError(
                f"nothing of {self._program.name} could be compared. {' '.join(self._notes)}"
            )
        return found or self._look_closer(outcomes)

    def _pin_down(self, begun: Diagnosis, key: int, loaded: Loaded, whole: Outcome) -> Diagnosis:
        return self._scribe.record(self._culprit.find(begun, key, loaded, whole))

    def _is_ours_alone(self, told: Diagnosis, outcome: Outcome) -> bool:
        """Whether a failure shows at our bench alone: no script has it, nor the whole function."""
        is_doubtful = told.repro and not told.is_verified and not self._scribe.is_interrupted
        if not is_doubtful or self._program.packed is None:
            return False
        self._teller.doing("compiling the function")
        try:
            found = self._queries.run(check_program, self._program.packed, self._compiler)
        except CompileError:  # it does not run in another process
            return False
        return not found.is_bad

    def _show_whole(self, told: Diagnosis, outcome: Outcome) -> Diagnosis:
        """With a script of the whole function, because its ops cannot be written down."""
        shown = self._scribe.record_whole(told, self._program.call, outcome)
        if not shown.repro:
            return told
        return add_note(shown, "The script contains the whole function.")

    def _load(self, fragments: Sequence[Fragment]) -> Iterator[tuple[int, Loaded]]:
        for key, fragment in enumerate(fragments):
            try:
                plain = make_plain(fragment)
                loaded = self._queries.load(key, plain.fragment)
            except CompileError as error:
                self._leave_out(key, str(error))
                continue
            self._notes += plain.notes
            if loaded.ops:
                self._has_graphs = True
                yield key, loaded

    def _leave_out(self, key: int, why: str) -> None:
        """A graph that is seen as part of the whole function alone."""
        self._has_graphs = True
        self._is_complete = False
        self._notes.append(f"Graph {key} could not be judged alone ({why.rstrip('.')}).")

    def _examine_whole(self, is_by_chance: bool) -> Diagnosis | None:
        """What only the function as a whole shows: what dynamo does, and all that lies between.

        Numbers are not compared if they are known to differ by what is drawn at random.
        """
        packed = self._program.packed
        if packed is None:
            own = self._program.find_own_error()
            if own is not None:
                return self._report_missing(own)
            self._notes.append(
                "The function could not be sent to another process, so only its graphs were "
                "compared, not the code between them."
            )
            return None
        self._teller.doing("compiling the function")
        try:
            return self._judge_whole(packed, is_by_chance)
        except CompileError as error:
            own = self._program.find_own_error()
            if own is not None:
                raise self._program.fails_itself(own) from own
            self._notes.append(
                f"The function could not be run in another process ({error}), so only its "
                "graphs were compared, not the code between them."
            )
            return None

    def _judge_whole(self, packed: Sequence[bytes], is_by_chance: bool) -> Diagnosis | None:
        outcome = self._queries.run(check_program, packed, self._compiler)
        self._is_whole_judged = True
        self._notes += outcome.notes
        if not outcome.is_bad or (is_by_chance and outcome.condition in _BY_VALUES):
            return None
        begun = replace(
            self._begin(outcome),
            stage=self._find_stage(packed, outcome),
            suspects=tuple(map(as_seen_from_here, outcome.suspects)),
        )
        if not begun.suspects and self._is_complete:
            note = "Each of its graphs alone is correct: no op was found to blame."
            begun = add_note(begun, note)
        return self._scribe.record_whole(begun, self._program.call, outcome)

    def _find_stage(self, packed: Sequence[bytes], outcome: Outcome) -> Stage | None:
        """The first stage with which the whole function fails, later ones left out."""
        own = self._compiler.backend
        for backend, stage in _STAGES.items():
            if backend == own:
                return stage
            if own != "inductor" and own not in _STAGES and stage is not Stage.DYNAMO:
                break  # nobody knows what else it does
            compiler = Compiler(backend, dynamic=self._compiler.dynamic)
            try:
                found = self._queries.run(check_program, packed, compiler, num_calls=0)
            except CompileError:  # it fails as the function itself does
                continue
            if fails_alike(found, outcome):
                return stage
        return Stage.BACKEND

    def _look_closer(self, outcomes: Sequence[tuple[int, Loaded, Outcome]]) -> Diagnosis:
        """Faults that do not reach the results, because what follows makes them small."""
        for key, loaded, outcome in outcomes:
            if outcome.condition is Condition.FINE and len(loaded.ops) > 1:
                self._teller.doing(f"looking into graph {key}")
                inner = self._expose(key)
                if inner.is_bad:
                    note = "It does not affect the results, which are correct."
                    begun = replace(self._begin(inner), notes=(note,))
                    return self._pin_down(begun, key, loaded, inner)
        mild = [one for _, _, one in outcomes if one.condition in _TOLD]
        mild.sort(key=lambda one: _TOLD.index(one.condition))
        return self._begin(mild[0] if mild else Outcome(Condition.FINE, self._say_fine()))

    def _say_fine(self) -> str:
        if not self._has_graphs:
            return "nothing is compiled: the function produces no graph"
        return "compiled and eager results agree"

    def _expose(self, key: int) -> Outcome:
        try:
            outcome: Outcome = self._queries.run(check_exposed, key, self._compiler)
        except CompileError as error:
            self._notes.append(f"Not all values of graph {key} could be compared ({error}).")
            return Outcome(Condition.FINE)
        return outcome

    def _examine_failure(self, error: Exception) -> Diagnosis:
        """What fails when dynamo's graphs are run as they are: dynamo, or the function itself."""
        own = self._program.find_own_error()
        if own is None:
            return self._blame_dynamo(error)
        packed = self._program.packed
        if packed is None:
            raise self._program.fails_itself(own) from own
        # It may still return, or raise something else, when it is compiled by the backend.
        self._teller.doing("compiling the function")
        try:
            found = self._judge_whole(packed, is_by_chance=False)
        except CompileError:
            found = None
        if found is None:
            raise self._program.fails_itself(own) from own
        return found

    def _report_missing(self, own: Exception) -> Diagnosis:
        """An error that the function raises, and not with the graphs that dynamo made of it."""
        outcome = describe_missing(own, find_failing_line(own))
        begun = replace(self._begin(outcome), stage=Stage.DYNAMO, suspects=outcome.suspects)
        return self._scribe.record_whole(begun, self._program.call, outcome)

    def _blame_dynamo(self, error: Exception) -> Diagnosis:
        outcome = dataclasses.replace(describe_error(error, "running"), phase=Phase.FORWARD)
        if outcome.condition is Condition.COMPILE_ERROR:
            outcome = dataclasses.replace(outcome, fact="dynamo cannot trace it")
        begun = replace(self._begin(outcome), stage=Stage.DYNAMO, suspects=outcome.suspects)
        return self._scribe.record_whole(begun, self._program.call, outcome)

    def _begin(self, outcome: Outcome) -> Diagnosis:
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
