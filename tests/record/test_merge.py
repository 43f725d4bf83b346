"""Many ranks' recordings become one; conflicts are reported, not guessed."""

from __future__ import annotations

from itertools import permutations

import pytest
from msgspec.structs import replace

from sample_recordings import make_collective, make_llama, make_recording, make_run
from shardscope.errors import MergeError, RecordingError
from shardscope.record import (
    Axis,
    CollectiveKind,
    Finding,
    Gap,
    Group,
    Module,
    Parameter,
    RankSpan,
    Severity,
    merge,
    merge_files,
    save,
)


def _rank(rank, *, world_size=4, num_calls=2, **changes):
    calls = tuple(
        make_collective(rank=rank, order=order, group_order=order) for order in range(num_calls)
    )
    changes.setdefault("modules", (Module(name="", type="Net", ranks=(RankSpan(rank),)),))
    return make_recording(calls, world_size=world_size, ranks=(rank,), **changes)


def test_ranks_are_united_and_collectives_sorted():
    merged = merge([_rank(3), _rank(0), _rank(2), _rank(1)])
    assert merged.run.ranks == (RankSpan(0, 4),)
    assert [(call.rank, call.order) for call in merged.collectives] == [
        (rank, order) for rank in range(4) for order in range(2)
    ]
    assert merged.gaps == ()


def test_result_does_not_depend_on_the_order_of_recordings():
    parts = [_rank(rank, gaps=(Gap(place="x", fact=str(rank)),)) for rank in range(4)]
    results = {merge(order) for order in permutations(parts)}
    assert len(results) == 1


def test_recordings_without_ranks_merge_in_any_order():
    parts = [make_recording(ranks=(), gaps=(Gap(place=name, fact=""),)) for name in "ab"]
    assert merge(parts) == merge(parts[::-1])


def test_equal_modules_fold_and_different_ones_stay_apart():
    weight = Parameter(name="weight", shape=(5,), local_shape=(3,), dtype="float32")
    last = Module(
        name="", type="Net", ranks=(RankSpan(3),), parameters=(replace(weight, local_shape=(2,)),)
    )
    alike = [
        _rank(
            rank,
            modules=(Module(name="", type="Net", ranks=(RankSpan(rank),), parameters=(weight,)),),
        )
        for rank in range(3)
    ]
    merged = merge([*alike, _rank(3, modules=(last,))])
    assert [module.ranks for module in merged.modules] == [(RankSpan(0, 3),), (RankSpan(3),)]


def test_merging_one_recording_changes_nothing_but_order():
    whole = make_llama(num_layers=2, dp=1, ranks=tuple(range(8)))
    assert merge([whole]) == whole


def test_missing_ranks_are_one_gap():
    merged = merge([_rank(1), _rank(3)])
    assert merged.gaps == (Gap(place="world", fact="no recording of 2 of 4 ranks: 0-2/2"),)


def test_merging_in_two_steps_forgets_the_ranks_that_were_missing():
    whole = merge([merge([_rank(0), _rank(1)]), merge([_rank(2), _rank(3)])])
    assert whole == merge([_rank(rank) for rank in range(4)])


def test_equal_findings_and_gaps_are_kept_once():
    finding = Finding(rule="r", severity=Severity.INFO, subject="s", fact="f", remedy="m")
    gap = Gap(place="p", fact="f")
    merged = merge([_rank(rank, findings=(finding,), gaps=(gap,)) for rank in range(4)])
    assert merged.findings == (finding,)
    assert merged.gaps == (gap,)


def test_different_worlds_do_not_merge():
    with pytest.raises(
        MergeError, match=r"rank 0 is of a world of 4 ranks, rank 1 of 8. Merge only"
    ):
        merge([_rank(0), _rank(1, world_size=8)])


def test_real_and_simulated_do_not_merge():
    simulated = _rank(1, run=make_run(world_size=4, ranks=(1,), is_simulated=True))
    with pytest.raises(MergeError, match=r"rank 1 was simulated, rank 0 was real"):
        merge([simulated, _rank(0)])


def test_the_same_rank_twice_does_not_merge():
    with pytest.raises(MergeError, match=r"rank 1 is in more than one recording. Merge one file"):
        merge([_rank(0), _rank(1), _rank(1)])


def test_merging_no_recordings_is_an_error():
    with pytest.raises(MergeError, match=r"nothing to merge"):
        merge([])


def _group(**changes):
    facts = {"name": "tp", "torch_name": "1", "ranks": (RankSpan(0, 2),), "num_ranks": 2}
    return Group(**(facts | changes))


def test_groups_that_differ_in_torchs_name_only_are_one():
    parts = [_rank(0, groups=(_group(),)), _rank(1, groups=(_group(torch_name="7"),))]
    merged = merge(parts)
    assert merged.groups == (_group(),)
    assert all("group" not in gap.place for gap in merged.gaps)


def test_groups_of_one_name_with_other_ranks_are_a_gap():
    other = _group(ranks=(RankSpan(2, 2),), axis="tp")
    merged = merge([_rank(0, groups=(_group(),)), _rank(1, groups=(other,))])
    assert merged.groups == (_group(),)
    assert merged.gaps[-1] == Gap(
        place="group tp",
        fact="ranks 2-3 on axis tp here, ranks 0-1 on an earlier rank, kept",
        rank=1,
    )


def test_ranks_that_disagree_on_versions_or_mesh_are_gaps():
    axes = (Axis(name="tp", size=4),)
    parts = [
        _rank(0, run=make_run(world_size=4, ranks=(0,))),
        _rank(1, run=make_run(world_size=4, ranks=(1,), torch_version="2.12.0", axes=axes)),
    ]
    facts = [gap.fact for gap in merge(parts).gaps]
    assert "ranks disagree: 2.13.0 on rank 0; 2.12.0 on rank 1" in facts
    assert "ranks disagree: none on rank 0; tp=4 on rank 1" in facts
    assert merge(parts).run.axes == axes


def test_damaged_file_becomes_a_gap_that_names_it(tmp_path):
    for rank in range(4):
        save(_rank(rank), tmp_path / f"rank{rank}.json")
    damaged = tmp_path / "rank2.json"
    damaged.write_bytes(damaged.read_bytes()[:50])
    merged = merge_files(sorted(tmp_path.iterdir()))
    assert merged.run.ranks == (RankSpan(0, 2), RankSpan(3))
    assert merged.gaps[0].place == str(damaged)
    assert "is truncated" in merged.gaps[0].fact
    assert merged.gaps[1].fact == "no recording of 1 of 4 ranks: 2"


def test_files_none_of_which_can_be_read_are_an_error(tmp_path):
    with pytest.raises(RecordingError, match=r"none of the 2 files can be read; the first: there"):
        merge_files([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(RecordingError, match=r"^there is no file"):
        merge_files([tmp_path / "a"])
    with pytest.raises(RecordingError, match=r"nothing to merge"):
        merge_files([])


def _modules(types):
    return tuple(Module(name=name, type=kind, ranks=(RankSpan(0),)) for name, kind in types.items())


def _by(instrument, recording):
    calls = recording.collectives if instrument == "trace" else ()
    run = replace(recording.run, instruments=(instrument,))
    return replace(recording, run=run, collectives=calls)


def _of(root, rank, instrument="trace", **types):
    """A recording of a model of that class with these modules."""
    return _by(instrument, _rank(rank, modules=_modules({"": root, **types})))


def _ran(command, rank, instrument="trace", **changes):
    recording = _by(instrument, _rank(rank, **changes))
    return replace(recording, run=replace(recording.run, command=command))


def _save_each(folder, recordings):
    return [save(entry, folder / f"{name}.json") for name, entry in recordings.items()]


def test_instruments_may_have_seen_different_modules_of_a_model_that_was_found_later():
    types = {"fc": "Linear", "Teacher": "Teacher", "Teacher.fc": "Linear"}
    traced = _of("Net", 0, **types, **{"Teacher.dropout": "Dropout"})
    profiled = replace(_of("Net", 0, "memory", **types), collectives=())
    merged = merge([traced, profiled])
    assert set(merged.run.instruments) == {"memory", "trace"}
    assert set(types) < {module.name for module in merged.modules}


@pytest.mark.parametrize(
    ("recordings", "fact"),
    [
        (
            {"new": _rank(0), "old": _rank(0)},
            r"^rank 0 is in more than one recording, '.*new.json' and '.*old.json'. Merge one file",
        ),
        (
            {"a": _rank(0), "b": _rank(1), "c": _rank(2, world_size=8)},
            r"'.*/a.json' \(rank 0\) is of a world of 4 ranks, '.*/c.json' \(rank 2\) of 8",
        ),
        (
            {
                "real": _rank(0),
                "made": _rank(1, run=make_run(world_size=4, ranks=(1,), is_simulated=True)),
            },
            r"'.*/made.json' \(rank 1\) was simulated, '.*/real.json' \(rank 0\) was real",
        ),
        (
            {"none": make_recording(ranks=(), world_size=8), "some": _rank(1)},
            r"'.*/none.json' is of a world of 8 ranks, '.*/some.json' \(rank 1\) of 4",
        ),
        (
            {"a": _of("Llama", 0), "b": _of("Llama", 1), "c": _of("ViT", 2)},
            r"^these recordings are of different programs: the root module of '.*/a.json' "
            r"\(rank 0\) is a Llama, that of '.*/c.json' \(rank 2\) a ViT. Join only recordings "
            r"of one program; `shardscope diff` compares two.$",
        ),
        (
            {"a": _of("Net", 0, fc="Linear", act="ReLU"), "b": _of("Net", 1, fc="Conv2d")},
            r"'fc' is a Linear in '.*/a.json' \(rank 0\) and a Conv2d in '.*/b.json'",
        ),
        (
            {"a": _of("Net", 0, fc="Linear"), "b": _of("Net", 1, conv="Conv2d")},
            r"'.*/a.json' \(rank 0\) has the module 'fc', '.*/b.json' \(rank 1\) does not",
        ),
        (
            {"a": _ran("shardscope trace a.py", 0), "b": _ran("shardscope trace b.py -o x", 1)},
            r"different programs: '.*/a.json' \(rank 0\) is of a, '.*/b.json' \(rank 1\) of b",
        ),
        (
            {"a": _ran("a.py --lr 1", 0, modules=()), "b": _ran("b.py", 1, modules=())},
            r"'.*/a.json' \(rank 0\) is of a.py, '.*/b.json' \(rank 1\) of b.py",
        ),
        (
            {
                "trace": _of("Net", 0, layers="List", **{"layers.0": "Linear"}),
                "audit": _of(
                    "Net",
                    0,
                    "audit",
                    layers="List",
                    **{"layers.0": "Linear", "layers.1": "Linear"},
                ),
            },
            r"'.*/audit.json' \(rank 0\) has the module 'layers.1', '.*/trace.json' \(rank 0\)",
        ),
        (
            {"trace": _of("Net", 0), "audit": _of("Other", 0, "audit")},
            r"the root module of '.*/audit.json' \(rank 0\) is a Other, that of '.*/trace.json'",
        ),
    ],
    ids=[
        "rank twice",
        "other world",
        "simulated",
        "no ranks",
        "other root",
        "other classes",
        "other modules",
        "other target",
        "other script",
        "other depth",
        "other root for another instrument",
    ],
)
def test_files_that_do_not_belong_together_are_named(tmp_path, recordings, fact):
    with pytest.raises(MergeError, match=fact):
        merge_files(_save_each(tmp_path, recordings))


@pytest.mark.parametrize(
    "recordings",
    [
        [_of("First", 0, embed="Embedding"), _of("Last", 1, head="Linear")],
        [_of("Sequential", 0, **{"0": "Embedding"}), _of("Sequential", 1, **{"0": "Linear"})],
    ],
    ids=["classes of their own", "one class"],
)
def test_stages_of_a_pipeline_merge(recordings):
    send = make_collective(rank=0, kind=CollectiveKind.SEND, peer=1)
    stages = [replace(recordings[0], collectives=(send,)), recordings[1]]
    num_modules = len({*recordings[0].modules, *recordings[1].modules})
    assert len(merge(stages).modules) == num_modules
    on_a_mesh = [
        replace(recording, run=replace(recording.run, axes=(Axis(name="pp", size=4),)))
        for recording in recordings
    ]
    assert len(merge(on_a_mesh).modules) == num_modules


def test_ranks_that_hold_some_modules_in_another_form_merge():
    full = _of("Net", 0, embed="Embedding", up="Linear", down="Linear")
    without = _of("Net", 1, embed="Identity", up="Linear", down="Linear")
    assert len(merge([full, without]).modules) == 5


@pytest.mark.parametrize(
    ("command", "other"),
    [
        ("shardscope trace train.py --mesh dp=2", "shardscope memory ./train.py"),
        ("shardscope trace train.py", "train.py --steps 3"),
        ("shardscope trace --mesh dp=2 train.py", "shardscope audit package.train"),
        ("notebook.py", "shardscope memory model.py"),
        ("a.py", "b.py"),
        ("it's", ""),
    ],
)
def test_instruments_of_one_program_merge_however_they_were_started(command, other):
    parts = [_ran(command, 0), _ran(other, 0, "memory")]
    assert merge(parts).run.instruments == ("memory", "trace")


def test_models_that_were_not_given_to_a_trace_are_known_by_their_class():
    named = _of("Net", 0, "audit", fc="Linear")
    unnamed = _rank(0, modules=_modules({"Net": "Net", "Net.fc": "Linear", "Loss": "Loss"}))
    assert len(merge([named, _by("trace", unnamed)]).modules) == 2
    other = _rank(0, modules=_modules({"ViT": "ViT"}))
    with pytest.raises(MergeError, match="is a Net, that of rank 0 a ViT"):
        merge([named, _by("trace", other)])


def test_merge_reports_its_progress(tmp_path):
    told = []
    merge_files(_save_each(tmp_path, {"a": _rank(0), "b": _rank(1)}), report=told.append)
    assert told == [
        f"reading {tmp_path}/a.json (1 of 2)",
        f"reading {tmp_path}/b.json (2 of 2)",
        "joining them",
    ]


def test_forward_passes_of_ranks_are_those_that_are_known():
    def merged(*counts):
        return merge(
            make_recording(run=make_run(world_size=3, ranks=(rank,), num_forwards=count))
            for rank, count in enumerate(counts)
        ).run.num_forwards

    assert [merged(2, 2, 2), merged(2, None, 3), merged(None, None, None)] == [2, 3, None]


def test_nodes_of_different_sizes_have_no_common_size():
    def merged(*sizes):
        return merge(
            make_recording(run=make_run(world_size=3, ranks=(rank,), ranks_per_node=size))
            for rank, size in enumerate(sizes)
        ).run.ranks_per_node

    assert [merged(4, 4, 4), merged(4, None, 4), merged(4, 8, 4)] == [4, 4, None]
