"""A stream holds what happened up to the moment its writer was killed, and never stops a run."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from contextlib import suppress

import msgspec
import pytest

from sample_recordings import make_collective, make_recording, make_run
from shardscope.errors import OutputError, RecordingError
from shardscope.record import (
    Finding,
    Gap,
    Module,
    RankSpan,
    Severity,
    Span,
    SpanBegin,
    StreamWriter,
    load,
    merge,
    read_stream,
    save,
)
from shardscope.record.stream_lines import StreamHeader


def _records():
    return [
        make_recording().groups[0],
        Module(name="", type="Net", ranks=(RankSpan(0),)),
        make_collective(),
        make_collective(order=1, group_order=1),
        Finding(rule="r", severity=Severity.INFO, subject="s", fact="f", remedy="m"),
        Gap(place="here", fact="odd"),
    ]


def _write(path, records, *, closes=True):
    writer = StreamWriter(path, make_run())
    for record in records:
        writer.write(record)
    if closes:
        writer.close()
    return writer


def test_finished_stream_reads_back_as_a_recording(tmp_path):
    path = tmp_path / "run.jsonl"
    group, module, first, second, finding, gap = _records()
    writer = _write(path, _records())
    assert writer.failure is None
    assert load(path) == make_recording(
        (first, second), groups=(group,), modules=(module,), findings=(finding,), gaps=(gap,)
    )


def test_stream_can_be_saved_as_a_recording(tmp_path):
    _write(tmp_path / "run.jsonl", _records())
    recording = load(tmp_path / "run.jsonl")
    assert load(save(recording, tmp_path / "run.json.gz")) == recording


def test_each_record_is_on_disk_when_write_returns(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = StreamWriter(path, make_run())
    for number, record in enumerate(_records(), start=2):
        writer.write(record)
        assert path.read_bytes().count(b"\n") == number
    writer.close()


def test_stream_without_end_is_a_gap(tmp_path):
    _write(tmp_path / "run.jsonl", _records()[:3], closes=False)
    recording = load(tmp_path / "run.jsonl")
    assert len(recording.collectives) == 1
    (gap,) = recording.gaps
    assert gap.fact == "the stream has no end: the run was killed, or is still running"
    assert gap.rank == 0


def test_killed_process_leaves_a_readable_recording(tmp_path):
    path = tmp_path / "run.jsonl"
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[2])\n"
        "from sample_recordings import make_collective, make_run\n"
        "from shardscope.record import StreamWriter\n"
        "writer = StreamWriter(sys.argv[1], make_run())\n"
        "for order in range(5): writer.write(make_collective(order=order, group_order=order))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    tests = os.path.dirname(os.path.dirname(__file__))
    done = subprocess.run([sys.executable, "-c", code, str(path), tests], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [call.order for call in load(path).collectives] == [0, 1, 2, 3, 4]


def test_every_truncation_of_a_stream_loads_or_is_explained(tmp_path):
    path = tmp_path / "run.jsonl"
    _write(path, _records())
    data = path.read_bytes()
    header = data.index(b"\n")
    cut = tmp_path / "cut.jsonl"
    for length in range(len(data) - 1):
        cut.write_bytes(data[:length])
        if length < header:
            with pytest.raises(RecordingError, match=r"is truncated|is empty"):
                load(cut)
        else:
            assert load(cut).gaps


def test_damaged_lines_are_one_gap_with_their_numbers(tmp_path):
    path = tmp_path / "run.jsonl"
    _write(path, _records())
    lines = path.read_bytes().split(b"\n")
    lines[2] = b"\x00\x00garbage"
    lines[3] = b'{"collective": {"rank": "zero"}}'
    lines[6] = b'{"something": "new"}'
    path.write_bytes(b"\n".join(lines))
    recording = load(path)
    assert [call.order for call in recording.collectives] == [1]
    damage, loss = recording.gaps
    assert damage.place == f"{path}, line 3-4,7"
    assert "3 of its lines cannot be read, the first: JSON is malformed" in damage.fact
    assert loss.fact == "3 of the 6 records written are missing"


@pytest.mark.parametrize("closes", [True, False])
def test_losses_are_marked_and_stay_so_when_saved(tmp_path, closes):
    path = tmp_path / "run.jsonl"
    _write(path, _records(), closes=closes)
    lines = path.read_bytes().split(b"\n")
    lines[3] = lines[3][:10]
    path.write_bytes(b"\n".join(lines))
    recording = load(path)
    losses = [(gap.rank, gap.is_loss) for gap in recording.gaps]
    assert losses == [(None, False), (0, True), (0, True)]
    assert load(save(merge([recording]), tmp_path / "run.json")).gaps[-2:] == recording.gaps[-2:]


def test_blank_lines_are_no_damage(tmp_path):
    path = tmp_path / "run.jsonl"
    _write(path, _records())
    whole = load(path)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n\n  \n\t\n"))
    assert load(path) == whole


def test_line_numbers_count_blank_lines(tmp_path):
    path = tmp_path / "run.jsonl"
    _write(path, [])
    header, end, _ = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([header, b"", b"", b"x", b"", b"  y", end]))
    assert load(path).gaps[0].place == f"{path}, line 4-6/2"


def _peak_bytes(work):
    tracemalloc.start()
    try:
        result = work()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_millions_of_newlines_cost_no_memory(tmp_path):
    path = tmp_path / "run.jsonl"
    _write(path, _records())
    data = path.read_bytes().replace(b"\n", b"\n" * 500_000)
    recording, peak = _peak_bytes(lambda: read_stream(data, "run.jsonl"))
    assert len(recording.collectives) == 2
    assert peak < 1_000_000


def test_reading_stops_after_many_damaged_lines_and_costs_no_memory(tmp_path):
    path = tmp_path / "run.jsonl"
    _write(path, _records())
    data = path.read_bytes() + b"x\n\n" * 150_000
    recording, peak = _peak_bytes(lambda: read_stream(data, "run.jsonl"))
    assert len(recording.collectives) == 2
    assert peak < 1_000_000
    damage = recording.gaps[-1]
    assert damage.is_loss
    assert damage.fact.startswith("100000 of its lines cannot be read, the first: JSON is malf")
    assert damage.fact.endswith("; reading stopped there")
    assert damage.place.endswith(",…")
    assert len(damage.place) < 500


def test_damaged_line_is_not_repeated_in_full(tmp_path):
    path = tmp_path / "run.jsonl"
    _write(path, [])
    collective = msgspec.to_builtins(make_collective()) | {"kind": "x" * 100_000}
    with path.open("ab") as file:
        file.write(msgspec.json.encode({"collective": collective}) + b"\n")
    assert len(load(path).gaps[0].fact) < 300


def test_deeply_nested_line_is_a_gap(tmp_path):
    path = tmp_path / "run.jsonl"
    _write(path, [])
    with path.open("ab") as file:
        file.write(b'{"x":' + b"[" * 200_000 + b"\n")
    assert "line 3" in load(path).gaps[0].place


def test_stream_of_a_newer_version_says_upgrade(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(msgspec.json.encode(StreamHeader(run=make_run(), schema=99)) + b"\n")
    with pytest.raises(RecordingError, match=r"newer shardscope \(schema 99.*Upgrade"):
        load(path)


def test_stream_with_a_wrong_header_names_the_place(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"format": "shardscope.stream", "schema": 1, "run": {}}\n')
    with pytest.raises(RecordingError, match=r"at \$.run: object missing required field"):
        load(path)


def test_stream_refuses_to_overwrite(tmp_path):
    path = tmp_path / "run.jsonl"
    _write(path, [])
    with pytest.raises(OutputError, match=r"already exists.*--force"):
        StreamWriter(path, make_run())
    StreamWriter(path, make_run(world_size=2), force=True).close()
    assert load(path).run.world_size == 2


def test_stream_keeps_a_file_that_appears_meanwhile(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    real_open = os.open

    def open_late(name, flags, mode=0o777):
        path.write_text("another rank's")
        return real_open(name, flags, mode)

    monkeypatch.setattr(os, "open", open_late)
    with pytest.raises(OutputError, match=r"already exists"):
        StreamWriter(path, make_run())
    assert path.read_text() == "another rank's"


def test_stream_into_a_missing_folder_says_so(tmp_path):
    with pytest.raises(OutputError, match=r"there is no folder"):
        StreamWriter(tmp_path / "nowhere" / "run.jsonl", make_run())


def test_full_disk_is_refused_at_the_start():
    with pytest.raises(OutputError, match=r"cannot write the stream '/dev/full': No space left on"):
        StreamWriter("/dev/full", make_run())


def test_disk_that_fills_up_is_remembered_and_not_raised(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    writer = _write(path, [make_collective()], closes=False)

    def write(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)
    writer.write(make_collective())
    writer.close()
    assert writer.failure == f"stream '{path}' stops after 1 records: No space left on device"


def _descriptor_of(path):
    """The number under which this process has the file open."""
    target = os.stat(path)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            status = os.fstat(number)
            if (status.st_dev, status.st_ino) == (target.st_dev, target.st_ino):
                return number
    raise AssertionError("it is not open")


@pytest.mark.parametrize("is_replaced", [False, True], ids=["closed", "taken by another file"])
def test_stream_goes_on_when_the_program_closes_its_descriptor(tmp_path, is_replaced):
    path, others = tmp_path / "run.jsonl", tmp_path / "model.pt"
    writer = _write(path, [make_collective()], closes=False)
    number = _descriptor_of(path)
    os.close(number)
    taken = os.open(others, os.O_WRONLY | os.O_CREAT)
    if is_replaced:
        os.dup2(taken, number)
    writer.write(make_collective(order=1, group_order=1))
    writer.close()
    assert writer.failure is None
    assert os.fstat(taken).st_size == 0  # it is open, and nothing was written to it
    assert load(path) == make_recording(
        (make_collective(), make_collective(order=1, group_order=1)), groups=()
    )
    for descriptor in {taken, number} if is_replaced else {taken}:
        os.close(descriptor)


@pytest.mark.parametrize("is_there", [False, True], ids=["deleted", "another file"])
def test_stream_that_was_closed_and_lost_ends_without_an_error(tmp_path, is_there):
    path = tmp_path / "run.jsonl"
    writer = _write(path, [make_collective()], closes=False)
    os.close(_descriptor_of(path))
    path.rename(tmp_path / "moved.jsonl")
    if is_there:
        path.write_text("mine")
    writer.write(make_collective())
    writer.close()
    reason = "another file now has its name" if is_there else "No such file or directory"
    assert writer.failure == f"stream '{path}' stops after 1 records: {reason}"
    assert not is_there or path.read_text() == "mine"


def test_pipe_without_a_reader_is_refused_and_one_with_a_reader_is_written(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OutputError, match=r"a named pipe that nothing reads. Start its reader"):
        StreamWriter(pipe, make_run())
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    _write(pipe, [make_collective()])
    data = os.read(reader, 100_000)
    os.close(reader)
    assert read_stream(data, "pipe").collectives == (make_collective(),)


def test_a_full_pipe_does_not_block_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("shardscope.record.append_file._MAX_WAIT_MS", 1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = _write(pipe, [make_collective()] * 1_000)
    os.close(reader)
    assert writer.failure is not None
    assert writer.failure.endswith("records: Resource temporarily unavailable")


def test_text_that_is_not_utf8_does_not_end_the_stream(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = _write(path, [Gap(place="\udce9", fact=""), make_collective()])
    assert writer.failure is None
    recording = load(path)
    assert recording.gaps == (Gap(place="\\udce9", fact=""),)
    assert recording.collectives == (make_collective(),)


def test_writing_after_close_is_silent(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = _write(path, [])
    before = path.read_bytes()
    writer.write(make_collective())
    writer.close()
    assert path.read_bytes() == before


def test_threads_do_not_tear_each_others_lines(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = StreamWriter(path, make_run())

    def write(thread):
        for order in range(200):
            writer.write(make_collective(order=order, thread=str(thread), op="x" * 2000))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    recording = load(path)
    assert not recording.gaps
    assert len(recording.collectives) == 1600


def test_forked_child_writes_nothing(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = StreamWriter(path, make_run())
    child = os.fork()
    if child == 0:
        writer.write(make_collective())
        writer.close()
        os._exit(0)
    os.waitpid(child, 0)
    writer.close()
    assert load(path) == make_recording(groups=())


def test_stream_is_not_called_what_it_is_not(tmp_path):
    with pytest.raises(OutputError, match="would not be compressed"):
        StreamWriter(tmp_path / "run.jsonl.gz", make_run())
    assert list(tmp_path.iterdir()) == []


def _begin(name, start_ns=0, thread=""):
    return SpanBegin(rank=0, name=name, start_ns=start_ns, thread=thread)


def _find_stuck(path, begins, spans=()):
    writer = StreamWriter(path, make_run())
    for begin in begins:
        writer.write_begin(begin)
    for span in spans:
        writer.write(span)
    return [gap.fact.partition("first: ")[2] for gap in load(path).gaps if gap.place == "phases"]


def test_a_span_end_closes_the_last_open_span_of_its_name(tmp_path):
    begins = [_begin("task", 1), _begin("task", 5), _begin("wait", 7), _begin("task", 9)]
    first = Span(rank=0, name="task", start_ns=2, duration_ns=20, self_ns=1)
    on_device = Span(rank=0, name="wait", start_ns=8, duration_ns=1, self_ns=1, device="cuda:0")
    stuck = _find_stuck(tmp_path / "run.jsonl", begins, [first, on_device])
    assert stuck == ["task > wait > task"]
    third = Span(rank=0, name="task", start_ns=10, duration_ns=1, self_ns=1)
    assert _find_stuck(tmp_path / "2.jsonl", begins, [first, third]) == ["task > wait"]


def test_clock_that_steps_back_leaves_no_phase_open(tmp_path):
    begins = [_begin("step", 5_000), _begin("load", 6_000)]
    spans = [
        Span(rank=0, name=name, start_ns=0, duration_ns=0, self_ns=0) for name in ("load", "step")
    ]
    assert _find_stuck(tmp_path / "run.jsonl", begins, spans) == []


def test_very_many_open_spans_are_abbreviated(tmp_path):
    begins = [_begin(f"f{number}", number) for number in range(1000)]
    begins += [_begin("g", thread=f"t{number:03}") for number in range(500)]
    (fact,) = _find_stuck(tmp_path / "run.jsonl", begins)
    assert fact.startswith("f0 > f1 > ")
    assert " > f9 > … 980 more … > f990 > " in fact
    assert fact.endswith("g (thread t018); 481 more threads")


def test_streams_of_a_finished_run_have_no_open_spans_and_do_not_count_begins(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = StreamWriter(path, make_run())
    writer.write_begin(_begin("a"))
    writer.close()
    assert load(path).gaps == ()
