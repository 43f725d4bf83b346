"""The summary at any width: the run, its problems, its collectives and their causes."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console

from sample_recordings import (
    HOSTILE_NAMES,
    make_collective,
    make_llama,
    make_parallel,
    make_ranks,
    make_recording,
    make_run,
)
from shardscope.record import (
    CollectiveKind,
    Finding,
    Gap,
    Module,
    Phase,
    RankSpan,
    Severity,
    Source,
    Stop,
)
from shardscope.report.text.summary import render_summary, render_text

_VIEWS = ["module", "axis", "kind", "cause"]


@pytest.mark.parametrize("width", [20, 40, 50, 80, 140])
def test_every_view_fits_the_terminal(any_recording, width):
    # What collectives are sorted by shows where there are some; only modules are folded.
    views = _VIEWS[1:] if any_recording.collectives else []
    for by, is_folded in [("module", True), ("module", False), *((by, True) for by in views)]:
        lines = render_text(any_recording, by=by, is_folded=is_folded, width=width).splitlines()
        assert max(cell_len(line) for line in lines) <= width, (by, is_folded)


@pytest.mark.parametrize("by", _VIEWS)
def test_without_collectives_every_view_is_the_same(by):
    recording = make_parallel()
    assert render_text(recording, by=by) == render_text(recording)


@pytest.mark.parametrize("by", _VIEWS[1:])
def test_views_without_modules_have_nothing_to_fold(varied, by):
    assert render_text(varied, by=by, is_folded=False) == render_text(varied, by=by)


@pytest.mark.parametrize("by", _VIEWS)
def test_hostile_names_are_sanitized(varied, by):
    console = Console(width=100, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(render_summary(varied, by=by))
    printed = capture.get()
    assert "\x1b[31mescape" not in printed
    assert "\x1b]0;" not in printed
    assert not {"\x00", "\x07", "\r", "\u202e"} & set(printed)
    plain = render_text(varied, by=by, width=100)
    assert "[red]markup[/red]" in plain
    assert "\\x1b[31mescape\\x1b]0;title\\x07" in plain
    assert "日本語 🚀 ünï" in plain
    assert max(map(len, HOSTILE_NAMES)) > max(map(len, plain.splitlines()))


def test_same_recording_gives_same_text(any_recording):
    assert render_text(any_recording) == render_text(any_recording)


def test_large_model_fits_on_a_few_screens(llama):
    for width in (80, 140):
        assert len(render_text(llama, width=width).splitlines()) <= 120


def test_first_line_says_what_ran(llama):
    first = render_text(llama).splitlines()[0]
    assert first == ("shardscope · dp=128 × tp=8 · rank 0 of 1,024 · simulated · torch 2.13.0")
    assert "real process group" in render_text(make_recording())
    traffic = "356 collectives per rank · 12.9 GiB input · 21.5 GiB sent (ring estimate)"
    assert traffic in render_text(llama)


def test_no_findings_of_an_audit_says_what_it_was_not_given():
    run = make_run(instruments=("audit",), skipped_checks=("ties", "step"))
    words = "checked by: audit without the ties before sharding, a step; not run: trace,"
    assert words in " ".join(render_text(make_recording(run=run)).split())


@pytest.mark.parametrize(
    ("instruments", "words"),
    [
        ((), "No findings (which checks ran was not recorded)."),
        (
            ("trace",),
            "No findings (checked by: trace of 1 of 8 ranks; not run: audit, coverage, memory, "
            "parity, explain, diagnose).",
        ),
        (
            ("audit", "parallelize"),
            "No findings (checked by: audit, parallelize; not run: trace, coverage, memory, "
            "parity, explain, diagnose).",
        ),
    ],
)
def test_no_findings_says_which_checks_ran_and_which_did_not(instruments, words):
    recording = make_recording(run=make_run(instruments=instruments))
    assert words in " ".join(render_text(recording).split())
    finding = Finding(rule="r", severity=Severity.INFO, subject="s", fact="f", remedy="x")
    assert "No findings" not in render_text(replace(recording, findings=(finding,)))


def test_several_forward_passes_are_not_presented_as_a_single_pass(llama):
    twice = replace(llama, run=replace(llama.run, num_forwards=2))
    lines = [" ".join(line.split()) for line in render_text(twice, width=140).splitlines()]
    about = [line for line in lines if "over 2 forward passes" in line]
    assert [line.split()[0] for line in about] == ["356", "Modules", "By", "Most", "Causes"]
    once = replace(llama, run=replace(llama.run, num_forwards=1))
    assert "forward pass" not in render_text(once)


def test_metrics_of_which_records_were_lost_are_called_incomplete(llama):
    lossy = replace(llama, gaps=(Gap(place="stream", fact="it was cut", is_loss=True),))
    assert "sent (ring estimate) · incomplete: records were lost" in render_text(lossy, width=140)


def test_empty_recording_says_so_and_what_may_be_the_reason():
    text = " ".join(render_text(make_recording()).split())
    assert (
        "No collectives were recorded. Either the traced code issued no collective, or it" in text
    )


def test_empty_recording_of_the_command_line_does_not_mention_the_context_manager():
    recording = make_recording(run=make_run(command="shardscope trace train.py --mesh dp=8"))
    text = render_text(recording)
    assert "No collectives were recorded: the step issued none." in text
    assert "with trace" not in text


def test_empty_recording_of_a_single_rank_states_that_it_has_none_to_issue():
    text = render_text(make_recording(world_size=1))
    assert "No collectives were recorded: a world of one rank has none to issue." in text


def test_empty_recording_of_a_failed_step_does_not_say_that_it_issued_none():
    stop = Stop(rank=0, error="KeyError: 'loss'")
    gap = Gap(place="step", fact="it ended early with KeyError: 'loss'", rank=0)
    text = render_text(make_recording(stops=(stop,), gaps=(gap,)))
    assert "No collectives were recorded before the step ended early: see the gaps above." in text


def test_tree_counts_phases_and_folds_layers(llama):
    lines = render_text(llama).splitlines()
    rows = {" ".join(line.split()) for line in lines}
    assert "module type forward backward optim. input sent" in rows
    assert "Llama 161 193 · 12.9 GiB 21.5 GiB" in rows
    assert "└ 0 … 31 ×32 Tran…merBlock 5 6 · 398 MiB 664 MiB" in rows
    assert "│ └ wo Linear 1 1 · 128 MiB 112 MiB" in rows
    assert "outside any module · · 2 208 B 388 B" in rows
    assert not any("attention_norm" in line for line in lines)


def test_no_fold_shows_every_module(llama):
    text = render_text(llama, is_folded=False)
    assert text.count("attention_norm") == 32
    assert "×32" not in text


def test_wide_terminals_show_types_and_kinds(llama):
    text = render_text(llama, width=140)
    assert "TransformerBlock  2× all_gather[dp], 1× reduce_scatter[dp]" in text


def test_totals_by_kind_and_axis_add_up(llama):
    rows = [line.split() for line in render_text(llama).splitlines()]
    start = rows.index(["kind", "axis", "count", "input", "output", "sent", "share"])
    counts = [int(row[2] if len(row[0]) > 2 else row[1]) for row in rows[start + 1 : start + 7]]
    assert sum(counts) == len(llama.collectives)
    assert rows[start + 7][:2] == ["total", "356"]


def test_costliest_modules_count_folded_layers_together(llama):
    text = render_text(llama)
    assert "layers.{0…31}                     96  216 MiB  6.76 GiB    31%  ███" in text
    assert "layers.{0…31}.attention.wo        64  112 MiB  3.50 GiB    16%  █" in text


def _deep_names(width):
    """The costliest of modules that differ only in a number in the middle and in their end."""
    calls = tuple(
        make_collective(
            order=order,
            group_order=order,
            owner=f"model.language_model.decoder.layers.{layer}.self_attention.{part}_proj",
            wire_bytes=(4 - layer) * 1024**2,
        )
        for order, (layer, part) in enumerate(product(range(4), "qkvo"))
    )
    text = render_text(make_recording(calls), width=width)
    table = text.split("Most expensive modules")[1].split("Causes")[0].splitlines()
    return [line.split()[0] for line in table if "_proj" in line]


@pytest.mark.parametrize("width", [40, 50, 60, 70, 80, 100, 140])
def test_long_names_keep_their_end_and_stay_different(width):
    names = _deep_names(width)
    assert len(names) == len(set(names)) == 10
    assert [name[-6:] for name in names[:4]] == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_long_names_are_shortened_to_the_width():
    assert [len(name) for name in _deep_names(100)] == [59] * 10
    assert 35 < len(_deep_names(80)[0]) < 59


def _figures(text):
    """Every number of bytes, and how many of each."""
    return Counter(re.findall(r"[\d.]+ [KMG]?i?B\b", text))


@pytest.mark.parametrize("width", [40, 50, 60, 80, 120])
@pytest.mark.parametrize("by", ["module", "kind", "axis", "cause"])
def test_names_and_numbers_are_complete_at_any_sensible_width(llama, width, by):
    text = render_text(llama, width=width, by=by)
    wide = render_text(llama, width=160, by=by)
    # Columns may be missing, but each figure that is there is one that the wide table has.
    assert set(_figures(text)) <= set(_figures(wide))
    assert "21.5 GiB" in " ".join(text.split())
    assert not re.search(r"\d [KMG]i?(…|\s)|\.\d*…", text)
    if by == "module":
        for name in ("layers", "feed_forward", "outside any module", "reduce_scatter"):
            assert name in text
        assert "layers.{0…31}.feed_forward.w2" in text


@pytest.mark.parametrize(
    ("width", "headers"),
    [
        (140, ["count", "each", "sent", "share"]),
        (70, ["count", "each", "sent", "share"]),
        (60, ["count", "each", "sent"]),
        (50, ["count", "sent"]),
        (40, ["sent"]),
    ],
)
def test_narrow_tables_leave_out_what_matters_least(llama, width, headers):
    text = render_text(llama, width=width).split("Most expensive modules")[1]
    (line,) = [line for line in text.splitlines() if line.startswith("module ")]
    assert re.split(r"  +", line) == ["module", *headers]


def test_phases_are_counted_together_where_there_is_no_room_for_each(llama):
    rows = [" ".join(line.split()) for line in render_text(llama, width=40).splitlines()]
    assert "module count sent" in rows
    assert "└ 0 … 31 ×32 11 664 MiB" in rows
    apart = [" ".join(line.split()) for line in render_text(llama, width=60).splitlines()]
    assert "module forward backward optim. sent" in apart


def test_no_column_is_so_narrow_that_rows_become_columns(llama):
    for width in (40, 50):
        lines = render_text(llama, width=width).splitlines()
        assert not [line for line in lines if len(line.strip()) == 1]


def test_causes_have_an_example_line(llama):
    text = render_text(llama, by="cause", width=140)
    assert "redistribution Partial(sum) → Shard(dim=1) for RowwiseParallel" in text
    assert "shardscope/cli/_llama.py:152 forward  return self.w2(" in text
    assert "FSDP unshard" in text
    assert "call of torch.nn.utils.clip_grad_norm_" in text


def test_every_cause_is_described(varied):
    text = render_text(varied, by="cause", width=140)
    words = [", required by aten.mm", "FSDP unshard", "DDP gradient bucket"]
    words += ["call of torch.distributed.all_reduce", "compiled graph 0/0", "unknown cause"]
    assert [word for word in words if word not in text] == []


def test_phases_come_in_the_order_they_happen(llama):
    text = render_text(llama, by="axis")
    first = text.split("all_gather", 1)[1]
    assert first.index("forward") < first.index("backward")


def test_equal_ranks_share_a_row():
    text = render_text(make_llama(num_layers=2, dp=1, ranks=tuple(range(8))))
    assert "all 8 ranks" in text
    assert "all ranks identical" in " ".join(text.split())
    assert "≤" not in text


def test_ranks_that_differ_show_the_busiest_and_a_table_of_ranks():
    calls = make_ranks(4, [{}] * 3).collectives
    text = render_text(make_recording(calls[:-1], world_size=4, ranks=(0, 1, 2, 3)))
    assert "≤ 3 collectives per rank" in text
    assert "0-2        3  12.0 KiB" in text
    assert "3          2  8.00 KiB" in text


def test_pipeline_stages_are_not_compared_with_each_other():
    calls = (
        make_collective(rank=0, owner="layers.0"),
        make_collective(rank=1, owner="layers.1"),
        make_collective(rank=1, owner="layers.1", order=1, group_order=1),
    )
    text = render_text(make_recording(calls), width=50)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "├ 0 1 4.00 KiB 7.00 KiB" in rows
    assert "└ 1 2 8.00 KiB 14.0 KiB" in rows


def _one_call_on_some_ranks(*, kinds):
    """Four recorded ranks, of which the first issued one collective each, of another kind."""
    calls = tuple(
        make_collective(rank=rank, group=f"own {rank}", owner=f"stage{rank}", kind=kind)
        for rank, kind in enumerate(kinds)
    )
    return make_recording(calls, world_size=4, ranks=(0, 1, 2, 3))


_THREE_KINDS = [CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST]


def test_rank_without_collectives_is_not_reported_to_have_issued_any():
    text = " ".join(render_text(_one_call_on_some_ranks(kinds=_THREE_KINDS)).split())
    assert "≤ 1 collective per rank · ≤ 4.00 KiB input · ≤ 7.00 KiB sent" in text


def test_a_single_collective_is_singular():
    assert "\n1 collective per rank · 4.00" in render_text(make_recording((make_collective(),)))


@pytest.mark.parametrize("by", ["module", "kind", "axis"])
def test_totals_of_ranks_that_differ_are_sums_and_say_so(by):
    text = render_text(_one_call_on_some_ranks(kinds=_THREE_KINDS), by=by)
    table = text.split("  4 ranks together\n")[1].split("\n\n")[0].splitlines()
    assert table[-1].split() == ["total", "3", "12.0", "KiB", "12.0", "KiB", "21.0", "KiB"]
    assert [line.split()[-2] for line in table[1:-1]] == ["33%", "33%", "33%"]


def test_totals_of_identical_ranks_are_those_of_a_single_rank():
    text = render_text(make_llama(num_layers=2, dp=1, ranks=tuple(range(8))))
    assert "By kind and mesh axis  per rank" in text


def test_totals_of_some_ranks_that_differ_count_all_of_them():
    calls = make_ranks(4, [{}] * 3).collectives
    text = render_text(make_recording(calls[:-1], world_size=4, ranks=(0, 1, 2, 3)), by="kind")
    assert "4 ranks together" in text
    assert "all_reduce  world  forward     11  44.0 KiB" in text


def test_totals_of_a_thousand_axes_are_truncated_to_the_most_expensive():
    calls = tuple(
        make_collective(order=index, axis=f"axis{index:04}", wire_bytes=index)
        for index in range(1000)
    )
    text = render_text(make_recording(calls), by="axis")
    assert len(text.splitlines()) <= 80
    assert "… 940 more, which cost less: see shardscope export --to csv" in text
    assert "axis0999" in text
    assert "axis0001" not in text
    assert "total 1,000 3.91 MiB" in " ".join(text.split())


def test_world_without_a_group_is_a_single_process():
    alone = make_recording(world_size=1, groups=())
    assert "1 rank · one process · torch" in render_text(alone)
    assert "real process group" in render_text(make_recording(world_size=1))


@pytest.mark.parametrize("by", ["module", "cause"])
def test_lines_are_announced_only_if_there_are_any(llama, by):
    assert "one source line each" in render_text(llama, by=by)
    assert "source line" not in render_text(make_recording((make_collective(),)), by=by)


def test_groups_without_an_axis_are_named_by_size():
    calls = (make_collective(num_ranks=8), make_collective(num_ranks=2, order=1))
    text = render_text(make_recording(calls))
    assert "world" in text
    assert "2 ranks" in text


def _finding(**changes):
    facts = {"rule": "r", "severity": Severity.WARNING, "subject": "s", "fact": "f", "remedy": "m"}
    return Finding(**(facts | changes))


def test_findings_come_first_and_the_gravest_at_the_top():
    recording = make_recording(
        (make_collective(),),
        findings=(_finding(rule="mild", severity=Severity.INFO), _finding(rule="grave")),
        gaps=(Gap(place="here", fact="odd", rank=3),),
    )
    text = render_text(recording)
    assert text.index("warning grave") < text.index("info mild") < text.index("Gaps (1)")
    assert text.index("here  rank 3: odd") < text.index("Modules")
    assert "→ m" in text


def test_findings_that_differ_by_rank_alone_share_an_entry():
    findings = tuple(_finding(rank=rank, source=Source(file="a.py", line=3)) for rank in range(9))
    text = render_text(make_recording(findings=findings))
    assert "Findings (1)" in text
    assert "warning r  s  ranks 0-8" in text
    assert "a.py:3" in text


def test_many_findings_are_truncated():
    findings = tuple(_finding(subject=str(number)) for number in range(25))
    assert "… and 15 more" in render_text(make_recording(findings=findings))


def test_tree_of_a_thousand_different_modules_is_truncated():
    calls = tuple(
        make_collective(order=index, owner=f"m{index}.inner", wire_bytes=index)
        for index in range(1000)
    )
    text = render_text(make_recording(calls))
    assert len(text.splitlines()) <= 120
    assert "more: --no-fold shows all" in text


def test_tree_leaves_out_the_deepest_modules_first():
    calls = tuple(
        make_collective(order=index, owner=f"m{index % 20}.a.b.c{index}", wire_bytes=index)
        for index in range(100)
    )
    text = render_text(make_recording(calls))
    tree = text.partition("Modules")[2].partition("By kind")[0]
    assert "m19" in tree
    assert "c99" not in tree


def test_names_nested_beyond_reason_do_not_overflow():
    deep = ".".join(["a"] * 50_000)
    recording = make_recording(
        (make_collective(owner=deep, phase=Phase.RECOMPUTE),),
        modules=(Module(name=deep, type="x", ranks=(RankSpan(0),)),),
    )
    assert "recomp." in render_text(recording)
    assert render_text(recording, is_folded=False)


def test_numbers_are_never_shortened(llama):
    wide = tuple(replace(call, owner="x" * 300, axis="a" * 100) for call in llama.collectives[:3])
    text = render_text(make_recording(wide, world_size=1024), width=60)
    assert text.count("MiB") >= 6
    assert "Mi " not in text
