"""show, merge and export: what they print, write and exit with."""

from __future__ import annotations

import csv
import gzip
import json
from io import StringIO

import pytest
from click.testing import CliRunner

from sample_recordings import make_collective, make_llama, make_ranks, make_recording
from shardscope.cli import main
from shardscope.errors import OutputError
from shardscope.record import (
    Finding,
    Gap,
    Module,
    RankSpan,
    Severity,
    StreamWriter,
    load,
    save,
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Call the command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *args: CliRunner().invoke(main, [str(arg) for arg in args])


def _save_ranks(folder, num_ranks=4, *, short=None):
    """One file per rank; the rank `short` issues one collective fewer."""
    paths = []
    for rank in range(num_ranks):
        all_ranks = make_ranks(num_ranks, [{}] * (2 if rank == short else 3))
        calls = tuple(call for call in all_ranks.collectives if call.rank == rank)
        recording = make_recording(calls, world_size=num_ranks, ranks=(rank,))
        paths.append(save(recording, folder / f"rank{rank}.json"))
    return paths


@pytest.mark.parametrize("by", ["module", "axis", "kind", "cause"])
def test_show_prints_every_shape_and_exits_with_0(run, tmp_path, any_recording, by):
    save(any_recording, tmp_path / "run.json")
    result = run("show", "run.json", "--by", by)
    assert result.output.startswith("shardscope · ")
    assert result.exit_code == 0


def test_show_strict_exits_with_1_for_findings_and_gaps(run, tmp_path, any_recording):
    save(any_recording, tmp_path / "run.json")
    result = run("show", "run.json", "--strict")
    is_severe = {finding.severity for finding in any_recording.findings} - {Severity.INFO}
    assert "Gaps" in result.output or not any_recording.gaps
    if is_severe or any_recording.gaps:
        assert result.exit_code == 1
    else:
        assert result.exit_code == int("error rank-mismatch" in result.output)


def test_show_without_findings_exits_with_0(run, tmp_path, llama):
    save(llama, tmp_path / "run.json.gz")
    result = run("show", "run.json.gz")
    assert result.exit_code == 0
    assert "0 … 31 ×32" in result.output


def test_show_no_fold_shows_all_layers(run, tmp_path, llama):
    save(llama, tmp_path / "run.json")
    assert run("show", "run.json", "--no-fold").output.count("attention_norm") == 32


@pytest.mark.parametrize(("severity", "code"), [("error", 1), ("warning", 1), ("info", 0)])
def test_show_exits_with_1_for_warnings_and_errors_only_if_strict(run, tmp_path, severity, code):
    finding = Finding(
        rule="r", severity=Severity(severity), subject="s", fact="f", remedy="Do this."
    )
    save(make_recording(findings=(finding,)), tmp_path / "run.json")
    result = run("show", "run.json")
    assert result.exit_code == 0
    assert "Do this." in result.output
    assert run("show", "run.json", "--strict").exit_code == code


def test_gaps_are_fatal_only_if_strict(run, tmp_path):
    save(make_recording(gaps=(Gap(place="p", fact="f"),)), tmp_path / "run.json")
    assert run("show", "run.json").exit_code == 0
    assert run("show", "run.json", "--strict").exit_code == 1


def test_show_reads_a_stream(run, tmp_path):
    writer = StreamWriter(tmp_path / "run.jsonl", make_recording().run)
    writer.write(make_collective())
    writer.close()
    assert "1 collective per rank" in run("show", "run.jsonl").output


def test_show_of_several_files_is_one_run(run, tmp_path):
    result = run("show", *_save_ranks(tmp_path))
    assert result.exit_code == 0
    assert "all 4 ranks" in result.output


def test_show_of_several_files_finds_ranks_that_disagree(run, tmp_path):
    result = run("show", *_save_ranks(tmp_path, short=2), "--strict")
    assert result.exit_code == 1
    assert "error rank-mismatch" in result.output


def test_merge_writes_one_recording(run, tmp_path):
    result = run("merge", *_save_ranks(tmp_path), "-o", "all.json.gz")
    assert result.exit_code == 0
    assert result.output == (
        "4 of 4 ranks, 12 collectives\n"
        "No findings (which checks ran was not recorded).\n"
        "\nsaved all.json.gz\n"
    )
    merged = load(tmp_path / "all.json.gz")
    assert len(merged.collectives) == 12


def test_merge_saves_and_prints_the_mismatch_and_exits_with_1(run, tmp_path):
    result = run("merge", *_save_ranks(tmp_path, short=1), "-o", "all.json")
    assert result.exit_code == 1
    assert "rank 1 issued nothing" in " ".join(result.output.split())
    assert [f.rule for f in load(tmp_path / "all.json").findings] == ["rank-mismatch"]


def test_merging_a_merged_file_again_does_not_repeat_findings(run, tmp_path):
    paths = _save_ranks(tmp_path, short=1)
    run("merge", *paths[:2], "-o", "half.json")
    run("merge", "half.json", *paths[2:], "-o", "all.json")
    whole = load(tmp_path / "all.json")
    assert len(whole.findings) == 1
    assert whole.gaps == ()


def test_merge_with_a_damaged_file_is_a_gap(run, tmp_path):
    paths = _save_ranks(tmp_path)
    paths[3].write_bytes(b"{")
    result = run("merge", *paths, "-o", "all.json")
    assert result.exit_code == 0
    assert "Gaps (2)" in result.output
    assert run("merge", *paths, "-o", "all.json", "--force", "--strict").exit_code == 1


def _stream_ranks(folder, num_ranks=4):
    """One stream per rank, each with five collectives that differ in dtype."""
    paths = []
    for rank in range(num_ranks):
        paths.append(folder / f"rank{rank}.jsonl")
        run = make_recording(world_size=num_ranks, ranks=(rank,)).run
        writer = StreamWriter(paths[-1], run)
        writer.write(make_recording(world_size=num_ranks).groups[0])
        for order in range(5):
            writer.write(
                make_collective(rank=rank, order=order, group_order=order, dtype=f"int{order}")
            )
        writer.close()
    return paths


@pytest.mark.parametrize("verb", [("show",), ("report", "-o", "x.html"), ("merge", "-o", "x.json")])
def test_recordings_of_different_programs_are_refused_by_name(run, tmp_path, verb):
    for rank, kind in enumerate(("Llama", "ViT")):
        module = Module(name="", type=kind, ranks=(RankSpan(rank),))
        recording = make_recording(world_size=2, ranks=(rank,), modules=(module,))
        save(recording, tmp_path / f"{kind}.json")
    name, *options = verb
    result = run(name, "Llama.json", "ViT.json", *options)
    assert result.exit_code == 2
    assert (
        "different programs: the root module of 'Llama.json' (rank 0) is a Llama" in result.output
    )
    assert "that of 'ViT.json' (rank 1) a ViT" in result.output


@pytest.mark.parametrize("damage", ["killed", "damaged line", "cut line"])
def test_a_damaged_stream_is_a_gap_and_not_a_finding(run, tmp_path, damage):
    paths = _stream_ranks(tmp_path)
    lines = paths[2].read_bytes().splitlines(keepends=True)
    if damage == "killed":
        del lines[-3:]
    elif damage == "cut line":
        lines = [*lines[:-3], lines[-3][:20]]
    else:
        lines[3] = b"garbage\n"
    paths[2].write_bytes(b"".join(lines))
    result = run("merge", *paths, "-o", "all.json")
    assert "rank-mismatch" not in result.output
    assert result.exit_code == 0
    again = run("show", "all.json")
    assert "rank-mismatch" not in again.output
    assert again.exit_code == 0
    half = run("merge", *paths[2:], "-o", "half.json")
    assert half.exit_code == 0
    assert run("merge", *paths[:2], "half.json", "-o", "both.json").exit_code == 0


def test_rank_that_stopped_in_a_complete_stream_is_a_finding(run, tmp_path):
    paths = _stream_ranks(tmp_path)
    lines = paths[2].read_bytes().splitlines(keepends=True)
    lines[-2:] = [b'{"end": {"num_records": 5}}\n']
    paths[2].write_bytes(b"".join(lines))
    result = run("merge", *paths, "-o", "all.json")
    assert result.exit_code == 1
    assert "rank 2 issued nothing after" in " ".join(result.output.split())


def test_merge_does_not_overwrite(run, tmp_path):
    paths = _save_ranks(tmp_path)
    assert run("merge", *paths, "-o", "all.json").exit_code == 0
    result = run("merge", *paths, "-o", "all.json")
    assert result.exit_code == 2
    assert "already exists" in result.stderr
    assert "--force" in result.stderr
    assert run("merge", *paths, "-o", "all.json", "--force").exit_code == 0


def test_merge_never_overwrites_what_it_reads(run, tmp_path):
    paths = _save_ranks(tmp_path)
    before = paths[0].read_bytes()
    for force in ((), ("--force",)):
        result = run("merge", *paths, "-o", paths[0], *force)
        assert result.exit_code == 2
        assert "is one of the recordings to read and would be overwritten" in result.stderr
    assert paths[0].read_bytes() == before


def test_merge_of_files_that_do_not_belong_together(run, tmp_path):
    paths = _save_ranks(tmp_path)
    result = run("merge", paths[0], paths[0], "-o", "all.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("shardscope: rank 0 is in more than one recording, '")
    assert result.stderr.count("rank0.json") == 2


def test_export_writes_next_to_the_recording(run, tmp_path, llama):
    save(llama, tmp_path / "run.json.gz")
    for form, name in (
        ("perfetto", "run.perfetto.json"),
        ("csv", "run.csv"),
        ("json", "run.json"),
    ):
        result = run("export", tmp_path / "run.json.gz", "--to", form)
        assert result.exit_code == 0
        assert result.output == f"saved {tmp_path / name}\n"
    assert load(tmp_path / "run.json") == llama
    trace = json.loads((tmp_path / "run.perfetto.json").read_text())
    assert len([e for e in trace["traceEvents"] if e["ph"] == "X"]) == 356
    assert len(list(csv.reader(StringIO((tmp_path / "run.csv").read_text())))) == 357


def test_export_to_standard_output(run, tmp_path):
    recording = make_llama(num_layers=1)
    save(recording, tmp_path / "run.json")
    printed = run("export", "run.json", "--to", "json", "-o", "-").stdout_bytes
    assert printed == (tmp_path / "run.json").read_bytes()


def test_export_does_not_overwrite(run, tmp_path, llama):
    save(llama, tmp_path / "run.json")
    (tmp_path / "run.csv").write_text("precious")
    result = run("export", "run.json", "--to", "csv")
    assert result.exit_code == 2
    assert "'run.csv' already exists" in result.stderr
    assert (tmp_path / "run.csv").read_text() == "precious"
    assert run("export", "run.json", "--to", "csv", "--force").exit_code == 0


def test_export_never_writes_a_recording_over_itself(run, tmp_path, llama):
    save(llama, tmp_path / "run.json")
    result = run("export", "run.json", "--to", "json", "--force")
    assert result.exit_code == 2
    assert "would be overwritten. Name another file with -o" in result.stderr


@pytest.mark.parametrize("form", ["perfetto", "csv", "json"])
def test_export_compresses_where_the_name_says_so(run, tmp_path, llama, form):
    save(llama, tmp_path / "run.json")
    run("export", "run.json", "--to", form, "-o", "copy.gz")
    plain = run("export", "run.json", "--to", form, "-o", "-").stdout_bytes
    assert gzip.decompress((tmp_path / "copy.gz").read_bytes()) == plain


def test_export_counts_gaps_on_stderr_and_they_are_fatal_only_if_strict(run, tmp_path):
    gaps = tuple(Gap(place="p", fact=fact) for fact in "ab")
    save(make_recording(gaps=gaps), tmp_path / "two.json")
    save(make_recording(gaps=gaps[:1]), tmp_path / "one.json")
    result = run("export", "two.json", "--to", "csv", "-o", "-")
    assert result.exit_code == 0
    assert "the recording has 2 gaps; `shardscope show` lists them." in result.stderr
    assert "gap" not in result.stdout
    assert "has 1 gap;" in run("export", "one.json", "--to", "csv").stderr
    strict = run("export", "two.json", "--to", "json", "-o", "copy.json", "--strict")
    assert strict.exit_code == 1
    assert (tmp_path / "copy.json").exists()


def test_export_without_gaps_says_nothing_of_them(run, tmp_path, llama):
    save(llama, tmp_path / "run.json")
    result = run("export", "run.json", "--to", "csv", "--strict")
    assert (result.exit_code, result.stderr) == (0, "")


def test_merge_prints_its_findings_even_if_it_cannot_save(run, tmp_path, monkeypatch):
    def fail(*_args, **_kwargs):
        raise OutputError("cannot write 'all.json': No space left on device. Choose a place.")

    monkeypatch.setattr("shardscope.cli.destination.save", fail)
    result = run("merge", *_save_ranks(tmp_path, short=1), "-o", "all.json")
    assert result.exit_code == 2
    assert "error rank-mismatch" in result.stdout
    assert "No space left on device" in result.stderr
    assert "saved" not in result.stdout


def test_nouns_are_singular_for_one(run, tmp_path):
    save(make_recording((make_collective(),), world_size=1), tmp_path / "one.json")
    result = run("merge", "one.json", "-o", "all.json")
    assert result.output.startswith("1 of 1 rank, 1 collective\n")


def test_export_of_every_shape(run, tmp_path, any_recording):
    save(any_recording, tmp_path / "run.json")
    for form in ("perfetto", "csv", "json"):
        assert run("export", "run.json", "--to", form, "-o", f"out.{form}").exit_code == 0
