"""Folding, choosing and printing changes."""

from __future__ import annotations

import random

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from compared_recordings import add_reductions, lines, make_pair, make_traced, make_world
from sample_recordings import HOSTILE_NAMES, make_recording, make_run, make_varied
from shardscope import diff, show
from shardscope.record import Finding, Gap, Severity
from shardscope.report.compare.changes import Area, Change, Status, Unit
from shardscope.report.compare.changes_markdown import ChangesDocument, encode_changes
from shardscope.report.compare.changes_text import render_changes, render_changes_text
from shardscope.report.compare.compare_recordings import compare
from shardscope.report.compare.facts import fold_changes, name_paths

GOLDEN = """\
shardscope diff · before → after

Totals  of the busiest rank, where ranks differ
             before              after               added  gone  changed
findings     none                1 warning               1     ·        ·
collectives  48                  52                      4     ·        ·
bytes        2.19 GiB            2.31 GiB                8     ·        ·
placements   sizes not recorded  sizes not recorded      ·     ·        8
run          dp=4 × tp=2         dp=4 × tp=2             ·     ·        1

Findings  1 added
   module                 what          before → after
+  layers.0.attention.wq  mixed-meshes  warning: It lies on another mesh.
                                        → Put it on this one.

Collectives  4 added
   module                        what                          before  after  by
+  layers.{0…3}.attention.wo ×4  all_reduce[tp] in forward          –      1  +1
                                 implicit redistribution
                                 Partial(sum) → Replicate(),
                                 required by aten.add.Tensor
                                 (shardsco…cli/_llama.py:152)

Bytes  8 added; sent (ring estimate)
   module                        what                           before     after
+  layers.{0…3}.attention.wo ×4  all_reduce[tp] in forward           –  32.0 MiB
1 row on inputs hidden: --no-fold shows all
hidden at 80 columns: by (widen the terminal or set COLUMNS)

Placements  8 changed
   module                        what
~  layers.{0…3}.attention.wq ×4  weight: placement
                                 dp: Shard(dim=0), tp: Shard(dim=1) → dp:
                                 Shard(dim=0), tp: Replicate()
~  layers.{0…3}.attention.wq ×4  weight: shape on a rank
                                 32×512 → 32×4096

Run  1 changed
   what   before → after
~  torch  2.13.0 → 2.14.0
"""


def test_a_comparison_as_text():
    assert render_changes_text(compare(*make_pair())) == GOLDEN


@pytest.mark.parametrize("width", [20, 40, 80, 160])
def test_text_fits_the_terminal_whatever_the_names(any_recording, width):
    changes = compare(make_recording(run=make_run(torch_version="2.11.0")), any_recording)
    assert changes
    for is_complete in (True, False):
        text = render_changes_text(changes, is_complete=is_complete, width=width)
        assert max(map(cell_len, text.splitlines())) <= width


def test_hostile_names_are_sanitized_on_a_terminal():
    changes = compare(make_recording(), make_varied(), titles=("\x1b[31mred", "b\nc"))
    console = Console(width=100, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(render_changes(changes, is_complete=True))
    for printed in (capture.get(), str(changes)):
        assert not {"\x00", "\x07", "\r", "\u202e"} & set(printed)
        assert "\x1b[31mescape" not in printed
        assert "\x1b[31mred" not in printed
        assert "\\x1b[31mred" in printed
    assert max(map(len, HOSTILE_NAMES)) > max(map(len, capture.get().splitlines()))


def test_worse_is_red_and_better_is_green():
    more, fewer = make_traced({"a": 3}), make_traced({"a": 1})

    def styles(before, after):
        console = Console(width=100, force_terminal=True, color_system="standard")
        with console.capture() as capture:
            console.print(render_changes(compare(before, after)))
        return capture.get()

    assert "\x1b[1;31m~" in styles(fewer, more)
    assert "\x1b[1;32m~" not in styles(fewer, more)
    assert "\x1b[1;32m~" in styles(more, fewer)


def test_long_areas_are_truncated_with_a_note():
    names = random.Random(0).sample(range(10**6), 60)
    before, after = make_traced({}), make_traced({f"m{name}": 1 for name in names})
    text = render_changes_text(compare(before, after))
    assert "… 30 more: --no-fold shows all" in text
    assert text.count("\n+") == 60  # of each area 30
    full_text = render_changes_text(compare(before, after), is_complete=True)
    assert full_text.count("\n+") == 180


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        (["layers.7.up"], "layers.7.up"),
        (["layers.0", "layers.1"], "layers.{0,1}"),
        ([f"layers.{index}.up" for index in range(32)], "layers.{0…31}.up"),
        ([f"layers.{index}" for index in (0, 1, 2, 5, 7, 8)], "layers.{0…2,5,7,8}"),
        ([f"layers.{index}" for index in range(0, 20, 2)], "layers.{0,2,4,6,…}"),
        ([f"l.{a}.experts.{b}" for a in range(2) for b in range(8)], "l.{0,1}.experts.{0…7}"),
        (["0.up", "1.up"], "{0,1}.up"),
        (["0", "1", "2"], "{0…2}"),
        (["conv1.x", "conv1.x"], "conv1.x"),
    ],
)
def test_layers_share_a_name(texts, name):
    assert name_paths(texts) == name


def test_layers_whose_names_are_numbers_alone_fold_but_sizes_do_not():
    before = make_traced({str(index): 1 for index in range(8)})
    after = make_traced({str(index): 2 for index in range(8)})
    counts = compare(before, after).of(Area.COLLECTIVES)
    assert [(row.path, row.repeat, row.modules[-1]) for row in counts] == [("{0…7}", 8, "7")]
    sizes = [
        Change(area=Area.PLACEMENTS, what="shape", before=size, after="8", path=str(index))
        for index, size in enumerate(("16", "64"))
    ]
    assert fold_changes(sizes) == sizes


def test_layers_fold_only_if_their_changes_are_the_same():
    before = make_traced({f"layers.{index}.up": 1 for index in range(4)})
    after = make_traced({f"layers.{index}.up": 1 + (index > 0) * 2 for index in range(4)})
    folded = compare(before, after)
    line = "all_reduce[tp] in forward: 1 → 3"
    assert lines(folded, Area.COLLECTIVES) == [f"changed worse | layers.{{1…3}}.up ×3: {line}"]
    apart = compare(before, after, is_folded=False)
    assert [row.path for row in apart.of(Area.COLLECTIVES)] == [
        "layers.1.up",
        "layers.2.up",
        "layers.3.up",
    ]
    assert folded.count(Area.COLLECTIVES, Status.CHANGED) == 3
    assert apart.count(Area.COLLECTIVES, Status.CHANGED) == 3


def test_numbers_too_long_to_be_a_layer_do_not_fold():
    name = f"layers.{'9' * 5000}.up"
    assert len(compare(make_traced({}), make_traced({name: 1})).of(Area.COLLECTIVES)) == 1


def test_the_largest_change_comes_first_counting_all_layers():
    after = make_traced({"big": 3, **{f"layers.{index}.up": 1 for index in range(9)}})
    rows = compare(make_traced({}), after).of(Area.COLLECTIVES)
    assert [row.path for row in rows] == ["layers.{0…8}.up", "big"]


def test_changes_can_be_chosen_by_area_module_and_size():
    before, after = make_pair()
    changes = compare(before, after)
    assert {row.area for row in changes.only_areas([Area.BYTES, Area.RUN]).rows} == {
        Area.BYTES,
        Area.RUN,
    }
    assert {row.path for row in changes.only_modules("layers.**.wo").rows} == {
        "layers.{0…3}.attention.wo"
    }
    assert {row.path for row in changes.only_modules("layers.0").rows} == {
        "layers.{0…3}.attention.wo",
        "layers.{0…3}.attention.wq",
        "layers.0.attention.wq",
    }
    assert not changes.only_modules("output")
    assert changes.has_module("output")
    assert not changes.has_module("outputs")


def test_bytes_within_the_tolerance_are_no_change():
    def grown(size: int) -> Change:
        facts = {"area": Area.BYTES, "what": "w", "unit": Unit.BYTES}
        return Change(before=100, after=size, **facts)

    changes = compare(make_traced({}), make_traced({}))
    rows = (grown(105), grown(106), grown(94), Change(area=Area.RUN, what="x", before=1, after=2))
    changes = msgspec.structs.replace(changes, rows=rows)
    assert [row.after for row in changes.beyond(0.05).rows] == [106, 94, 2]
    assert [row.after for row in changes.beyond(0.1).rows] == [2]
    added = msgspec.structs.replace(rows[0], before=None)
    assert msgspec.structs.replace(changes, rows=(added,)).beyond(10.0)


def test_json_has_every_change_with_its_status_and_verdict():
    changes = compare(*make_pair())
    document = msgspec.json.decode(encode_changes(changes), type=ChangesDocument)
    assert document.format == "shardscope.changes"
    assert [change.what for change in document.changes] == [row.what for row in changes.rows]
    first = next(change for change in document.changes if change.area is Area.COLLECTIVES)
    assert (first.status, first.before, first.after, first.delta) == (Status.ADDED, None, 1, 1)
    assert (first.repeat, len(first.modules), first.is_worse) == (4, 4, True)
    assert (first.axis, first.kind, first.phase) == ("tp", "all_reduce", "forward")
    assert first.ranks == ""
    (area,) = [area for area in document.areas if area.area is Area.COLLECTIVES]
    assert (area.before, area.after, area.added, area.gone) == ("48", "52", 4, 0)


def test_json_holds_any_text():
    hostile = make_recording(
        gaps=tuple(Gap(place=name, fact="\ud800") for name in HOSTILE_NAMES),
        findings=(
            Finding(rule="\udcff", severity=Severity.ERROR, subject="s", fact="f", remedy="r"),
        ),
    )
    decoded = msgspec.json.decode(encode_changes(compare(make_recording(), hostile)))
    assert len(decoded["changes"]) == len(HOSTILE_NAMES) + 1


def test_diff_takes_whatever_holds_a_recording(llama, capsys):
    class Holder:
        recording = add_reductions(llama)

    changes = diff(llama, Holder())
    assert changes
    assert not diff(Holder(), Holder.recording)
    assert len(diff(llama, Holder(), is_folded=False).rows) == 32 * 3
    show(changes)
    assert "layers.{0…31}.attention.wo" in capsys.readouterr().out
    with pytest.raises(TypeError, match=r"^diff\(\) got str. Give it a recording"):
        diff(llama, "b.json")


def test_a_comparison_as_a_string_has_a_line_for_each_change():
    changes = diff(make_world({"a": 1}), make_world({"a": 2}))
    assert str(changes).splitlines() == [
        "before → after: 3 changes",
        "collectives: 1 → 2",
        "  ~ a: all_reduce[tp] in forward: 1 → 2",
        "bytes: 7.00 KiB → 14.0 KiB",
        "  ~ a: all_reduce[tp] in forward, sent: 7.00 KiB → 14.0 KiB",
        "  ~ a: all_reduce[tp] in forward, input: 4.00 KiB → 8.00 KiB",
    ]
    assert repr(changes) == "<Changes: 3 changes of collectives, bytes>"
    assert repr(diff(make_world({}), make_world({}))) == "<Changes: no change>"
    many = diff(make_world({}), make_world({f"m{index}x": 1 for index in range(100)}))
    assert len(str(many).splitlines()) == 201
    assert str(many).endswith("more")
