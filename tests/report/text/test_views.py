"""Views: one subject at a time, at any width, and a sentence where there is nothing to show."""

from __future__ import annotations

from typing import get_args

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console

from compared_recordings import make_placed, make_program
from sample_recordings import (
    make_collective,
    make_holdings,
    make_llama,
    make_recording,
    make_run,
)
from shardscope.record import (
    Axis,
    Finding,
    MemoryKind,
    MemoryProfile,
    MemorySample,
    MemoryUse,
    Module,
    Parameter,
    Phase,
    RankSpan,
    Severity,
)
from shardscope.report.model.select import keep_modules
from shardscope.report.show import show as print_result
from shardscope.report.text.charts import render_matrix, render_timeline
from shardscope.report.text.memory_profile import MemoryArea
from shardscope.report.text.style import draw_level, format_bar
from shardscope.report.text.summary import render_plain
from shardscope.report.text.views import ViewName, Views, render_views

SUBJECTS = get_args(ViewName)
_MIB = 1024**2


def show(recording, *subjects, width=100, **options):
    return render_plain(render_views(recording, subjects, **options), width=width)


@pytest.mark.parametrize("width", [20, 40, 80, 160])
def test_every_view_fits_the_terminal(any_recording, width):
    for is_folded in (True, False):
        lines = show(any_recording, *SUBJECTS, width=width, is_folded=is_folded).splitlines()
        assert max(cell_len(line) for line in lines) <= width


def test_hostile_names_are_sanitized(any_recording):
    console = Console(width=100, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(render_views(any_recording, SUBJECTS))
    printed = capture.get()
    assert "\x1b[31mescape" not in printed
    assert "\x1b]0;" not in printed
    assert not {"\x00", "\x07", "\r", "\u202e"} & set(printed)


@pytest.mark.parametrize(
    ("subject", "verb"),
    [
        ("modules", "shardscope trace"),
        ("communication", "shardscope trace"),
        ("sharding", "shardscope audit"),
        ("coverage", "shardscope coverage"),
        ("compiler", "shardscope explain"),
        ("memory", "shardscope memory"),
        ("proof", "shardscope parity"),
    ],
)
def test_a_view_with_nothing_names_the_verb_that_would_fill_it(subject, verb):
    text = render_plain(Views(make_recording()).render(subject), width=200).strip()
    assert verb in text
    assert text.count("\n") == 0
    assert text.endswith(".")


def test_a_trace_without_collectives_does_not_advise_to_trace():
    recording = make_recording(run=make_run(instruments=("trace",)))
    text = render_plain(Views(recording).render("communication"), width=200).strip()
    assert text == "No collectives were issued while it was traced."


def test_overview_has_a_metric_of_each_view(llama):
    text = show(llama, "overview")
    assert "No findings (which checks ran was not recorded)." in text
    assert "No gaps: every collective was attributed." in text
    assert "356 collectives per rank, 21.5 GiB sent (ring estimate); rank 0 of 1,024" in text
    text = show(make_holdings(), "overview")
    assert "at the peak, in backward, on rank 0" in text
    assert "ops shard" in text


def test_modules_show_what_they_hold_and_what_they_need_at_the_peak():
    recording = replace(make_llama(num_layers=2), memory=(_make_profile(),))
    rows = {" ".join(line.split()) for line in show(recording, "modules").splitlines()}
    assert "module type forward backward optim. input sent at peak" in rows
    assert any(row.startswith("Llama") and row.endswith("96.0 MiB") for row in rows)
    assert any("0 … 1 ×2" in row and row.endswith("64.0 MiB") for row in rows)


def test_a_parallel_program_has_modules_and_holdings_though_none_were_listed():
    weight = make_placed("layers.0.up.weight")
    recording = replace(make_recording(), parallel=(make_program(placed=(weight,)),))
    rows = {" ".join(line.split()) for line in show(recording, "modules").splitlines()}
    assert any(row.endswith("up 32 B") for row in rows)
    sharding = show(recording, "sharding")
    assert "tp: Shard(0)" in sharding
    assert "layers.0.up\n" in sharding
    assert "1 parameter, 128 B in all, 32 B on rank 0" in show(recording, "overview")


def _make_profile():
    kinds = list(MemoryKind)

    def sample(order, phase, **num_bytes):
        sizes = tuple(num_bytes.get(str(kind), 0) * _MIB for kind in kinds)
        return MemorySample(order=order, phase=phase, module=None, num_bytes=sizes)

    return MemoryProfile(
        rank=0,
        peak_bytes=96 * _MIB,
        peak_order=5,
        peak_phase=Phase.BACKWARD,
        at_peak=(
            MemoryUse(
                kind=MemoryKind.ACTIVATIONS, module="layers.0.attention", num_bytes=64 * _MIB
            ),
            MemoryUse(kind=MemoryKind.PARAMETERS, module="", num_bytes=32 * _MIB),
        ),
        samples=(
            sample(0, Phase.FORWARD, parameters=32),
            sample(5, Phase.BACKWARD, parameters=32, activations=64),
            sample(9, Phase.OPTIMIZER, parameters=32),
        ),
    )


def test_memory_is_drawn_as_an_area_with_its_peak():
    lines = render_plain(MemoryArea(_make_profile()), width=19).splitlines()
    assert lines[0] == "96.0 MiB      AAAA"
    assert lines[9] == "         PPPPPPPPPP"
    assert lines[10] == "         fffffbbbbo"
    assert lines[11].index("▲") == lines[0].index("A") or lines[11].endswith("▲")
    assert "A activations" in lines[12]


def test_memory_is_drawn_in_colours_where_there_are_any():
    console = Console(width=40, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(MemoryArea(_make_profile()))
    assert "█" in capture.get()
    assert "A" not in capture.get().split("activations")[0].replace("\x1b", "")


def test_a_matrix_of_many_ranks_shares_cells(llama):
    calls = tuple(make_collective(rank=rank, num_ranks=1000) for rank in range(1000))
    recording = make_recording(calls, world_size=1000)
    lines = [render_plain(section, width=60) for section in render_matrix(recording)][
        -1
    ].splitlines()
    assert "0…" in lines[1]
    assert len(lines) < 40
    alone = [render_plain(section, width=60) for section in render_matrix(llama)][-1].splitlines()
    assert alone[0].split() == ["0", "1", "8"]
    assert alone[1].startswith("  0  ··")


def test_a_timeline_has_a_strip_for_each_axis_of_a_single_rank_and_for_each_of_many(llama):
    alone = render_plain(list(render_timeline(llama))[-1], width=60).splitlines()
    assert [line.split()[0] for line in alone[1:]] == ["tp", "dp"]
    assert alone[0].strip().startswith("ffff")
    many = make_llama(num_layers=2, dp=2, ranks=tuple(range(20)))
    title, strips, more = (render_plain(section, width=60) for section in render_timeline(many))
    assert "in simulated order, not time" in " ".join(title.split())
    assert "µs" not in title
    assert len(strips.splitlines()) == 17
    assert "4 more ranks" in more


def test_a_timeline_without_a_clock_goes_by_order():
    calls = tuple(make_collective(order=order) for order in range(4))
    title, strips = (
        render_plain(section, width=60) for section in render_timeline(make_recording(calls))
    )
    assert "in order of issue, not time" in title
    assert strips.splitlines()[1].count("█") == 4


def test_a_timeline_of_a_real_run_goes_by_its_clock():
    calls = tuple(make_collective(order=order, start_ns=order * 1000) for order in range(4))
    title, _ = (
        render_plain(section, width=60) for section in render_timeline(make_recording(calls))
    )
    assert "bytes sent over 3.00 µs" in title
    title, _ = (
        render_plain(section, width=60) for section in render_timeline(make_recording(calls[:1]))
    )
    assert "bytes sent by one collective" in title
    assert "0 ns" not in title


def test_bars_are_as_high_as_their_values():
    assert "".join(draw_level(value, 100) for value in (0, 1, 6, 12, 25, 50, 75, 100)) == " ··▁▂▄▆█"
    assert draw_level(3, 0) == " "


def test_placements_are_drawn_with_the_shard_of_a_rank(llama):
    text = show(llama, "sharding")
    assert "■ □ □ □ □ □ □ □" in text
    assert "sharded: dim 0 in 128 and dim 1 in 8" in text
    assert "dp: Shard(dim=0), tp: Shard(dim=1)" in text


def test_placements_are_read_as_a_page_reads_them():
    run = make_run(world_size=8, axes=(Axis(name="dp", size=4), Axis(name="tp", size=2)))

    def draw(*placements, axes=("dp", "tp")):
        weight = Parameter(
            name="w",
            shape=(8, 6),
            local_shape=(8, 2),
            dtype="float32",
            placements=placements,
            axes=axes,
        )
        module = Module(name="", type="M", ranks=(RankSpan(0),), parameters=(weight,))
        return show(make_recording(modules=(module,), run=run), "sharding")

    assert "sharded: dim 1 in 8" in draw("Shard(-1)", "S(1)")
    assert "sharded: dim 0 in 8" in draw("_StridedShard(dim=0, sf=2)", "Shard(dim=0)")
    assert "replicated on every rank" in draw("Replicate()", "Shard(5)")
    # The size of an axis that the mesh does not have is told by the shapes.
    assert "sharded: dim 1 in 3" in draw("Shard(1)", axes=("ep",))


def test_a_selected_module_keeps_its_records_and_its_childrens(llama):
    selected = keep_modules(llama, "layers.3.attention")
    assert {call.owner for call in selected.collectives} == {
        "layers.3.attention",
        "layers.3.attention.wo",
    }
    names = [module.name for module in selected.modules if module.parameters]
    assert names == [f"layers.3.attention.{part}" for part in ("wq", "wk", "wv", "wo")]
    assert len(keep_modules(llama, "layers.?.attention").collectives) == 10 * len(
        selected.collectives
    )
    assert keep_modules(llama, "no.such") is None
    assert keep_modules(llama, "**").collectives == tuple(
        call for call in llama.collectives if call.owner is not None
    )
    assert keep_modules(llama, "*").collectives == tuple(
        call for call in llama.collectives if call.owner
    )


def test_findings_of_a_module_are_kept_by_their_subject(llama):
    def finding(subject):
        return Finding(
            rule="r", severity=Severity.INFO, subject=subject, fact="Fact.", remedy="Remedy."
        )

    subjects = [
        "layers.3.attention.wo.weight",
        "x, layers.3.attention",
        "layers.*.attention.wq (×32)",
    ]
    unrelated = ["layers.30.attention", "group dp", "layers.*.feed_forward", "step"]
    recording = replace(llama, findings=tuple(map(finding, [*subjects, *unrelated])))
    selected = keep_modules(recording, "layers.3.attention")
    assert [finding.subject for finding in selected.findings] == subjects


def test_a_view_without_selected_modules_states_that_and_not_what_to_run():
    recording = make_holdings()
    selected = keep_modules(recording, "layers.8.*")
    text = show(selected, "coverage", "compiler", full_recording=recording, width=200)
    assert "belongs to matching modules" in text
    assert "shardscope coverage" not in text
    assert "shardscope explain" in text


def test_a_file_that_holds_more_than_all_makes_no_endless_bar():
    assert format_bar(2**63 - 1, 1).plain == format_bar(1, 1).plain == "█" * 8


def test_show_prints_a_view_of_any_result_with_a_recording(llama, capsys):
    print_result(llama, view="sharding")
    assert "Placements" in capsys.readouterr().out
    with pytest.raises(ValueError, match="Views are overview, modules, communication"):
        print_result(llama, view="sharing")


def test_views_of_a_run_without_collectives_omit_traffic():
    recording = replace(make_llama(num_layers=2), collectives=(), run=make_run())
    text = show(recording, "modules", "communication")
    assert "sent" not in text
    assert "└ 0 … 1 ×2" in text
    assert "Collectives were not recorded" in text
