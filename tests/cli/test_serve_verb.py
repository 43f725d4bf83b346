"""serve prints an address that opens the page, and ends with Ctrl-C; report names serve."""

from __future__ import annotations

import gzip
import re
import signal
import socket
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from huge_run import write_huge
from shardscope.cli import main
from shardscope.record import load


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_huge("large.parquet", num_calls=31 * 1_024)
    return "large.parquet"


def test_large_recording_is_served_until_it_is_interrupted(large: str) -> None:
    command = [sys.executable, "-m", "shardscope", "serve", large, "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert process.stdout.readline() == "Ctrl-C ends it.\n"  # else it may stay in the buffer
        printed = re.fullmatch(
            r"serving large.parquet at (http://127.0.0.1:\d+/\?token=.+)\n", line
        )
        assert printed is not None
        address = urlsplit(printed[1])
        connection = HTTPConnection(address.netloc, timeout=20)
        connection.request("GET", f"/?{address.query}")
        response = connection.getresponse()
        response.read()
        cookie = response.headers["Set-Cookie"].split(";")[0]
        connection.request("GET", "/", headers={"Cookie": cookie})
        document = gzip.decompress(connection.getresponse().read()).decode()
    finally:  # with a connection that is still open, as a browser's is
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=20)
    connection.close()
    assert (process.returncode, errors) == (0, "")
    assert output.splitlines() == ["ended"]
    assert '"num_served":31744' in document
    assert "connect-src 'self'" in document
    assert "`shardscope merge` and `shardscope show`, and not when it is served" in document


def test_port_in_use_and_missing_file_end_in_a_sentence(large: str) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        result = CliRunner().invoke(main, ["serve", large, "--no-open", "--port", port])
    assert result.exit_code == 2
    assert f"port {port} of 127.0.0.1 cannot be used: Address already in use." in result.stderr
    result = CliRunner().invoke(main, ["serve", "missing.parquet"])
    assert (result.exit_code, "there is no file 'missing.parquet'" in result.stderr) == (2, True)


def test_report_of_a_recording_that_is_too_large_for_one_file_names_serve(large: str) -> None:
    result = CliRunner().invoke(main, ["report", large])
    assert result.exit_code == 0
    assert result.stdout == "saved large.html\n"
    assert "the page lists 30,000 of 31,744 collectives at most. `shardscope serve` shows all" in (
        result.stderr
    )
    assert Path("large.html").stat().st_size < 5_000_000
    assert len(load(large).collectives) == 31_744
