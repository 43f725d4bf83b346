"""The browser in a terminal: panes follow each other, and only what is seen is made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace
from rich.console import Console
from textual.pilot import Pilot
from textual.widgets import Input, Static

from sample_recordings import (
    make_collective,
    make_diagnosed,
    make_explained,
    make_holdings,
    make_parallel,
    make_recording,
    make_varied,
)
from shardscope.record import Finding, Gap, Module, Phase, RankSpan, Recording, Severity
from shardscope.report.text.summary import render_plain
from shardscope.report.tui.browser import Browser, ModuleTree
from shardscope.report.tui.rows import Rows

Steps = Callable[[Browser, Pilot[None]], Awaitable[None]]


def drive(recording: Recording, steps: Steps, *, size=(100, 32), **options) -> None:
    """Run the browser without a terminal, and do the steps once it stands."""

    async def run() -> None:
        app = Browser(recording, **options)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await steps(app, pilot)

    asyncio.run(run())


async def press_tab(app: Browser, pilot: Pilot[None], number: str) -> None:
    """Go to a tab, and wait until it is drawn."""
    await pilot.press(number)
    await pilot.pause()
    await app.workers.wait_for_complete()
    await pilot.pause()


def screen_text(app: Browser) -> str:
    """What a person would see, without colours."""
    console = Console(width=app.size.width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        for line in app.screen._compositor.render_strips():
            console.print("".join(segment.text for segment in line), end="\n", markup=False)
    return capture.get()


def details(app: Browser) -> str:
    shown = app.query_one("#details-text", Static).content
    return render_plain(shown, width=100)


def selected(app: Browser) -> str:
    node = app.query_one("#tree", ModuleTree).cursor_node
    assert node is not None
    assert node.data is not None
    return node.data.name


def calls(app: Browser) -> Rows:
    return app.query_one("#calls", Rows)


def test_modules_are_walked_through_and_their_collectives_follow(llama):
    async def steps(app, pilot):
        assert selected(app) == ""
        assert len(calls(app)) == len(llama.collectives) - 2  # two belong to no module
        await pilot.press("down", "down", "right", "right")
        assert selected(app) == "layers.{0…31}"
        assert len(calls(app)) == 352
        assert "TransformerBlock" in details(app)
        await pilot.press("left", "left")
        assert selected(app) == "layers"
        await pilot.press("end")
        assert selected(app) == "outside any module"
        assert {call.owner for call in calls(app)} == {None}

    drive(llama, steps)


def test_a_collective_shows_its_cause_line_and_ranks(llama):
    async def steps(app, pilot):
        await pilot.press("tab", "down", "down")
        text = details(app)
        assert "redistribution Shard(dim=1) → Replicate() for PrepareModuleInput" in text
        assert "layers.0.attention" in text
        assert "tp, 8 ranks = ranks 0-7" in text
        assert "shardscope/cli/_llama.py:140 in forward" in text
        assert "return self.w2(F.silu(self.w1(x)) * self.w3(x))" in text
        await pilot.press("enter")
        await pilot.pause()
        assert selected(app) == "layers.{0…31}.attention"

    drive(llama, steps)


def test_filters_cycle_through_the_values_and_then_keep_all(llama):
    async def steps(app, pilot):
        num_calls = len(calls(app))
        await pilot.press("p")
        assert {call.phase for call in calls(app)} == {Phase.FORWARD}
        await pilot.press("a")
        assert {(call.phase, call.axis) for call in calls(app)} == {(Phase.FORWARD, "dp")}
        assert "phase forward, axis dp" in screen_text(app)
        await pilot.press("k", "k", "k")
        assert len(calls(app)) == 0
        assert "x clears filters" in screen_text(app)
        await pilot.press("x")
        assert len(calls(app)) == num_calls
        for _ in range(4):
            await pilot.press("p")
        assert len(calls(app)) == num_calls

    drive(llama, steps)


def test_collectives_are_sorted_by_columns_in_turn(llama):
    async def steps(app, pilot):
        await pilot.press("s")
        sent = [call.wire_bytes for call in calls(app)]
        assert sent == sorted(sent, reverse=True)
        assert sent[0] > sent[-1]
        await pilot.press("S")
        assert [call.wire_bytes for call in calls(app)] == sent[::-1]

    drive(llama, steps)


def test_a_click_goes_to_its_row_and_a_second_click_to_the_module(llama):
    async def steps(app, pilot):
        corner = calls(app).content_region.offset
        entry = (corner.x + 5, corner.y + 3)
        await pilot.click(offset=entry)
        assert calls(app).cursor == 2
        assert "number 2 of rank 0" in details(app)
        await pilot.double_click(offset=entry)
        await pilot.pause()
        assert selected(app) == "layers.{0…31}.attention"

    drive(llama, steps)


def test_search_expands_the_ancestors_of_a_match(llama):
    async def steps(app, pilot):
        await pilot.press("slash", *"W2")
        await pilot.pause()
        assert selected(app) == "layers.{0…31}.feed_forward.w2"
        await pilot.press("enter")
        assert not app.query_one("#search", Input).has_focus
        await pilot.press("slash", "backspace", "backspace", *"rms", "escape")
        await pilot.pause()
        names = []
        for _ in range(4):
            names.append(selected(app))
            await pilot.press("n")
            await pilot.pause()
        layer = "layers.{0…31}"
        assert names == [f"{layer}.attention_norm", f"{layer}.ffn_norm", "norm", names[0]]
        await pilot.press("N")
        await pilot.pause()
        assert selected(app) == names[0]

    drive(llama, steps)


def test_search_without_a_match_says_so_and_stays(llama):
    async def steps(app, pilot):
        await pilot.press("slash", *"zzz")
        await pilot.pause()
        assert "no zzz" in screen_text(app)
        assert selected(app) == ""

    drive(llama, steps)


def test_unfolding_shows_each_layer_and_keeps_the_place(llama):
    async def steps(app, pilot):
        await pilot.press("slash", *"17.attention.wo", "enter")
        await pilot.pause()
        assert selected(app) == "layers.{0…31}.attention.wo"
        await pilot.press("f")
        await pilot.pause()
        assert selected(app) == "layers.0.attention.wo"
        await pilot.press("n")
        await pilot.pause()
        assert selected(app) == "layers.17.attention.wo"
        assert {call.owner for call in calls(app)} == {"layers.17.attention.wo"}

    drive(llama, steps)


def _with_problems(recording: Recording) -> Recording:
    finding = Finding(
        rule="left-whole",
        severity=Severity.WARNING,
        subject="layers.*.attention.wo.weight (×32)",
        fact="It is whole on every rank.",
        remedy="Shard it.",
    )
    tensor = replace(finding, severity=Severity.ERROR, rule="torn", subject="output.weight, x")
    gap = Gap(place="stream", fact="its end is missing", is_loss=True)
    return replace(recording, findings=(finding, tensor), gaps=(gap,))


def test_findings_come_gravest_first_and_lead_to_their_module(llama):
    async def steps(app, pilot):
        assert "2 findings, 1 gap" in screen_text(app)
        await pilot.press("tab")
        assert app.focused.id == "problems"
        assert "error torn" in details(app)
        assert "→ Shard it." in details(app)
        await pilot.press("enter")
        await pilot.pause()
        assert selected(app) == "output"
        await pilot.press("down", "enter")
        await pilot.pause()
        assert selected(app) == "layers.{0…31}.attention.wo"
        await pilot.press("down")
        assert "Records were lost" in details(app)

    drive(_with_problems(llama), steps)


def test_views_are_drawn_when_they_are_first_looked_at(llama):
    async def steps(app, pilot):
        assert not str(app.query_one("#memory-view", Static).content)
        await press_tab(app, pilot, "7")
        assert "shardscope memory" in screen_text(app)
        await press_tab(app, pilot, "3")
        assert "By axis and kind" in screen_text(app)
        await pilot.press("1")
        await pilot.pause()
        assert app.focused.id == "tree"

    drive(llama, steps)


def test_help_lists_the_keys_and_q_quits(llama):
    async def steps(app, pilot):
        await pilot.press("question_mark")
        await pilot.pause()
        assert "search modules" in screen_text(app)
        await pilot.press("escape")
        assert "search modules" not in screen_text(app)
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running

    drive(llama, steps)


@pytest.mark.parametrize("make", [make_recording, make_varied, make_holdings])
def test_every_shape_is_shown_at_every_size(make):
    async def steps(app, pilot):
        await pilot.press("down", "tab")
        for size in ((200, 60), (10, 3), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            assert "shards" in screen_text(app)

    drive(make(), steps, size=(40, 12))


_UNSAFE = {"\x1b", "\x07", "\x00", "\u202e"}


def test_hostile_names_are_sanitized():
    async def steps(app, pilot):
        for pane in ("#tree", "#calls", "#problems"):
            app.query_one(pane).focus()
            for _ in range(2):
                await pilot.press("down", "down", "down", "down")
                assert not _UNSAFE & set(details(app) + screen_text(app))
        app.query_one("#tree").focus()
        await pilot.press("slash", *"markup", "enter")
        await pilot.pause()
        assert "[red]markup[/red]" in screen_text(app)

    drive(make_varied(), steps, size=(120, 40))


def test_hostile_names_are_sanitized_in_views():
    recordings = (make_holdings(), make_parallel(), make_explained(), make_diagnosed())
    fields = ("coverage", "memory", "layouts", "parity", "parallel", "explanations", "diagnoses")
    holders = {
        field: recording
        for recording in recordings
        for field in fields
        if getattr(recording, field)
    }
    values = {field: getattr(recording, field) for field, recording in holders.items()}

    async def steps(app, pilot):
        for tab in "2345678":
            await press_tab(app, pilot, tab)
            seen = screen_text(app)
            assert not _UNSAFE & set(seen)
            assert "shardscope coverage finds" not in seen

    drive(replace(make_holdings(), **values), steps, size=(120, 40))


def test_an_empty_recording_says_what_would_fill_it():
    async def steps(app, pilot):
        seen = screen_text(app)
        assert "No modules" in seen
        assert "shardscope trace" in seen
        assert "No findings (which checks ran was not" in seen
        await pilot.press("p", "s", "f", "slash", *"x", "enter", "n")

    drive(make_recording(), steps)


def test_of_a_large_recording_only_what_is_seen_is_made():
    ranks = (RankSpan(0),)
    modules = [Module(name="", type="Model", ranks=ranks)]
    modules += [
        Module(name=f"stage{stage}.block{block}", type=f"Block{block}", ranks=ranks)
        for stage in range(50)
        for block in range(100)
    ]
    issued = tuple(
        make_collective(order=order, group_order=order, owner=modules[1 + order % 5000].name)
        for order in range(20_000)
    )

    async def steps(app, pilot):
        tree = app.query_one("#tree", ModuleTree)
        assert tree.num_created == 1 + 50
        assert len(calls(app)) == 20_000
        assert calls(app).num_created < 200
        await pilot.press("tab", "end")
        assert calls(app).num_created < 400
        assert "number 19,999" in details(app)
        await pilot.press("shift+tab", "down", "right")
        assert tree.num_created == 1 + 50 + 100

    drive(make_recording(issued, modules=tuple(modules)), steps)


def test_without_colours_the_cursor_can_still_be_seen(llama, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    async def steps(app, pilot):
        await pilot.press("tab")
        strips = calls(app).render_lines(calls(app).size.region)
        styles = [segment.style for segment in strips[2] if "all_gather" in segment.text]
        assert styles
        assert all(style.reverse for style in styles)

    drive(llama, steps, has_colors=False)
