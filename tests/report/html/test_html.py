"""The HTML file: it carries the page, and nothing that was recorded can get out of it."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sample_recordings as samples
from large_recording import ATTACKS, NUM_CALLS, NUM_MODULES, make_hostile, make_large
from page_reader import Document, read_page
from shardscope.record import Recording
from shardscope.report.html.html import build_page, render_html
from shardscope.report.html.page import Page

TAGS = ["html", "head", "meta", "meta", "meta", "meta", "meta", "title", "style", "body"]
TAGS += ["noscript", "div", "script", "script"]
MAX_BYTES = 5_000_000


@pytest.fixture(scope="module")
def hostile() -> str:
    return render_html(make_hostile())


def test_the_file_carries_the_page_of_every_shape(any_recording: Recording) -> None:
    html = render_html(any_recording)
    assert read_page(html) == build_page(any_recording)
    assert Document(html).tags() == TAGS
    assert any_recording.html() == html


def test_the_same_recording_gives_the_same_bytes_in_any_process() -> None:
    program = (
        "import hashlib, sample_recordings as s\n"
        "for r in (s.make_varied(), s.make_holdings(), s.make_llama(num_layers=2)):\n"
        "    print(hashlib.sha256(r.html().encode()).hexdigest())"
    )
    tests = Path(__file__).parents[2]
    path = os.pathsep.join([str(tests), str(tests.parent / "src")])
    texts = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": path, "PYTHONHASHSEED": seed, "TZ": zone, "HOME": home},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed, zone, home in (("1", "UTC", "/root"), ("2", "Asia/Tokyo", "/nowhere"))
    ]
    assert len(texts[0].split()) == 3
    assert texts[0] == texts[1]


def test_hostile_text_is_in_the_data_only(hostile: str) -> None:
    document = Document(hostile)
    assert document.tags() == TAGS
    data, _ = document.texts_of("script")
    assert not set("<>&\u2028\u2029\x00\u202e\u200b\ufeff\u2066") & set(data)
    assert [list(attributes) for tag, attributes in document.elements if tag == "script"] == [
        ["type", "id"],
        [],
    ]


def test_hostile_text_is_displayed_unchanged(hostile: str) -> None:
    page = read_page(hostile)
    assert page.run.command == ATTACKS[1]
    shown = set(page.run.instruments)
    for text in ATTACKS:
        if text.isascii() and text.isprintable():
            assert text in shown
    assert "nul \\x00 bell \\x07 escape \\x1b[31m delete \\x7f" in shown
    assert "lone \\ud800 surrogate \\udfff" in shown
    assert "right \\u202eto left\\u202c and \\u2066isolated\\u2069" in shown
    assert "日本語 🚀 e\u0301" in shown


def test_a_browser_may_run_the_bundle_and_nothing_else(hostile: str) -> None:
    document = Document(hostile)
    policy = next(
        attributes["content"]
        for tag, attributes in document.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    _, script = document.texts_of("script")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy).split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert rules["img-src"] == "data:"
    fetching = {"src", "href", "srcset", "data", "action", "background"}
    assert not any(fetching & set(attributes) for _, attributes in document.elements)


def test_the_title_is_escaped() -> None:
    program = "</title><script>alert(1)</script>"
    recording = samples.make_parallel()
    first = recording.parallel[0]
    recording = samples.make_recording(
        parallel=(type(first)(program=program, axes=(), is_training=False, num_ops=0),)
    )
    html = render_html(recording)
    assert Document(html).tags() == TAGS
    assert Document(html).texts_of("title") == [f"{program} on 8 ranks"]


def test_a_notebook_shows_the_same_document_in_a_frame(llama: Recording) -> None:
    inline = Document(llama._repr_html_())
    ((tag, attributes),) = inline.elements
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts allow-downloads")
    assert attributes["srcdoc"] == llama.html()


def test_a_page_without_scripts_explains_what_to_do(llama: Recording) -> None:
    (apology,) = Document(llama.html()).texts_of("noscript")
    assert "shardscope show" in apology


@pytest.fixture(scope="module")
def large() -> tuple[str, Page]:
    # Two seconds well spent: the bar of the file's size is for a recording of this size.
    html = render_html(make_large())
    return html, read_page(html)


def test_a_large_recording_is_at_most_five_megabytes(large: tuple[str, Page]) -> None:
    html, page = large
    assert len(html.encode()) <= MAX_BYTES
    assert len(page.modules.path) == NUM_MODULES
    assert page.communication is not None
    assert len(page.communication.calls.rank) == NUM_CALLS
    assert len({*page.communication.calls.rank}) == 64


def test_layers_of_a_large_model_fold(large: tuple[str, Page]) -> None:
    _, page = large
    modules = page.modules
    layers = modules.path.index("layers")
    below = [at for at, parent in enumerate(modules.parent) if parent == layers]
    shown = [at for at in below if modules.first_identical[at] == at]
    assert len(below) == 416
    assert sum(modules.repeat[at] for at in shown) == 416
    assert len(shown) < 100
    assert [finding.count for finding in page.findings] == [416]
