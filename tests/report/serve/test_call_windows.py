"""A server's table of collectives has the rows of the page's own, filtered and sorted."""

from __future__ import annotations

from pathlib import Path

import pytest

import sample_recordings as samples
from shardscope.record import Phase, Recording, Source, load, save
from shardscope.record.codec import open_parquet
from shardscope.report.html.html import build_page
from shardscope.report.html.page import Calls, Page
from shardscope.report.model.clocks import has_clock
from shardscope.report.serve import served_page
from shardscope.report.serve.call_windows import CallRequest, CallWindows

EXAMPLES = Path(__file__).parents[3] / "examples" / "recordings"
ALL = CallRequest(offset=0, limit=1_000)


def _serve(recording: Recording, folder: Path) -> tuple[CallWindows, Page]:
    file, _ = open_parquet(save(recording, folder / "run.parquet"))
    windows = CallWindows(
        file.read_table(), world_size=recording.run.world_size, is_timed=has_clock(recording)
    )
    return windows, build_page(recording, served=windows)


def _calls_of(page: Page) -> Calls:
    assert page.communication is not None
    return page.communication.calls


@pytest.mark.parametrize(
    "recording",
    [
        samples.make_varied(),
        samples.make_llama(num_layers=1, dp=1, ranks=(0, 1)),
        samples.make_recording(
            tuple(
                samples.make_collective(
                    order=order,
                    axis=None,
                    owner=None,
                    trigger="head",
                    num_ranks=(8, 4, 2)[order],
                    source=Source(file="a.py", line=order) if order else None,
                )
                for order in range(3)
            )
        ),
        load(EXAMPLES / "moe.json.gz"),
        samples.make_steps(3),
        samples.make_steps(3, timed=True),
        samples.make_recording(
            tuple(
                samples.make_collective(rank=rank, order=order, phase=phase)
                for rank in range(2)
                for order, phase in enumerate((Phase.FORWARD, Phase.BACKWARD) * 2)
            ),
            run=samples.make_run(ranks=(0, 1), num_forwards=2),
        ),
    ],
    ids=["varied", "llama", "no axis", "moe", "steps", "timed steps", "forward passes"],
)
def test_all_rows_are_those_of_the_page(tmp_path: Path, recording: Recording) -> None:
    windows, page = _serve(recording, tmp_path)
    assert page.communication is not None
    assert page.communication.num_served == len(recording.collectives)
    num_rows = min(len(recording.collectives), ALL.limit)
    answer = windows.answer(ALL)
    assert answer.num_rows == len(recording.collectives)
    for name in Calls.__struct_fields__:
        assert getattr(answer.calls, name) == getattr(_calls_of(page), name)[:num_rows], name


def test_rows_are_filtered_sorted_and_cut_into_windows(tmp_path: Path) -> None:
    recording = samples.make_llama(num_layers=12, dp=1, ranks=tuple(range(4)))
    windows, page = _serve(recording, tmp_path)
    calls = _calls_of(page)
    assert page.communication is not None
    rows = range(len(calls.rank))
    kind = calls.kind[0]
    some = [row for row in rows if calls.kind[row] == kind and 1 <= calls.rank[row] <= 2]
    by_size = sorted(some, key=lambda row: -calls.wire_bytes[row])
    filters = ({"kind": ((kind, kind),)}, {"rank": ((1, 1), (2, 2)), "order": ((-1, -1),)})
    request = CallRequest(
        offset=0, limit=1_000, sort="wire_bytes", is_descending=True, filters=filters
    )
    answer = windows.answer(request)
    assert answer.num_rows == len(some)
    assert list(zip(answer.calls.rank, answer.calls.order, strict=True)) == [
        (calls.rank[row], calls.order[row]) for row in by_size
    ]
    window = windows.answer(CallRequest(offset=5, limit=3, filters=filters))
    assert (window.offset, window.num_rows) == (5, len(some))
    assert window.calls.order == tuple(calls.order[row] for row in some[5:8])
    names = [
        page.modules.path[position]
        for position in windows.answer(CallRequest(offset=0, limit=1_000, sort="owner")).calls.owner
    ]
    layers = [int(name.split(".")[1]) for name in names if name.startswith("layers.")]
    assert layers == sorted(layers)  # layers.9 before layers.10
    assert max(layers) == 11
    nothing = windows.answer(CallRequest(offset=0, limit=9, filters=({},)))
    assert (nothing.num_rows, nothing.calls.rank) == (0, ())


def test_json_and_parquet_give_the_same_served_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_page, "MAX_CALLS", 5)
    recording = samples.make_llama(num_layers=1, dp=1, ranks=(0, 1))
    assert len(recording.collectives) > 5
    windows = []
    for name in ("run.json", "run.parquet"):
        path = save(recording, tmp_path / name)
        page = served_page.make_served_page(path, lambda: recording)
        assert page.calls is not None
        windows.append(page.calls.answer(ALL))
    assert windows[0] == windows[1]
    monkeypatch.setattr(served_page, "MAX_CALLS", 30_000)
    small = served_page.make_served_page(tmp_path / "run.parquet", lambda: recording)
    assert small.calls is None  # all of its collectives are in the page
