"""Curves of memory: few enough moments, and never without the peak."""

from __future__ import annotations

import random
from typing import Any

from msgspec.structs import replace

from sample_recordings import make_recording
from shardscope.record import (
    MemoryKind,
    MemoryProfile,
    MemorySample,
    MemoryUse,
    Module,
    Phase,
    RankSpan,
    Recording,
)
from shardscope.report.html.html import build_page
from shardscope.report.html.memory_rows import thin_samples
from shardscope.report.html.page_views import MemoryCurve
from shardscope.report.model.memory_peaks import find_worst

KINDS = list(MemoryKind)


def sample(order: int, phase: Phase = Phase.FORWARD, **sizes: int) -> MemorySample:
    num_bytes = tuple(sizes.get(kind, 0) for kind in KINDS)
    return MemorySample(order=order, phase=phase, module=None, num_bytes=num_bytes)


def profile(*samples: MemorySample, **changes: Any) -> MemoryProfile:
    top = max(samples, key=lambda sample: sum(sample.num_bytes))
    facts: dict[str, Any] = {
        "rank": 0,
        "peak_bytes": sum(top.num_bytes),
        "peak_order": top.order,
        "peak_phase": top.phase,
        "samples": samples,
    }
    return MemoryProfile(**(facts | changes))


def read(*profiles: MemoryProfile) -> tuple[MemoryCurve, ...]:
    return build_page(make_recording(memory=profiles, ranks=(0, 1, 2))).memory


def test_a_short_curve_is_kept_as_it_is() -> None:
    use = MemoryUse(kind=MemoryKind.GRADIENTS, module=None, num_bytes=7)
    more = MemoryUse(kind=MemoryKind.PARAMETERS, module=None, num_bytes=9)
    (curve,) = read(
        profile(
            sample(0, Phase.OUTSIDE, parameters=4),
            sample(5, Phase.FORWARD, parameters=4, activations=3),
            sample(9, Phase.FORWARD, parameters=4, activations=5),
            sample(12, Phase.BACKWARD, parameters=4, activations=1),
            at_peak=(use, more),
            device_bytes=100,
            needed_bytes=20,
            first_peak_bytes=11,
        )
    )
    assert curve.kinds == ("parameters", "gradients", "activations")
    assert curve.num_bytes == ((4, 4, 4, 4), (0, 0, 0, 0), (0, 3, 5, 1))
    assert curve.order == (0, 5, 9, 12)
    assert (curve.peak, curve.peak_bytes, curve.peak_phase) == (2, 9, "forward")
    assert [(phase.phase, phase.first, phase.last) for phase in curve.phases] == [
        ("outside", 0, 0),
        ("forward", 1, 2),
        ("backward", 3, 3),
    ]
    assert [(curve.kinds[row.kind], row.num_bytes) for row in curve.at_peak] == [
        ("parameters", 9),
        ("gradients", 7),
    ]
    assert (curve.device_bytes, curve.needed_bytes, curve.first_peak_bytes) == (100, 20, 11)


def test_a_long_curve_keeps_the_highest_of_each_stretch() -> None:
    draw = random.Random(0)
    samples = [sample(order, activations=draw.randrange(10**6)) for order in range(20_000)]
    samples[7] = sample(7, temporaries=10**9)
    full_profile = profile(*samples)
    thin = thin_samples(full_profile, limit=1_500)
    assert 1_400 < len(thin) <= 1_500
    assert [sample.order for sample in thin] == sorted({sample.order for sample in thin})
    assert samples[7] in thin
    assert (thin[0], thin[-1]) == (samples[0], samples[-1])
    thin_orders = {sample.order for sample in thin}
    for first in range(0, 20_000, 200):  # any stretch of 200 has its highest, or one as near
        stretch = samples[first : first + 200]
        highest = max(stretch, key=lambda sample: sum(sample.num_bytes))
        near = {sample.order for sample in samples[max(0, first - 20) : first + 220]} & thin_orders
        assert max(sum(samples[order].num_bytes) for order in near) >= sum(highest.num_bytes)
    (curve,) = read(full_profile)
    assert curve.order[curve.peak] == 7


def test_a_peak_between_samples_is_shown_at_the_highest_sample() -> None:
    (curve,) = read(profile(sample(0, gathered=1), sample(4, gathered=3), peak_order=3))
    assert curve.order[curve.peak] == 4
    (curve,) = read(MemoryProfile(rank=0, peak_bytes=1, peak_order=0, peak_phase=Phase.FORWARD))
    assert (curve.peak, curve.order) == (-1, ())


def test_ranks_that_held_the_same_share_a_curve_and_the_fullest_comes_first() -> None:
    small, large = sample(0, activations=5), sample(0, activations=50)
    curves = read(profile(small), profile(large, rank=1), profile(small, rank=2))
    assert [(curve.ranks, curve.peak_bytes) for curve in curves] == [("1", 50), ("0-2/2", 5)]


def test_of_ranks_that_need_the_same_all_views_show_the_first() -> None:
    profiles = [
        replace(
            profile(sample(0, **{kind: 8}), rank=rank),
            at_peak=(MemoryUse(kind=MemoryKind(kind), module="a", num_bytes=8),),
        )
        for rank, kind in ((1, "gradients"), (0, "activations"))
    ]
    modules = (Module(name="a", type="Linear", ranks=(RankSpan(0, 2),)),)
    recording = make_recording(memory=tuple(profiles), modules=modules, ranks=(0, 1))
    page = build_page(recording)
    assert page.memory[0].ranks == "0"
    assert page.modules.own_peak.kinds == ("activations",)
    assert find_worst(recording.memory).rank == 0


def test_curves_of_many_ranks_stay_small_together() -> None:
    profiles = tuple(
        profile(*(sample(order, activations=order + rank) for order in range(2_000)), rank=rank)
        for rank in range(30)
    )
    recording: Recording = make_recording(memory=profiles, world_size=30, ranks=tuple(range(30)))
    curves = build_page(recording).memory
    assert len(curves) == 30
    assert len(curves[0].order) > 1_000
    assert sum(len(curve.order) for curve in curves[1:]) <= 3_100
    assert all(curve.order[curve.peak] == 1_999 for curve in curves)


def test_samples_that_lack_kinds_hold_nothing_of_them() -> None:
    odd = MemorySample(order=0, phase=Phase.FORWARD, module=None, num_bytes=(3,))
    (curve,) = read(profile(odd))
    assert (curve.kinds, curve.num_bytes) == (("parameters",), ((3,),))
