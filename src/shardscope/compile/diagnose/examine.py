"""The examination: each graph in turn, then the whole function, then whoever is to blame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from msgspec.structs import replace

from shardscope.comm.lines import user_source
from shardscope.comm.run import read_identity
from shardscope.compile.diagnose.at_bench import Loaded, Piece, check_exposed, check_program
from shardscope.compile.diagnose.capture import Captured
from shardscope.compile.diagnose.compiler import Compiler
from shardscope.compile.diagnose.culprit import Culprit, add_note
from shardscope.compile.diagnose.fragment import Fragment
from shardscope.compile.diagnose.localizing.plain import make_plain
from shardscope.compile.diagnose.outcome import NUMBERS, Outcome, make_signature
from shardscope.compile.diagnose.progress import Teller
from shardscope.compile.diagnose.queries import Queries
from shardscope.compile.diagnose.scribe import Scribe
from shardscope.compile.diagnose.subject import Subject
from shardscope.errors import CompileError
from shardscope.record import Condition, Diagnosis, Stage, SuspectOp

__all__ = ["Examination"]

_EAGER = Compiler("eager")
# What is not bad is told in this order: the first that was met says most.
_TOLD = (Condition.RNG, Condition.MORE_ACCURATE)
_ERRORS = (Condition.COMPILE_ERROR, Condition.RUNTIME_ERROR)
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

    def run(self) -> Diagnosis:
        """The diagnosis."""
        self._teller.doing("capturing graphs")
        captured = self._program.capture(dynamic=self._compiler.dynamic)
        if captured.error is not None:
            return self._blame_dynamo(captured)
        self._scribe.prepare()
        found = self._examine(captured.fragments)
        return replace(
            found,
            num_graphs=len(captured.fragments),
            num_queries=self._queries.num_calls,
            notes=(*self._notes, *found.notes),
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
                self._notes.append(f"Graph {key} could not be judged alone ({outcome.fact}).")
                continue
            outcomes.append((key, loaded, outcome))
        is_by_chance = any(one.condition is Condition.RNG for _, _, one in outcomes)
        return self._examine_whole(is_by_chance) or self._look_closer(outcomes)

    def _pin_down(self, begun: Diagnosis, key: int, loaded: Loaded, whole: Outcome) -> Diagnosis:
        return self._scribe.record(self._culprit.find(begun, key, loaded, whole))

    def _is_ours_alone(self, told: Diagnosis, outcome: Outcome) -> bool:
        """Whether an error shows at our bench alone: no script has it, nor the whole function."""
        is_doubtful = told.repro and not told.is_verified and not self._scribe.is_interrupted
        if not is_doubtful or outcome.condition not in _ERRORS or self._program.packed is None:
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
            plain = make_plain(fragment)
            self._notes += plain.notes
            loaded = self._queries.load(key, plain.fragment)
            if loaded.ops:
                self._has_graphs = True
                yield key, loaded

    def _examine_whole(self, is_by_chance: bool) -> Diagnosis | None:
        """What only the function as a whole shows: what dynamo does, and all that lies between.

        Numbers are not compared if they are known to differ by what is drawn at random.
        """
        packed = self._program.packed
        if packed is None:
            self._notes.append(
                "The function could not be sent to another process, so only its graphs were "
                "compared, not the code between them."
            )
            return None
        self._teller.doing("compiling the function")
        try:
            return self._judge_whole(packed, is_by_chance)
        except CompileError as error:
            self._notes.append(
                f"The function could not be run in another process ({error}), so only its "
                "graphs were compared, not the code between them."
            )
            return None

    def _judge_whole(self, packed: Sequence[bytes], is_by_chance: bool) -> Diagnosis | None:
        outcome = self._queries.run(check_program, packed, self._compiler)
        if not outcome.is_bad or (is_by_chance and outcome.condition in _BY_VALUES):
            return None
        without = self._queries.run(check_program, packed, _EAGER, num_calls=0)
        stage = Stage.DYNAMO if without.is_same(outcome) else None
        note = "Each of its graphs alone is correct: no op was found to blame."
        begun = replace(self._begin(outcome), stage=stage, notes=(note,))
        return self._scribe.record_whole(begun, self._program.call, outcome)

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

    def _blame_dynamo(self, captured: Captured) -> Diagnosis:
        error = captured.error
        assert error is not None
        text = f"{type(error).__name__}: {error}".strip()
        outcome = Outcome(
            Condition.COMPILE_ERROR,
            "dynamo fails on it",
            error=text,
            signature=make_signature(error),
        )
        source = user_source(str(error))
        suspects = () if source is None else (SuspectOp(op="this line", source=source),)
        begun = replace(
            self._begin(outcome),
            stage=Stage.DYNAMO,
            suspects=suspects,
            num_graphs=len(captured.fragments),
        )
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
