"""The magics in a real IPython shell, and what notebooks show of results."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import sample_recordings as samples
from page_reader import read_page
from shardscope import (
    Memory,
    Recording,
    diff,
    load,
    memory,
    simulate,
    trace,
    visualize_sharding,
)
from shardscope.report.html import inline

FSDP = "from torch.distributed.fsdp import fully_shard"
TRAIN = """
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
for layer in net:
    fully_shard(layer, mesh=world.mesh)
net(torch.ones(2, 8)).sum().backward()
answer = 41
"""


@pytest.fixture(scope="module")
def ipython(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if find_spec("IPython") is None:
        pytest.skip("IPython is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        config = Config()
        config.HistoryManager.enabled = False
        patch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # restores it afterwards
        shell = InteractiveShell(config=config)
        shell.run_cell("%load_ext shardscope")
        yield shell
        _forget_compiled_cells()


def _forget_compiled_cells() -> None:
    """Let dynamo remove what it has put into the cells' namespace, before that is cleared."""
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture
def shell(ipython: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    _forget_compiled_cells()
    ipython.reset(new_session=False)
    for line in ("import torch", "from torch import nn", FSDP):
        ipython.run_cell(line)
    return ipython


def run(shell: Any, code: str) -> Any:
    """Run a cell, and return what it has displayed last."""
    shell.run_cell(code)
    return shell.user_ns.get("_") or None


def test_a_cell_is_traced_and_its_variables_stay(shell: Any, tmp_path: Path) -> None:
    recording = run(shell, f"%%shardscope --mesh dp=2 --output cell.json.gz{TRAIN}")
    assert isinstance(recording, Recording)
    assert shell.user_ns["answer"] == 41
    assert {call.kind for call in recording.collectives} == {"all_gather", "reduce_scatter"}
    assert recording.collectives[0].source is not None
    assert "net(torch.ones(2, 8))" in recording.collectives[0].source.text
    assert load("cell.json.gz") == recording
    assert run(shell, "%shardscope show cell.json.gz") == recording
    assert not run(shell, "%shardscope diff _ cell.json.gz")


def test_an_exception_of_the_cell_is_shown_as_usual(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = run(shell, "%%shardscope\nbefore = 1\n1 / 0")
    printed = capsys.readouterr()
    assert "ZeroDivisionError" in printed.out + printed.err
    assert shell.user_ns["before"] == 1
    assert "it ended early with ZeroDivisionError" in recording.gaps[0].fact


def test_memory_and_explain_observe_cells_too(shell: Any) -> None:
    run(shell, "model = nn.Linear(8, 8); optimizer = torch.optim.AdamW(model.parameters())")
    weight = shell.user_ns["model"].weight.tolist()
    step = "loss = model(torch.ones(2, 8)).sum()\nloss.backward()"
    result = run(shell, f"%%shardscope memory --gpu-memory 8GiB\n{step}")
    (profile,) = result.memory
    assert profile.device_bytes == 8 << 30
    assert {str(use.kind) for use in profile.at_peak} >= {"parameters", "optimizer_state"}
    assert shell.user_ns["model"].weight.tolist() == weight
    explained = run(
        shell,
        "%%shardscope explain\n"
        "f = torch.compile(lambda x: x.sin() + x.sum().item(), backend='eager')\n"
        "f(torch.ones(3))",
    )
    assert explained.explanations[0].num_break_sites == 1
    assert run(shell, "%shardscope audit model").run.instruments == ("audit",)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("%shardscope", "is not understood. Cells: %%shardscope [trace|memory|explain]"),
        ("%shardscope show", "%shardscope show is not understood"),
        ("%shardscope show none.json", "none.json"),
        ("%shardscope audit nothing", "there is no variable called 'nothing'"),
        ("%%shardscope --mesh dp\npass", "'dp' is not a mesh"),
        ("%%shardscope memory\npass", "there is no variable called model"),
        ("%%shardscope --model net\npass", "there is no variable called 'net'"),
    ],
)
def test_wrong_options_are_a_sentence_without_a_traceback(
    shell: Any, capsys: pytest.CaptureFixture[str], code: str, sentence: str
) -> None:
    assert run(shell, code) is None
    printed = capsys.readouterr()
    assert sentence in printed.out + printed.err
    assert "Traceback" not in printed.out + printed.err


def test_results_render_the_page_of_their_recording() -> None:
    model = nn.Linear(4, 4)
    before = trace(model)
    assert before._repr_html_() is None
    with simulate(mesh={"dp": 2}), before as traced:
        model(torch.ones(1, 4))
        estimate = memory(model, lambda: model(torch.ones(1, 4)).sum().backward())
    assert isinstance(estimate, Memory)
    for result in (traced, estimate):
        shown = result._repr_html_()
        assert shown is not None
        assert shown == result.recording._repr_html_()
        document = unescape(re.findall(r'srcdoc="([^"]*)"', shown)[0])
        assert read_page(document).run == read_page(result.recording.html()).run
        assert 'sandbox="allow-scripts allow-downloads"' in shown


class _Tags(HTMLParser):
    """Collects the tags and the text of a document."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"class", "style"}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_comparisons_and_layouts_render_as_coloured_text() -> None:
    changes = diff(samples.make_recording(), samples.make_varied())
    assert "monospace" in changes._repr_html_()  # notebooks show it in another font by themselves
    shown = _Tags(changes._repr_html_())
    assert shown.tags == {"pre", "span"}
    assert "shardscope diff" in shown.text
    assert "Totals" in shown.text
    with simulate(mesh={"dp": 2}) as world:
        tensor = torch.distributed.tensor.distribute_tensor(torch.ones(4, 4), world.mesh)
        layout = _Tags(visualize_sharding(tensor, name="<b>weight</b>")._repr_html_())
    assert layout.tags <= {"pre", "span"}
    assert "<b>weight</b>" in layout.text


def test_a_page_that_is_too_large_is_a_summary_and_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inline, "_MAX_BYTES", 1000)
    shown = samples.make_llama()._repr_html_()
    assert "too large for a notebook" in shown
    assert "<iframe" not in shown
    assert "layers" in shown
    assert len(shown) < 100_000
