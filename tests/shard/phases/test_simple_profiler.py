"""Torch's SimpleProfiler and ours through the same programs: nothing tells them apart."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import _debug_utils

from shardscope import simulate, trace
from shardscope._torch.logs import SIMPLE_PROFILER_LOG
from shardscope.compat import SimpleProfiler

pytestmark = pytest.mark.usefixtures("host_clock_only")
TORCHS = _debug_utils.SimpleProfiler
Profiler = Any


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    level = dist.get_debug_level()
    yield
    for profiler in (TORCHS, SimpleProfiler):
        profiler.reset()
    dist.set_debug_level(level)


def profile_each_type(profiler: Profiler) -> None:
    for kind in profiler.Type:
        with profiler.profile(kind):
            assert kind in profiler.profiling
    with profiler.profile("own"), profiler.profile("all"):
        pass


def profile_twice_at_once(profiler: Profiler) -> None:
    with profiler.profile(profiler.Type.ALL), profiler.profile(profiler.Type.ALL):
        raise NotImplementedError


def profile_twice_by_text(profiler: Profiler) -> None:
    with profiler.profile("all_gather"), profiler.profile(profiler.Type.ALLGATHER):
        raise NotImplementedError


def fail_inside(profiler: Profiler) -> None:
    with profiler.profile("H2D"):
        raise ValueError("boom")


def profile_again_after_a_failure(profiler: Profiler) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="boom"):
            fail_inside(profiler)


def reset_inside(profiler: Profiler) -> None:
    with profiler.profile("D2H"):
        profiler.reset()


def decorate_a_recursive_function(profiler: Profiler) -> None:
    @profiler.profile("all")
    def descend(left: int) -> None:
        if left:
            descend(left - 1)

    descend(0)
    descend(1)


def make_without_entering(profiler: Profiler) -> None:
    with profiler.profile("all"):
        profiler.profile("all")


def profile_what_is_no_text(profiler: Profiler) -> None:
    with profiler.profile(3), profiler.profile(None):
        pass


def profile_what_has_no_hash(profiler: Profiler) -> None:
    with profiler.profile([]):
        pass


def dump_without_a_process_group(profiler: Profiler) -> None:
    with profiler.profile("all"):
        pass
    profiler.dump_and_reset("step")


def dump(level: dist.DebugLevel, rank: int) -> Callable[[Profiler], None]:
    def program(profiler: Profiler) -> None:
        with simulate({"dp": 2}, rank=rank):
            dist.set_debug_level(level)  # not before: at DETAIL, groups are made with all ranks
            with profiler.profile(profiler.Type.RESHARDING):
                pass
            profiler.dump_and_reset("after 100 % of it")
            dist.set_debug_level(dist.DebugLevel.OFF)
            assert not profiler.results

    return program


LEVELS = (dist.DebugLevel.OFF, dist.DebugLevel.INFO, dist.DebugLevel.DETAIL)
PROGRAMS = {
    function.__name__: function
    for function in (
        profile_each_type,
        profile_twice_at_once,
        profile_twice_by_text,
        fail_inside,
        profile_again_after_a_failure,
        reset_inside,
        decorate_a_recursive_function,
        make_without_entering,
        profile_what_is_no_text,
        profile_what_has_no_hash,
        dump_without_a_process_group,
    )
} | {
    f"dump at {level.name} on rank {rank}": dump(level, rank) for level in LEVELS for rank in (0, 1)
}


def observe(profiler: Profiler, program: Callable[[Profiler], None]) -> dict[str, object]:
    """Everything that can be seen of a run, but for how long things took."""
    lines: list[tuple[object, ...]] = []
    handler = logging.Handler()
    handler.emit = lambda line: lines.append(  # type: ignore[method-assign]
        (
            line.name,
            line.levelno,
            line.msg,
            line.args[0],
            list(line.args[1]),
            line.args[1].__class__,
        )
    )
    logger = logging.getLogger("torch.distributed.fsdp")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    error = ""
    try:
        program(profiler)
    except Exception as raised:  # noqa: BLE001 - whatever it is, both should raise it
        error = repr(raised)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return {
        "error": error,
        "keys": [(key, type(key).__name__) for key in profiler.results],
        "positive": all(seconds >= 0 for seconds in profiler.results.values()),
        "profiling": set(profiler.profiling),
        "log": lines,
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_ours_does_what_torchs_does(name: str) -> None:
    program = PROGRAMS[name]
    torchs, ours = observe(TORCHS, program), observe(SimpleProfiler, program)
    assert ours == torchs


def test_the_programs_see_errors_and_log_lines() -> None:
    seen = {name: observe(SimpleProfiler, program) for name, program in PROGRAMS.items()}
    assert "Type.ALL is already being profiled. " in str(seen["profile_twice_at_once"]["error"])
    assert "has not been initialized" in str(seen["dump_without_a_process_group"]["error"])
    (line,) = seen["dump at INFO on rank 0"]["log"]  # type: ignore[misc]
    assert line[1:4] == (logging.INFO, "%s %s", "after 100 % of it")
    assert sum(bool(entry["log"]) for entry in seen.values()) == 1
    assert not any(entry["error"] for name, entry in seen.items() if name.startswith("dump at"))


def test_names_types_and_signatures_are_torchs() -> None:
    assert {name for name in vars(TORCHS) if not name.startswith("__")} == {
        name for name in vars(SimpleProfiler) if not name.startswith("__")
    }
    for name in ("reset", "profile", "dump_and_reset"):
        ours, torchs = (getattr(profiler, name) for profiler in (SimpleProfiler, TORCHS))
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(torchs).parameters
        )
    assert [(kind.name, kind.value, str(kind)) for kind in SimpleProfiler.Type] == [
        (kind.name, kind.value, str(kind)) for kind in TORCHS.Type
    ]
    assert SimpleProfiler.Type.__mro__[1:] == (str, *Enum.__mro__[:-1], object)
    assert SimpleProfiler.results["never"] == TORCHS.results["never"] == 0.0


def test_results_are_the_classs_also_of_a_subclass() -> None:
    class Own(SimpleProfiler):
        pass

    with Own.profile("x"):
        pass
    assert list(SimpleProfiler.results) == ["x"]


def test_inside_a_trace_what_is_profiled_is_in_the_recording() -> None:
    with trace() as t:
        profile_each_type(SimpleProfiler)
    assert [span.name for span in t.recording.spans][:6] == [kind.value for kind in TORCHS.Type]
    assert [(span.name, span.depth) for span in t.recording.spans][6:] == [("all", 1), ("own", 0)]


def test_lines_go_to_torchs_own_log() -> None:
    assert _debug_utils.logger.name == SIMPLE_PROFILER_LOG, (
        "torch moved the log of its SimpleProfiler; _torch/logs.py needs its name to write to it."
    )
