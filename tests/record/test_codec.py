"""Recordings survive the disk; files that are not recordings get one sentence."""

from __future__ import annotations

import gzip
import os
import socket
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import pytest
from msgspec.structs import replace

from sample_recordings import make_collective, make_recording, make_run
from shardscope.errors import OutputError, RecordingError
from shardscope.record import (
    Coverage,
    Explanation,
    Level,
    Mark,
    MarkKind,
    MemoryProfile,
    Module,
    OpCoverage,
    OpVerdict,
    Parameter,
    Phase,
    RankSpan,
    Recording,
    Source,
    StageTime,
    check_output,
    encode,
    encode_pieces,
    load,
    save,
    write_file,
)
from shardscope.record.encoding import encode_json, encode_shown_json
from shardscope.record.files import read_file


@pytest.mark.parametrize("name", ["run.json", "run.json.gz", "RUN.JSON.GZ", "no ending"])
def test_load_gives_back_what_save_wrote(tmp_path, any_recording, name):
    path = save(any_recording, tmp_path / name)
    assert path == tmp_path / name
    assert load(path) == any_recording


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_same_recording_gives_same_bytes(tmp_path, llama, name):
    first = save(llama, tmp_path / name).read_bytes()
    assert save(llama, tmp_path / name, force=True).read_bytes() == first


def test_gz_in_the_name_compresses_and_plain_does_not(tmp_path, llama):
    assert save(llama, tmp_path / "run.json").read_bytes().startswith(b"{")
    assert save(llama, tmp_path / "run.json.gz").read_bytes().startswith(b"\x1f\x8b")


def test_gzip_is_recognised_whatever_the_file_is_called(tmp_path, llama):
    path = save(llama, tmp_path / "run.json.gz").rename(tmp_path / "run.json")
    assert load(path) == llama


def test_pretty_printed_recording_loads(tmp_path, llama):
    path = tmp_path / "pretty.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(llama), indent=2))
    assert load(path) == llama


def test_text_that_is_not_unicode_is_saved_escaped(tmp_path):
    call = make_collective(source=Source(file=os.fsdecode(b"caf\xe9.py"), line=1))
    loaded = load(save(make_recording((call,)), tmp_path / "run.json"))
    assert loaded.collectives[0].source.file == "caf\\udce9.py"


_ACTIVE = "\x1b[31m \x7f \x9b \u202e \u2028 \ufeff \ue000 \U000e0041 ##[error]x\n"


def test_json_has_no_active_characters_and_is_read_back_unchanged():
    data = encode_json([_ACTIVE, "日本語 é # C#"])
    assert msgspec.json.decode(data) == [_ACTIVE, "日本語 é # C#"]
    assert b"##[" not in data
    assert [char for char in data.decode() if not char.isprintable()] == []
    assert "日本語 é" in data.decode()


def test_json_for_programs_that_show_it_has_escapes_in_its_texts():
    (text, plain) = msgspec.json.decode(encode_shown_json([_ACTIVE, 'a "b" \\ c/d']))
    assert text == (
        r"\u001b[31m \u007f \u009b \u202e \u2028 \ufeff \ue000 \udb40\udc41 ##[error]x\n"
    )
    assert plain == 'a "b" \\ c/d'


def test_save_refuses_to_overwrite_and_names_force(tmp_path):
    path = save(make_recording(), tmp_path / "run.json")
    before = path.read_bytes()
    with pytest.raises(OutputError, match=r"run.json' already exists.*--force .force=True"):
        save(make_recording((make_collective(),)), path)
    assert path.read_bytes() == before


def test_force_overwrites(tmp_path):
    path = save(make_recording(), tmp_path / "run.json")
    changed = make_recording((make_collective(),))
    assert load(save(changed, path, force=True)) == changed


def test_save_leaves_no_temporary_file(tmp_path):
    save(make_recording(), tmp_path / "run.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_save_into_a_missing_folder_says_so(tmp_path):
    with pytest.raises(OutputError, match=r"there is no folder '.*nowhere'. Create the folder"):
        save(make_recording(), tmp_path / "nowhere" / "run.json")


def test_save_over_a_folder_says_so(tmp_path):
    with pytest.raises(OutputError, match=r"it is a folder. Name a file inside it"):
        save(make_recording(), tmp_path, force=True)


def test_failing_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = save(make_recording(), tmp_path / "run.json")
    before = path.read_bytes()

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OutputError, match=r"No space left on device. Choose a writable location"):
        save(make_recording((make_collective(),)), path, force=True)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_save_follows_a_symlink(tmp_path):
    target = tmp_path / "target.json"
    target.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(target)
    save(make_recording(), link, force=True)
    assert link.is_symlink()
    assert load(target) == make_recording()


def test_save_keeps_a_file_that_appears_meanwhile(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    path.write_text("another's")
    # As if it had not been there yet when save looked.
    monkeypatch.setattr("shardscope.record.files.check_output", lambda *_, **__: None)
    with pytest.raises(OutputError, match=r"already exists.*--force"):
        save(make_recording(), path)
    assert path.read_text() == "another's"
    assert len(list(tmp_path.iterdir())) == 1


def _refuse_links(*_args):
    raise PermissionError(1, "Operation not permitted")


def test_save_works_and_keeps_files_where_there_are_no_hard_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", _refuse_links)
    path = save(make_recording(), tmp_path / "run.json")
    assert load(path) == make_recording()
    monkeypatch.setattr("shardscope.record.files.check_output", lambda *_, **__: None)
    with pytest.raises(OutputError, match=r"already exists"):
        save(make_recording((make_collective(),)), path)
    assert load(path) == make_recording()
    assert len(list(tmp_path.iterdir())) == 1


def test_of_many_threads_that_save_under_one_name_one_does(tmp_path):
    together = threading.Barrier(8)

    def write(number):
        def pieces():
            yield str(number).encode() * 1000
            together.wait(10)
            yield str(number).encode() * 1000

        try:
            write_file(pieces(), tmp_path / "run.json")
        except OutputError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(write, range(8))) == 1
    (path,) = tmp_path.iterdir()
    assert len(path.read_text()) == 2000
    assert len(set(path.read_text())) == 1


def test_overwritten_file_keeps_its_mode(tmp_path):
    path = save(make_recording(), tmp_path / "run.json")
    path.chmod(0o640)
    save(make_recording(), path, force=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_new_file_has_the_mode_of_any_new_file(tmp_path):
    (tmp_path / "other").touch()
    path = save(make_recording(), tmp_path / "run.json")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_folder_that_may_not_be_written_is_noticed_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "old.json").touch()
    # Tests may run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: os.fspath(path) != str(tmp_path))
    for name, force in (("new.json", False), ("old.json", True)):
        with pytest.raises(OutputError, match=r"may not write in the folder '.*'. Choose another"):
            check_output(tmp_path / name, force=force)
    check_output("/dev/null")


def test_name_of_any_length_the_disk_takes_is_fine(tmp_path):
    name = "名" * 80 + ".json"
    assert load(save(make_recording(), tmp_path / name)) == make_recording()


@pytest.mark.parametrize("thing", [None, {}, "run.json", [1]], ids=repr)
def test_saving_something_else_names_the_expected_type(tmp_path, thing):
    kind = type(thing).__name__
    with pytest.raises(RecordingError, match=rf"save\(\) got {kind}, not a Recording. Give it"):
        save(thing, tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


def test_encoded_chunks_make_up_the_json_of_the_recording(any_recording):
    assert encode(any_recording) == encode_json(any_recording) + b"\n"


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 10_000])
def test_encoded_chunks_fit_together_for_any_number_of_records(count):
    whole = make_recording(tuple(make_collective(order=order) for order in range(count)))
    assert encode(whole) == msgspec.json.encode(whole) + b"\n"
    assert max(map(len, encode_pieces(whole))) < 4096 * 800


def test_loaded_collectives_share_equal_values(tmp_path):
    calls = tuple(
        make_collective(order=n, owner="layers.0", source=Source(file="a.py", line=1))
        for n in range(2)
    )
    first, second = load(save(make_recording(calls), tmp_path / "run.json")).collectives
    assert first.owner is second.owner
    assert first.source is second.source
    assert (first, second) == calls


def test_a_device_is_written_to_not_replaced():
    save(make_recording(), "/dev/null", force=True)
    assert not os.path.isfile("/dev/null")
    assert os.path.exists("/dev/null")


def test_pipe_without_a_reader_is_refused_without_waiting(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for refuse in (check_output, lambda path: save(make_recording(), path)):
        with pytest.raises(OutputError, match=r"a named pipe that nothing reads"):
            refuse(pipe)


def test_pipe_is_not_ended_by_the_check_before_the_work(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_bytes)  # ends when the last writer closes the pipe
        while True:
            with suppress(OutputError):  # until the reader is there
                check_output(pipe)
                break
        save(make_recording(), pipe)
        assert read.result() == encode(make_recording())


def test_pipe_of_the_shell_is_written(tmp_path):
    reader, writer = os.pipe()
    save(make_recording(), f"/dev/fd/{writer}")
    os.close(writer)
    with open(reader, "rb") as file:
        assert file.read() == encode(make_recording())


def test_socket_is_refused(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        with pytest.raises(OutputError, match=r"it is a socket. Name a file."):
            save(make_recording(), path, force=True)


def test_full_device_is_a_sentence():
    with pytest.raises(OutputError, match=r"cannot write '/dev/full': No space left on device. Ch"):
        save(make_recording(), "/dev/full", force=True)


def _json(**changes) -> bytes:
    plain = msgspec.to_builtins(make_recording((make_collective(),)))
    return msgspec.json.encode(plain | changes)


def _with_collective(**changes) -> bytes:
    plain = msgspec.to_builtins(make_collective())
    return _json(collectives=[plain, plain, plain, plain | changes])


_DAMAGED = {
    "empty": (b"", r"is empty"),
    "blank": (b" \n\n ", r"is empty"),
    "truncated": (_json()[:-20], r"is truncated: its JSON stops at byte \d+"),
    "malformed": (_json()[:-1] + b",}", r"is damaged: its JSON is malformed at byte \d+"),
    "two values": (_json() + b"{}", r"malformed at byte \d+ \(trailing characters\)"),
    "text": (b"hello\n", r"does not start as a JSON object \(byte 0\)"),
    "binary": (bytes(range(256)), r"does not start as a JSON object"),
    "pickle": (b"\x80\x04\x95\x0b.", r"does not start as a JSON object"),
    "list": (b"[1, 2]", r"at the top level \(\$\): expected `object`, got `array`"),
    "foreign": (b'{"traceEvents": []}', r"the key 'format' is missing \(expected 'shardscope.rec"),
    "other format": (b'{"format": "x"}', r"the key 'format' is 'x' \(expected"),
    "too new": (_json(schema=99), r"newer shardscope \(schema 99.*Upgrade shardscope: pip install"),
    "too old": (_json(schema=0), r"schema 0 at \$.schema, older than"),
    "schema a word": (_json(schema="1"), r"at \$.schema: expected `int`, got `str`"),
    "wrong type": (_with_collective(rank="0"), r"at \$.collectives\[3\].rank: expected `int`"),
    "unknown kind": (_with_collective(kind="shout"), r"at \$.collectives\[3\].kind: invalid enum"),
    "unknown cause": (_with_collective(cause={"type": "x"}), r"\$.collectives\[3\].cause"),
    "negative": (
        _with_collective(wire_bytes=-1),
        r"collectives\[3\].wire_bytes: expected `int` >=",
    ),
    "huge number": (_with_collective(order=10**30), r"collectives\[3\].order: expected `int` <="),
    "missing field": (b'{"format": "shardscope.recording", "schema": 1}', r"missing .* `run`"),
    "not UTF-8": (_json().replace(b"c10d", b"\xff\xfe"), r"text that is not UTF-8 \(byte 0xff"),
    "deep": (b'{"x":' + b"[" * 200_000, r"nests JSON too deeply"),
    "deep inside": (_json().replace(b'"c10d.allreduce_"', b"[" * 200_000), r"nests|truncated"),
    "truncated gzip": (gzip.compress(_json())[:-30], r"its gzip data stops after \d+ bytes"),
    "damaged gzip": (gzip.compress(_json())[:-8] + bytes(8), r"cannot be decompressed"),
    "gzip of text": (gzip.compress(b"hello"), r"does not start as a JSON object"),
    "endless span": (_json(modules=[{"name": "", "type": "", "ranks": [[0, 10**18]]}]), r"ranks"),
    "span without step": (
        _json(modules=[{"name": "", "type": "", "ranks": [[0, 2, 0]]}]),
        r"at \$.modules\[0\].ranks\[0\]\[2\]: expected `int` >= 1",
    ),
    "rank beyond the world": (
        _json(modules=[{"name": "", "type": "", "ranks": [[0, 9]]}]),
        r"names rank 8 at \$.modules\[0\].ranks, but its world size is 8",
    ),
}


@pytest.mark.parametrize("case", _DAMAGED)
def test_damaged_file_is_one_sentence_that_names_it(tmp_path, case):
    data, fact = _DAMAGED[case]
    path = tmp_path / "run.json"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=fact) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


_LONG = {
    "format": b'{"format": "' + b"x" * 100_000 + b'"}',
    "schema": _json(schema=0).replace(b'"schema":0', b'"schema":' + b"9" * 400),
    "kind": _with_collective(kind="x" * 100_000),
    "cause": _with_collective(cause={"type": "x" * 100_000}),
}


@pytest.mark.parametrize("case", _LONG)
def test_long_values_of_a_foreign_file_are_not_repeated_in_full(tmp_path, case):
    path = tmp_path / "run.json"
    path.write_bytes(_LONG[case])
    with pytest.raises(RecordingError, match="…") as caught:
        load(path)
    assert len(str(caught.value)) < len(str(path)) + 500


def test_missing_file_says_so(tmp_path):
    with pytest.raises(RecordingError, match=r"there is no file '.*gone.json'. Check the path"):
        load(tmp_path / "gone.json")


def test_folder_says_so(tmp_path):
    with pytest.raises(RecordingError, match=r"is a folder, not a recording"):
        load(tmp_path)


def test_unreadable_file_says_so(tmp_path, monkeypatch):
    def refuse(*_args):
        raise PermissionError(13, "Permission denied")

    # Tests may run as root, who may read everything.
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RecordingError, match=r"may not be read by this user"):
        load(tmp_path / "run.json")


def test_name_with_a_nul_says_so():
    with pytest.raises(RecordingError, match=r"cannot be read: embedded null byte"):
        load("run\0.json")


def test_gzip_bomb_is_stopped_early(tmp_path):
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * 10_000_000))
    with pytest.raises(RecordingError, match=r"holds more than 1000000 bytes"):
        read_file(path, max_bytes=1_000_000)


def test_endless_device_is_stopped_early():
    with pytest.raises(RecordingError, match=r"'/dev/zero' holds more than"):
        read_file("/dev/zero", max_bytes=5_000_000)


def test_unknown_fields_of_later_versions_are_ignored(tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(_json(later="field"))
    assert isinstance(load(path), Recording)


def test_load_changes_nothing_it_reads(tmp_path):
    odd = replace(make_recording((make_collective(group="no such group"),)), groups=())
    assert load(save(odd, tmp_path / "run.json")) == odd


def test_reading_a_recording_needs_no_torch():
    code = "import sys, shardscope.record; assert 'torch' not in sys.modules"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


def _write_schema_1(path, recording):
    """A file as versions before schema 2 wrote them."""
    plain = msgspec.json.decode(encode(recording))
    plain["schema"] = 1
    del plain["run"]["num_forwards"], plain["run"]["device_type"]
    path.write_bytes(msgspec.json.encode(plain))
    return load(path)


@pytest.mark.parametrize(
    ("is_simulated", "before", "after"),
    [
        (True, (0, 5000), (None, None)),  # the simulation's own clock
        (False, (0, 0), (None, None)),  # a clock that was not read
        (False, (0, 5000), (0, 5000)),
    ],
)
def test_times_of_schema_1_are_those_of_a_run_or_none(tmp_path, is_simulated, before, after):
    calls = tuple(make_collective(order=at, start_ns=time) for at, time in enumerate(before))
    run = make_run(is_simulated=is_simulated)
    upgraded = _write_schema_1(tmp_path / "old.json", make_recording(calls, run=run))
    assert tuple(call.start_ns for call in upgraded.collectives) == after
    assert upgraded.schema == 2
    assert load(save(upgraded, tmp_path / "new.json")) == upgraded


def test_zeros_of_schema_1_that_stood_for_nothing_are_none(tmp_path):
    sized = {"shape": (2, 2), "local_shape": (1, 2), "dtype": "float32"}
    parameters = (
        Parameter(name="unknown", **sized, global_bytes=0, local_bytes=0),
        Parameter(name="known", **sized, global_bytes=16, local_bytes=0),
        Parameter(
            name="empty", shape=(0,), local_shape=(0,), dtype="int8", global_bytes=0, local_bytes=0
        ),
    )
    module = Module(
        name="",
        type="M",
        ranks=(RankSpan(0),),
        parameters=parameters,
        marks=(Mark(kind=MarkKind.COMPILED, num_parameters=0),),
    )
    profile = MemoryProfile(
        rank=0,
        peak_bytes=0,
        peak_order=0,
        peak_phase=Phase.FORWARD,
        first_peak_bytes=0,
        reserved_bytes=0,
        needed_bytes=7,
    )
    verdicts = {"on plain tensors, each rank's own": OpVerdict.LOCAL, "": OpVerdict.SHARDED}
    ops = tuple(
        OpCoverage(op="aten.t", schema="", verdict=OpVerdict.SHARDED, flops=0, detail=detail)
        for detail in verdicts
    )
    coverage = Coverage(rank=0, level=Level.EXPORTED, axes=(), has_plan=True, ops=ops)
    stage = StageTime(stage="aot", num_calls=1, total_ns=0)
    old = make_recording(
        modules=(module,),
        memory=(profile,),
        coverage=(coverage,),
        explanations=(Explanation(rank=0, target="f", fingerprint="", stages=(stage,)),),
    )
    new = _write_schema_1(tmp_path / "old.json", old)
    (upgraded,) = new.modules
    sizes = [(parameter.global_bytes, parameter.local_bytes) for parameter in upgraded.parameters]
    assert sizes == [(None, None), (16, 0), (0, 0)]
    assert upgraded.marks[0].num_parameters is None
    (memory,) = new.memory
    assert (memory.first_peak_bytes, memory.reserved_bytes, memory.needed_bytes) == (None, None, 7)
    assert [op.verdict for op in new.coverage[0].ops] == list(verdicts.values())
    assert {op.flops for op in new.coverage[0].ops} == {None}
    assert new.explanations[0].stages[0].total_ns is None
    assert load(save(old, tmp_path / "new.json")) == old


def test_the_representation_of_a_recording_has_no_control_characters() -> None:
    root = Module(name="", type="\x1b[2J\u202eNet", ranks=(RankSpan(0),))
    recording = make_recording(modules=(root,))
    assert repr(recording).startswith(r"Recording(\x1b[2J\u202eNet, ")
    assert repr(recording).isprintable()
