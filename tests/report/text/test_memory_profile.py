"""A profile of memory as people read it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sample_recordings import make_recording
from shardscope.record import MemoryKind, MemoryProfile, MemorySample, MemoryUse, Phase, Recording
from shardscope.report.text.summary import render_text

GIB = 1 << 30


def sample(order: int, phase: Phase, activations: int) -> MemorySample:
    bytes_by_kind = {MemoryKind.PARAMETERS: 2 * GIB, MemoryKind.ACTIVATIONS: activations}
    return MemorySample(
        order=order,
        phase=phase,
        module=None,
        num_bytes=tuple(bytes_by_kind.get(kind, 0) for kind in MemoryKind),
    )


def use(kind: MemoryKind, module: str | None, num_bytes: int) -> MemoryUse:
    return MemoryUse(kind=kind, module=module, num_bytes=num_bytes)


LAYERS = tuple(use(MemoryKind.ACTIVATIONS, f"layers.{i}.up", GIB // 2) for i in range(8))
PROFILE = MemoryProfile(
    rank=0,
    peak_bytes=6 * GIB,
    peak_order=50,
    peak_phase=Phase.BACKWARD,
    peak_module="layers.7.up",
    at_peak=(*LAYERS, use(MemoryKind.PARAMETERS, "layers.0.up", 2 * GIB)),
    samples=(
        sample(0, Phase.OUTSIDE, 0),
        sample(20, Phase.FORWARD, 2 * GIB),
        sample(50, Phase.BACKWARD, 4 * GIB),
        sample(99, Phase.OPTIMIZER, 0),
    ),
    first_peak_bytes=5 * GIB,
    reserved_bytes=7 * GIB,
    needed_bytes=7 * GIB,
    device_bytes=8 * GIB,
)


def recorded(*profiles: MemoryProfile) -> Recording:
    return replace(make_recording(), collectives=(), groups=(), memory=profiles)


def test_peak_first_step_and_reserved_are_named() -> None:
    text = render_text(recorded(PROFILE))
    assert "6.00 GiB at the peak, in backward of layers.7.up" in text
    assert "first step: 5.00 GiB · reserved by the allocator: 7.00 GiB" in text
    assert "No collectives were recorded" not in text


@pytest.mark.parametrize(
    ("device", "verdict"),
    [
        (8, "fits in 8.00 GiB, 1.00 GiB free"),
        (7, "fits in 7.00 GiB, 0 B free"),
        (4, "does not fit in 4.00 GiB, 3.00 GiB too much"),
    ],
)
def test_the_verdict_says_by_how_much(device: int, verdict: str) -> None:
    profile = replace(PROFILE, device_bytes=device * GIB)
    assert verdict in render_text(recorded(profile), width=120)


def test_without_a_device_there_is_no_verdict() -> None:
    text = render_text(recorded(replace(PROFILE, device_bytes=None)))
    assert "whether that fits is not known" in " ".join(text.split())
    assert "fits in" not in text
    assert "does not fit" not in text


def test_kinds_have_bytes_and_shares() -> None:
    lines = render_text(recorded(PROFILE)).splitlines()
    (line,) = [line for line in lines if line.startswith("activations ")]
    assert line.split()[:4] == ["activations", "4.00", "GiB", "67%"]


def test_repeated_layers_are_folded_unless_disabled() -> None:
    folded = render_text(recorded(PROFILE), width=100)
    assert "layers.*.up ×8" in folded
    assert "layers.3.up" not in folded
    complete = render_text(recorded(PROFILE), width=100, is_folded=False)
    assert all(f"layers.{i}.up" in complete for i in range(8))


def test_the_memory_chart_marks_the_peak_and_the_phases() -> None:
    lines = render_text(recorded(PROFILE)).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Memory over the step"))
    bars, phases, mark = lines[start + 1 : start + 4]
    assert mark.strip() == "▲ 6.00 GiB"
    peak = mark.index("▲")
    assert bars[peak] == "█" == max(bars)
    assert phases[peak] == "b"
    assert "f" in phases[:peak]
    assert phases.endswith("o")


def test_of_several_ranks_the_one_that_needs_most_is_shown() -> None:
    second_rank = replace(PROFILE, rank=3, peak_bytes=9 * GIB)
    text = render_text(recorded(PROFILE, second_rank), width=100)
    assert "rank 3, the most of 2 ranks (least: 6.00 GiB)" in text


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_any_width_and_hostile_names_are_fine(width: int) -> None:
    hostile = replace(PROFILE, peak_module="\x1b[31m" + "x" * 500, at_peak=(LAYERS[0],))
    text = render_text(recorded(hostile), width=width)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= max(width, 80)


def test_an_empty_profile_is_fine() -> None:
    empty = MemoryProfile(rank=0, peak_bytes=0, peak_order=0, peak_phase=Phase.OUTSIDE)
    assert "0 B at the peak, in outside" in render_text(recorded(empty))


@pytest.mark.parametrize("width", [24, 40, 70, 120])
@pytest.mark.parametrize("peak", [20, 50, 99])
def test_the_memory_chart_fits_the_terminal(width: int, peak: int) -> None:
    text = render_text(recorded(replace(PROFILE, peak_order=peak)), width=width)
    lines = text.splitlines()
    (mark,) = (line for line in lines if "▲" in line)
    assert "6.00 GiB" in mark
    assert len(mark) <= width
    bars, phases = lines[lines.index(mark) - 2 : lines.index(mark)]
    assert len(phases.rstrip()) <= min(width, 64)
    assert phases.rstrip().endswith("o")
    assert mark.index("▲") < len(bars)


def test_kinds_for_which_there_is_no_room_are_named() -> None:
    uses = tuple(use(kind, "layers.0.up", GIB) for kind in MemoryKind)
    narrow = render_text(recorded(replace(PROFILE, at_peak=uses)), width=60)
    assert "hidden at 60 columns: " in narrow
    assert "(widen the terminal or set COLUMNS)" in " ".join(narrow.split())
    wide = render_text(recorded(replace(PROFILE, at_peak=uses)), width=200)
    assert "hidden at" not in wide
