"""Every code block of README and documentation runs as printed, and prints what the page shows."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import page_runs
from page_blocks import PAGES, Block, read_blocks

TIMEOUT_S = 240
MAX_NOT_RUN = 12

# What forks of one process find imported, so that a page costs no seconds of importing.
_PRELOADED = ["torch", "torch._dynamo", "torch.distributed.tensor", "shardscope.compat", "pytest"]

BLOCKS = {page: read_blocks(path) for page, path in PAGES.items()}


def _answer(page: str, folder: str, connection: Connection) -> None:
    page_runs.run_page(page, folder, connection.send)


@pytest.mark.parametrize(
    "page", [page for page, blocks in BLOCKS.items() if any(map(page_runs.is_run, blocks))]
)
def test_blocks_of_a_page_run_as_printed(page: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(page, str(tmp_path), theirs))
    process.start()
    theirs.close()
    try:
        said = ours.recv() if ours.poll(TIMEOUT_S) else f"{page} takes more than {TIMEOUT_S} s."
    except EOFError:
        said = f"{page}: the process died."
    finally:
        process.kill()
        process.join()
    if said:
        pytest.fail(said, pytrace=False)


def _not_run() -> list[tuple[str, Block]]:
    return [
        (page, block)
        for page, blocks in BLOCKS.items()
        for block in blocks
        if "not run" in block.said
    ]


def test_blocks_that_are_not_run_are_few_and_say_why() -> None:
    unexplained = [
        f"{page}:{block.line}"
        for page, block in _not_run()
        if len(block.said["not run"].split()) < 3
    ]
    assert unexplained == []
    assert len(_not_run()) <= MAX_NOT_RUN


def test_a_block_that_prints_something_else_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint('one')\n```\n\n```\ntwo\n```\n")
    monkeypatch.setitem(sys.modules, "guide", None)  # as it was before, afterwards
    monkeypatch.setattr(page_runs, "_shown_version", lambda: "")  # any torch
    reader = page_runs.Reader(tmp_path)
    told = r"5: this is shown:\ntwo\n\nand this printed:\none"
    with pytest.raises(page_runs.PageError, match=told):
        reader.read(read_blocks(page))
