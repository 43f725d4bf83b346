"""Phases: however they are entered, each span is timed once and ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch._dynamo.testing import CompileCounter

from older_torch import TORCH
from shardscope import phases, simulate
from shardscope.attribution.spans import SUBSCRIPTIONS
from shardscope.compat import SimpleProfiler
from shardscope.errors import PhaseError
from shardscope.record import PhaseTotal, Span, sum_spans
from shardscope.shard.phases.timing import TOP, PhaseTimes

pytestmark = pytest.mark.usefixtures("host_clock_only")
GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "phases.md"


def shape(times: PhaseTimes) -> list[tuple[str, int, bool]]:
    """Spans in the order in which they ended: name, depth, whether within the same name."""
    return [(span.name, span.depth, span.is_inner) for span in times.spans]


def counts(times: PhaseTimes) -> dict[str, int]:
    return {total.name: total.count for total in times.totals}


def test_a_context_and_a_decorator_time_the_same_phase() -> None:
    @phases("load")
    def load(x: int) -> int:
        """Doc."""
        return x + 1

    with phases.record() as times:
        with phases("load"):
            pass
        assert load(1) == 2
    assert counts(times) == {"load": 2}
    assert (load.__name__, load.__doc__) == ("load", "Doc.")


def test_torchs_phases_have_names_of_their_own() -> None:
    with phases.record() as times:
        for phase in (
            phases.all,
            phases.all_gather,
            phases.all_gather_object,
            phases.resharding,
            phases.H2D,
            phases.D2H,
        ):
            with phase:
                pass
        with phases("all_gather"), phases(SimpleProfiler.Type.H2D):
            pass
    assert list(counts(times)) == [str(kind.value) for kind in SimpleProfiler.Type]
    assert times["all_gather"].count == times["H2D"].count == 2


def test_nested_phases_record_their_depth() -> None:
    with phases.record() as times:
        with phases("a"), phases("b"), phases("a"):
            pass
        with phases("c"):
            pass
    assert shape(times) == [("a", 2, True), ("b", 1, False), ("a", 0, False), ("c", 0, False)]


def test_time_of_a_phase_within_itself_is_counted_once() -> None:
    @phases("f")
    def descend(left: int) -> None:
        if left:
            descend(left - 1)

    with phases.record() as times, phases("around"):
        descend(5)
    spans = times.spans
    outer = next(span for span in spans if span.name == "f" and not span.is_inner)
    total = times["f"]
    assert (total.count, total.num_inner) == (6, 5)
    assert total.total_ns == total.mean_ns == total.max_ns == outer.duration_ns
    assert total.self_ns == outer.duration_ns  # all of it is some call's own
    assert sum(total.self_ns for total in times.totals) == times["around"].total_ns


def test_one_phase_object_may_be_entered_within_itself_and_on_many_threads() -> None:
    phase = phases("shared")
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        for _ in range(50):
            with phase, phase:
                pass

    with phases.record() as times:
        threads = [threading.Thread(target=work, name=f"worker {n}") for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    total = times["shared"]
    assert (total.count, total.num_inner) == (400, 200)
    assert {(span.thread, span.depth) for span in times.spans} == {
        (f"worker {n}", depth) for n in range(4) for depth in (0, 1)
    }


def test_phases_of_other_threads_are_not_within_ours() -> None:
    with phases.record() as times, phases("outer"):
        thread = threading.Thread(target=phases("outer")(lambda: None))
        thread.start()
        thread.join()
    assert shape(times) == [("outer", 0, False), ("outer", 0, False)]


def test_an_exception_ends_the_spans_it_passes() -> None:
    with phases.record() as times:
        with pytest.raises(ZeroDivisionError), phases("a"), phases("b"):
            raise ZeroDivisionError
        with phases("c"):
            pass
    assert shape(times) == [("b", 1, False), ("a", 0, False), ("c", 0, False)]


def test_a_coroutine_is_timed_until_it_has_ended_and_tasks_do_not_end_each_others() -> None:
    order: list[str] = []

    @phases("task")
    async def run(name: str, first: asyncio.Event, then: asyncio.Event) -> str:
        with phases(name):
            first.set()
            await then.wait()
            order.append(name)
            return name

    async def main() -> list[str]:
        a, b = asyncio.Event(), asyncio.Event()
        with phases("all"):
            return await asyncio.gather(run("one", a, b), run("two", b, a))

    with phases.record() as times:
        assert asyncio.run(main()) == ["one", "two"]
    assert counts(times) == {"one": 1, "two": 1, "task": 2, "all": 1}
    depths = {name: depth for name, depth, _ in shape(times)}
    assert depths == {"one": 2, "two": 2, "task": 1, "all": 0}
    assert not any(is_inner for _, _, is_inner in shape(times))
    assert times["all"].self_ns >= 0


def test_spans_of_a_generator_may_end_before_those_begun_after_them() -> None:
    def produce() -> Iterator[int]:
        with phases("produce"):
            yield 1

    with phases.record() as times:
        numbers = produce()
        next(numbers)
        with phases("consume"):
            assert list(numbers) == []
            with phases("inside"):
                pass
        with phases("after"):
            pass
    # What had ended by then is not around it.
    assert {name: depth for name, depth, _ in shape(times)} == {
        "produce": 0,
        "inside": 1,
        "consume": 0,
        "after": 0,
    }


def test_a_span_that_never_ends_encloses_no_other() -> None:
    with phases.record() as times:
        phases("lost").__enter__()
        with phases("outer"):
            phases("lost").__enter__()
            with phases("inner"):
                pass
        with phases("after"):
            pass
    assert shape(times) == [("inner", 1, False), ("outer", 0, False), ("after", 0, False)]


def test_nothing_is_kept_without_a_recorder() -> None:
    with phases("a"):
        assert TOP.get() is None
    assert SUBSCRIPTIONS == []


def test_only_what_begins_and_ends_inside_is_recorded() -> None:
    early, late = phases("early"), phases("late")
    early.__enter__()
    with phases.record() as times:
        early.__exit__(None, None, None)
        late.__enter__()
        with phases("inside"):
            pass
    late.__exit__(None, None, None)
    assert shape(times) == [("inside", 1, False)]
    assert TOP.get() is None


def test_the_end_of_an_unrecorded_phase_does_not_end_a_recorded_one() -> None:
    phase, first, second = phases("p"), phases.record(), phases.record()
    with second:
        first.__enter__()
        with phase:
            first.__exit__(None, None, None)
            with phase:
                pass
    assert counts(first) == {}
    assert shape(second) == [("p", 1, True), ("p", 0, False)]


def test_a_recorder_started_inside_a_phase_counts_from_there() -> None:
    with phases.record() as outer, phases("a"), phases.record() as inner, phases("a"):
        pass
    assert shape(inner) == [("a", 0, False)]
    assert inner["a"].total_ns > 0
    assert shape(outer) == [("a", 1, True), ("a", 0, False)]


def test_recording_goes_on_when_entered_again_and_starts_anew_after_reset() -> None:
    times = phases.record()
    for _ in range(2):
        with times, times, phases("a"):
            pass
    assert counts(times) == {"a": 2}
    times.reset()
    assert (times.totals, times.spans, times.num_dropped) == ((), (), 0)
    assert times["a"] == PhaseTotal(name="a")


def test_a_long_run_keeps_the_last_spans_and_all_totals() -> None:
    with phases.record(keep=3) as times:
        for number in range(10):
            with phases("a" if number < 9 else "last"):
                pass
    assert counts(times) == {"a": 9, "last": 1}
    assert [span.name for span in times.spans] == ["a", "a", "last"]
    assert times.num_dropped == 7
    assert times.spans[0].start_ns == 0


def test_phases_beyond_the_limit_of_names_share_a_total() -> None:
    with phases.record(keep=0) as times:
        for number in range(1500):
            with phases(f"step {number}"):
                pass
    assert len(times.totals) == 1001
    assert times["(other phases)"].count == 500
    assert times.num_dropped == 1500


def test_spans_add_up_to_the_totals() -> None:
    with phases.record() as times:
        for _ in range(3):
            with phases("a"), phases("b"), phases("a"):
                pass
    assert sum_spans(times.spans) == times.totals


def test_rank_is_that_of_the_process_group_even_if_it_is_made_later() -> None:
    with phases.record() as times:
        with phases("before"):
            pass
        assert times.rank == 0
        with simulate({"dp": 4}, rank=3), phases("in it"):
            pass
    assert {span.rank for span in times.spans} == {total.rank for total in times.totals} == {3}
    with simulate({"dp": 4}, rank=2), phases.record() as times, phases("a"):
        pass
    assert times["a"].rank == 2


def test_times_of_a_simulation_are_not_printed_as_those_of_a_run() -> None:
    with simulate({"dp": 4}, rank=2), phases.record() as times, phases("a"):
        pass
    assert str(times).splitlines()[0] == "rank 2, time of the simulation, not of a run"


def test_printed_it_is_a_table_with_the_longest_first() -> None:
    with phases.record() as times, phases("outer"), phases("[red]inner[/red]"):
        pass
    lines = str(times).splitlines()
    assert lines[0] == "rank 0"
    assert lines[1] == ("phase             clock  calls  total ms  self ms  mean ms  max ms")
    assert [line.split()[:3] for line in lines[2:]] == [
        ["outer", "cpu", "1"],
        ["[red]inner[/red]", "cpu", "1"],
    ]


def test_recordings_die_when_they_are_dropped() -> None:
    with phases.record() as times, phases("a"):
        pass
    reference = weakref.ref(times)
    del times
    gc.collect()
    assert reference() is None


def test_compiled_code_stays_one_graph_and_is_not_compiled_again() -> None:
    @phases("inner")
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def step(x: torch.Tensor) -> torch.Tensor:
        with phases("a"), phases.all_gather:
            return inner(x * 2)

    counter = CompileCounter()
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    x = torch.ones(3)
    assert torch.equal(compiled(x), step(x))
    with phases.record() as times:
        assert torch.equal(compiled(x), step(x))
        with phases("around"):
            compiled(x)
    assert counter.frame_count == 1
    assert counts(times) == {"inner": 1, "all_gather": 1, "a": 1, "around": 1}  # of the eager one


def test_a_phase_made_elsewhere_is_compiled_as_a_decorator_and_since_torch_2_14_as_a_context() -> (
    None
):
    kept = phases("kept")

    def enter(x: torch.Tensor) -> torch.Tensor:
        with kept:
            return x * 2

    num_compiled = 1 if TORCH >= (2, 14) else 0
    counter = CompileCounter()
    assert torch.equal(torch.compile(enter, backend=counter)(torch.ones(3)), torch.full((3,), 2.0))
    assert counter.frame_count == num_compiled
    called = torch.compile(kept(lambda x: x * 2), backend=counter, fullgraph=True)
    assert torch.equal(called(torch.ones(3)), torch.full((3,), 2.0))
    assert counter.frame_count == num_compiled + 1
    for text in (type(kept).__doc__, GUIDE.read_text()):
        assert text is not None
        assert "before torch 2.14" in text
        assert "`with LOAD:`" in text


def generate() -> Iterator[int]:
    yield 1


async def generate_slowly() -> object:
    yield 1


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (generate, "cannot time generate, a generator.*inside it, around lines without a yield"),
        (generate_slowly, "cannot time generate_slowly, a generator"),
        (
            contextmanager(generate),
            r"is applied above @contextmanager to generate: .*`with phases\('x'\):` around its use",
        ),
        (
            asynccontextmanager(generate_slowly),
            "is applied above @contextmanager to generate_slowly",
        ),
        (staticmethod(len), "is applied above @staticmethod.*Put it below"),
        (classmethod(len), "is applied above @classmethod"),
        (torch.nn.Linear(1, 1), "times functions, and Linear is not one.*around the code"),
        (int, "times functions, and int is not one"),
    ],
)
def test_what_cannot_be_timed_by_its_calls_is_refused(function: object, sentence: str) -> None:
    with pytest.raises(PhaseError, match=sentence):
        phases("x")(function)  # type: ignore[arg-type]


def test_a_function_that_hands_back_a_coroutine_is_refused_when_it_does() -> None:
    async def fetch() -> int:
        return 1

    @phases("x")
    def start(is_wanted: bool) -> object:
        return fetch() if is_wanted else None

    assert start(False) is None
    with pytest.raises(PhaseError, match=r"returns the coroutine .*fetch.*around the await"):
        start(True)
    waits = phases("x")(lambda: asyncio.run(fetch()))
    with phases.record() as times:
        assert waits() == 1
    assert counts(times) == {"x": 1}


def test_invalid_names_and_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PhaseError, match=r"Write @phases\('load'\)"):

        @phases  # type: ignore[arg-type]
        def load() -> None: ...

    with pytest.raises(PhaseError, match="name is text, not 3"):
        phases(3)  # type: ignore[arg-type]
    with pytest.raises(PhaseError, match="not on 'tpu'"):
        phases("x", device="tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PhaseError, match="no CUDA device here"):
        phases("x", device="cuda")


@pytest.mark.parametrize("keep", [-1, None, "x", 1.5])
def test_an_invalid_number_to_keep_is_refused(keep: object) -> None:
    with pytest.raises(PhaseError, match=f"0 or more; got {keep!r}. Write phases.record"):
        phases.record(keep=keep)  # type: ignore[arg-type]


def test_keeping_more_than_fits_is_keeping_all() -> None:
    with phases.record(keep=10**30) as times, phases("a"):
        pass
    assert (len(times.spans), times.num_dropped) == (1, 0)


def test_names_are_printed_without_anything_that_a_terminal_obeys() -> None:
    with phases.record() as times, phases("\x1b[31mred\x1b]0;title\x07\nline"):
        pass
    console = Console(file=StringIO(), force_terminal=True, width=120)
    with console.capture() as capture:
        console.print(times)
    for text in (str(times), capture.get()):
        assert r"\x1b[31mred\x1b]0;title\x07\nline" in text
        assert "\x1b[31m" not in text
        assert "\x07" not in text


def test_a_phase_may_be_timed_on_the_host_alone() -> None:
    with phases.record() as times, phases("x", device=torch.device("cpu")):
        pass
    (span,) = times.spans
    assert isinstance(span, Span)
    assert span.device == "cpu"


def test_the_representation_of_a_long_name_fits_a_terminal() -> None:
    assert repr(phases("load")) == "phases('load')"
    assert len(repr(phases("x" * 10_000))) < 150
