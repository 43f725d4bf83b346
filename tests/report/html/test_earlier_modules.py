"""Modules of an earlier recording on the page that compares with it."""

from __future__ import annotations

from sample_recordings import make_collective, make_recording
from shardscope.record import Module, Parameter, RankSpan, Recording
from shardscope.report.html.html import build_page
from shardscope.report.html.page import EarlierRecording
from shardscope.report.html.page_modules import GoneModules


def make_model(num_layers: int, *, prefix: str = "", num_bytes: int = 100) -> Recording:
    names = ["", "layers", *(f"layers.{i}" for i in range(num_layers))]
    modules = tuple(
        Module(
            name=f"{prefix}{name}".strip("."),
            type="Block",
            ranks=(RankSpan(0),),
            parameters=(_WEIGHT,) if name[-1:].isdigit() else (),
        )
        for name in names
    )
    calls = tuple(
        make_collective(owner=f"{prefix}layers.{i}", wire_bytes=num_bytes, order=i)
        for i in range(num_layers)
    )
    return make_recording(calls, modules=modules, ranks=(0,))


_WEIGHT = Parameter(
    name="weight",
    shape=(2, 3),
    local_shape=(1, 3),
    dtype="float32",
    global_bytes=24,
    local_bytes=12,
)


def test_figures_are_matched_by_name_and_what_is_gone_is_listed_below_its_parent() -> None:
    modules = build_page(make_model(2), against=make_model(4, num_bytes=70)).modules
    earlier = modules.earlier
    assert earlier is not None
    assert modules.path == ("", "layers", "layers.0", "layers.1")
    assert earlier.wire_bytes == (280, 280, 70, 70)
    assert (earlier.count, earlier.parameters) == ((4, 4, 1, 1), (24, 24, 6, 6))
    assert earlier.local_bytes == (48, 48, 12, 12)
    assert not any(earlier.is_new)
    assert earlier.gone == (
        GoneModules(
            parent=1,
            name="layers.{2,3}",
            paths=("layers.2", "layers.3"),
            num_modules=2,
            count=2,
            wire_bytes=140,
            parameters=12,
            local_bytes=24,
            peak_bytes=0,
        ),
    )
    assert "peak" not in earlier.recorded


def test_new_modules_are_marked_and_wrapped_ones_are_found_by_their_own_names() -> None:
    modules = build_page(make_model(3, prefix="_orig_mod."), against=make_model(2)).modules
    earlier = modules.earlier
    assert earlier is not None
    by_path = dict(zip(modules.path, earlier.is_new, strict=True))
    assert by_path["_orig_mod.layers.2"]
    assert not by_path["_orig_mod.layers.1"]
    assert earlier.gone == ()


def test_a_recording_without_modules_gives_no_earlier_figures() -> None:
    page = build_page(make_model(2), against=make_recording(()))
    assert page.modules.earlier is None
    assert build_page(make_model(1)).modules.earlier is None


def test_the_earlier_recording_has_its_collectives_by_names_of_the_page() -> None:
    page = build_page(make_model(2, prefix="_orig_mod."), against=make_model(3, num_bytes=70))
    earlier = page.earlier
    assert earlier is not None
    assert earlier.communication is not None
    traffic = earlier.communication.traffic
    owners = [earlier.modules[owner] for owner in traffic.owner]
    assert owners == ["_orig_mod.layers.0", "_orig_mod.layers.1", "layers.2"]
    assert traffic.wire_bytes == (70, 70, 70)
    assert set(traffic.source) == {-1}
    assert earlier.communication.axes == build_page(make_model(3)).communication.axes
    assert build_page(make_model(2)).earlier is None
    assert build_page(make_model(2), against=make_recording(())).earlier == EarlierRecording()
