"""`shardscope mcp` with the client of the official SDK, over standard input and output."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import click
import jsonschema
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.exceptions import MCPError
from mcp.types import CallToolResult, ListRootsResult, Root
from pydantic import FileUrl

from cli.small_target import TARGET
from cli.test_help import COMMANDS
from compared_recordings import make_pair
from shardscope.cli.mcp_catalog import TOOLS, read_skill
from shardscope.cli.mcp_tools import COMMON
from shardscope.launch.processes import list_descendants
from shardscope.record import save
from shardscope.report.result.schema import make_result_schema

VALIDATOR = jsonschema.Draft202012Validator(make_result_schema())
ROOT = Path(__file__).resolve().parents[2]
FORKED = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open("pids", "w") as file:
    print(os.getpid(), child.pid, file=file, flush=True)
time.sleep(600)
"""


T = TypeVar("T")


def make_parameters(folder: Path) -> StdioServerParameters:
    return StdioServerParameters(
        command=sys.executable,
        args=["-m", "shardscope", "mcp"],
        env=dict(os.environ, PYTHONPATH=str(ROOT / "src"), OMP_NUM_THREADS="1"),
        cwd=folder,
    )


class Agent:
    """A client that is connected to one server, used from synchronous tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever)
        self._thread.start()
        self._is_done = asyncio.Event()
        self._connected: Future[Client] = Future()
        self._session = asyncio.run_coroutine_threadsafe(self._connect(), self._loop)
        self.client = self._connected.result(timeout=60)

    async def _connect(self) -> None:
        try:
            async with Client(stdio_client(make_parameters(self.folder))) as client:
                self._connected.set_result(client)
                await self._is_done.wait()
        except BaseException as error:
            if not self._connected.done():
                self._connected.set_exception(error)
            raise

    def wait(self, coroutine: Coroutine[Any, Any, T], timeout: float = 90) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        result = self.wait(self.client.call_tool(tool, arguments))
        return self.read(result)

    def start(self, tool: str, **arguments: Any) -> Future[CallToolResult]:
        call = self.client.call_tool(tool, arguments)
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def read(self, result: CallToolResult) -> dict[str, Any]:
        document: dict[str, Any] = result.structured_content
        VALIDATOR.validate(document)
        assert json.loads(result.content[0].text) == document  # type: ignore[union-attr]
        assert result.is_error == (document["verdict"] == "failed")
        return document

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._is_done.set)
        self._session.result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(f"print('from the target')\n{TARGET}")
    before, after = make_pair()
    save(before, folder / "before.json")
    save(after, folder / "after.json")
    agent = Agent(folder)
    try:
        yield agent
    finally:
        agent.close()


def test_tools_say_what_they_are_for_and_whether_they_execute_code(agent: Agent) -> None:
    tools = {tool.name: tool for tool in agent.wait(agent.client.list_tools()).tools}
    wanted = "run trace memory audit parity check explain diagnose diff query show coverage doctor"
    assert set(wanted.split()) <= set(tools)
    for name, tool in tools.items():
        assert len(tool.description or "") > 80
        assert tool.annotations is not None
        is_reading = name in ("diff", "compare", "hang", "show", "query", "doctor")
        assert tool.annotations.read_only_hint is is_reading
        assert tool.annotations.destructive_hint is not is_reading
        assert ("Executes the" in (tool.description or "")) is not is_reading
        jsonschema.Draft202012Validator.check_schema(tool.input_schema)


def test_every_argument_is_an_option_of_its_command() -> None:
    for tool in TOOLS:
        command = COMMANDS[(tool.name,)]
        options = {name: option for option in command.params for name in option.opts}
        positional = [
            option.name for option in command.params if isinstance(option, click.Argument)
        ]
        for argument in tool.arguments:
            if not argument.option:
                assert argument.name in positional, (tool.name, argument.name)
                continue
            kind = options[argument.option].type
            if argument.choices:
                assert isinstance(kind, click.Choice)
                assert list(argument.choices) == list(kind.choices)
            assert (argument.kind == "boolean") == getattr(
                options[argument.option], "is_flag", False
            )
            assert (argument.kind == "integer") == kind.name.startswith("integer")
        names = [argument.name for argument in (*tool.arguments, *COMMON)]
        assert len(names) == len(set(names))


def test_a_recording_is_made_read_and_compared(agent: Agent) -> None:
    messages: list[str] = []

    async def note(_progress: float, _total: float | None, message: str | None) -> None:
        messages.append(message or "")

    arguments = {"target": "train.py", "mesh": "dp=4", "output": "step.json"}
    traced = agent.read(
        agent.wait(agent.client.call_tool("trace", arguments, progress_callback=note))
    )
    assert traced["verdict"] == "ok"
    assert traced["figures"]["communication"]["count"] == 4
    assert traced["files"] == [{"path": "step.json"}]
    assert (agent.folder / "step.json").is_file()
    assert "from the target" in messages
    shown = agent.call("show", files=["step.json"])
    assert shown["figures"] == traced["figures"]
    sql = "SELECT kind, count(*) FROM collectives GROUP BY 1 ORDER BY 1"
    table = agent.call("query", sql=sql, files=["step.json"])["figures"]["table"]
    assert table["rows"] == [["all_gather", 2], ["reduce_scatter", 2]]
    tables = agent.call("query")["figures"]["table"]
    assert {"collectives", "findings"} <= {row[0] for row in tables["rows"]}
    changed = agent.call("diff", before="before.json", after="after.json", areas=["collectives"])
    assert changed["verdict"] == "problems"
    assert {row["area"] for row in changed["figures"]["comparisons"][0]["changes"]} == {
        "collectives"
    }


@pytest.mark.parametrize(
    ("tool", "arguments", "sentence"),
    [
        ("trace", {}, "tool trace needs either target or program, and got neither."),
        ("trace", {"target": "a.py", "program": ["b.py"]}, "and got both."),
        ("trace", {"target": "a.py", "mehs": "dp=2"}, "no argument 'mehs'. Did you mean 'mesh'?"),
        ("trace", {"target": "a.py", "mesh": 3}, "argument mesh must be of type string; got 3."),
        ("run", {}, "tool run needs the argument program. The training script"),
        ("run", {"program": "train.py --lr 1"}, "must be an array of strings; got 'train.py"),
        ("run", {"program": ["x.py"], "gpu": "tpu"}, "argument gpu must be one of h200,"),
        ("show", {"files": ["--help"]}, "argument files must not begin with a dash"),
        ("show", {"files": ["x"], "cwd": "nowhere"}, "Give cwd as an absolute path, or relative"),
        ("show", {"files": ["x"], "timeout_s": -1}, "argument timeout_s must be above 0; got -1."),
        ("show", {"files": ["before.json"], "contract": "no.toml"}, "no contract 'no.toml'"),
        ("show", {"files": ["gone.json"]}, "there is no file 'gone.json'. Check the path."),
    ],
)
def test_mistakes_get_a_sentence(
    agent: Agent, tool: str, arguments: dict[str, Any], sentence: str
) -> None:
    document = agent.call(tool, **arguments)
    assert document["verdict"] == "failed"
    assert sentence in document["error"]["message"]


def test_an_unknown_tool_is_an_error_of_the_protocol(agent: Agent) -> None:
    with pytest.raises(MCPError, match=r"there is no tool 'shout'. There are run, trace"):
        agent.call("shout")


def test_a_target_that_crashes_or_prints_does_not_disturb_the_server(agent: Agent) -> None:
    crash = "import os\nos.write(2, b'a last word\\n')\nos.kill(os.getpid(), 11)\n"
    (agent.folder / "crash.py").write_text(crash)
    document = agent.call("trace", target="crash.py", mesh="dp=2")
    assert document["exit_code"] == 128 + 11
    assert "ended with signal SIGSEGV and without a result" in document["error"]["message"]
    assert "a last word" in document["error"]["message"]
    assert agent.call("show", files=["before.json"])["verdict"] in ("ok", "problems")


def test_a_command_that_takes_too_long_is_ended(agent: Agent) -> None:
    os.mkfifo(agent.folder / "hang.json")
    document = agent.call("show", files=["hang.json"], timeout_s=0.5)
    assert "it was ended after 0.5 s. Give more time with timeout_s" in document["error"]["message"]


def test_a_cancelled_command_is_ended_with_what_it_started(agent: Agent) -> None:
    (agent.folder / "forked.py").write_text(FORKED)
    call = agent.start("trace", target="forked.py", mesh="dp=2")
    pids = wait_for_text(agent.folder / "pids")
    call.cancel()
    wait_until_gone(list(map(int, pids.split())))


def wait_for_text(path: Path) -> str:
    for _ in range(600):
        if path.is_file() and path.read_text().endswith("\n"):
            return path.read_text()
        time.sleep(0.1)
    raise AssertionError(f"{path} was not written")


def wait_until_gone(pids: list[int]) -> None:
    remaining = list(pids)
    for _ in range(200):
        remaining = [pid for pid in remaining if is_running(pid)]
        if not remaining:
            return
        time.sleep(0.1)
    raise AssertionError(f"{remaining} are still running")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_the_skill_is_a_resource(agent: Agent) -> None:
    resource = agent.wait(agent.client.read_resource("shardscope://skill"))
    assert resource.contents[0].text == read_skill()  # type: ignore[union-attr]


def test_paths_are_relative_to_the_root_that_a_client_names(tmp_path: Path) -> None:
    root = tmp_path / "a project"
    root.mkdir()
    save(make_pair()[0], root / "run.json")

    async def list_roots(_context: Any) -> ListRootsResult:
        return ListRootsResult(roots=[Root(uri=FileUrl(root.as_uri()))])

    async def call() -> CallToolResult:
        transport = stdio_client(make_parameters(tmp_path))
        client = Client(transport, mode="legacy", list_roots_callback=list_roots)
        async with client:
            return await client.call_tool("show", {"files": ["run.json"]})

    with ThreadPoolExecutor(1) as thread:  # this one may be running an event loop of Playwright's
        result = thread.submit(lambda: asyncio.run(call())).result()
    assert result.structured_content["exit_code"] == 0


@pytest.mark.parametrize("how", ["eof", "interrupt"])
def test_a_server_that_ends_leaves_no_process(tmp_path: Path, how: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "shardscope", "mcp", "--root", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ, PYTHONPATH=str(ROOT / "src")),
    )
    assert server.stdin is not None
    assert server.stdout is not None
    os.mkfifo(tmp_path / "hang.json")
    opening = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }
    call = {"name": "show", "arguments": {"files": ["hang.json"]}}
    for message in (
        {"id": 1, "method": "initialize", "params": opening},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": call},
    ):
        server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    server.stdin.flush()
    writer = open_when_read(tmp_path / "hang.json")
    pids = list_descendants(server.pid)
    assert pids
    if how == "eof":
        server.stdin.close()
    else:
        server.send_signal(signal.SIGINT)
    assert server.wait(timeout=30) == (0 if how == "eof" else 130)
    wait_until_gone(pids)
    os.close(writer)
    server.stdout.close()
    server.stdin.close()


def open_when_read(path: Path) -> int:
    """Open a pipe for writing as soon as a process reads it, and let that wait for data."""
    for _ in range(600):
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # it has no reader yet
            time.sleep(0.1)
    raise AssertionError(f"{path} is not read")


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("raise ModuleNotFoundError('no mcp', name='mcp')\n", "which is not installed"),
        ("", "version 2 or newer"),  # an old one lacks names
    ],
)
def test_a_missing_package_is_named_with_the_remedy(text: str, fact: str, tmp_path: Path) -> None:
    (tmp_path / "mcp.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "shardscope", "mcp"],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ, PYTHONPATH=f"{tmp_path}:{ROOT / 'src'}"),
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"shardscope: shardscope mcp needs the package mcp, {fact}. Install it with: pip install "
        "'mcp>=2'.\n"
    )
