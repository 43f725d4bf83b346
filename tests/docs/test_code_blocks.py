"""Every code block of README and documentation runs as printed, and prints what the page shows."""

from __future__ import annotations

import codeop
import sys
from pathlib import Path

import pytest

import page_runs
from page_blocks import PAGES, ROOT, Block, read_blocks, read_comments
from warm_python import warm_context

TIMEOUT_S = 240
MAX_NOT_RUN = 13

BLOCKS = {page: read_blocks(path) for page, path in PAGES.items()}


@pytest.mark.parametrize(
    "page", [page for page, blocks in BLOCKS.items() if any(map(page_runs.is_run, blocks))]
)
def test_blocks_of_a_page_run_as_printed(page: str, tmp_path: Path) -> None:
    context = warm_context()
    ours, user_code = context.Pipe()
    process = context.Process(target=page_runs.run_page, args=(page, str(tmp_path), user_code))
    process.start()
    user_code.close()
    try:
        said = ours.recv() if ours.poll(TIMEOUT_S) else f"{page} takes more than {TIMEOUT_S} s."
    except EOFError:
        said = f"{page}: the process died."
    finally:
        process.kill()
        process.join()
    if said:
        pytest.fail(said, pytrace=False)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_hides_nothing_that_its_blocks_need(page: str) -> None:
    assert read_comments(PAGES[page]) == []


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_readme_and_tutorial_have_no_comments_and_run_completely(page: str) -> None:
    assert "<!--" not in (ROOT / page).read_text()


def test_readme_can_be_pasted_into_the_interactive_interpreter() -> None:
    """Which ends a statement at an empty line, and only there."""
    for block in BLOCKS["README.md"]:
        lines = block.text.splitlines() if block.kind == "python" else []
        statement: list[str] = []
        for line in [*lines, ""]:
            statement.append(line)
            if codeop.compile_command("\n".join(statement), symbol="single") is not None:
                statement = []
        assert statement == [], f"README.md:{block.line}"


@pytest.mark.parametrize("page", page_runs.WIDTHS)
def test_outputs_fit_the_terminal_that_their_page_is_run_in(page: str) -> None:
    outputs = [block for block in BLOCKS[page] if block.kind == "text"]
    assert outputs
    for block in outputs:
        longest = max(map(len, block.text.splitlines()))
        assert longest <= page_runs.WIDTHS[page], f"{page}:{block.line}"


def _not_run() -> list[tuple[str, Block]]:
    return [
        (page, block)
        for page, blocks in BLOCKS.items()
        for block in blocks
        if "not run" in block.directives
    ]


def test_blocks_that_are_not_run_are_few_and_say_why() -> None:
    unexplained = [
        f"{page}:{block.line}"
        for page, block in _not_run()
        if len(block.directives["not run"].split()) < 3
    ]
    assert unexplained == []
    assert len(_not_run()) <= MAX_NOT_RUN


def test_a_block_that_prints_something_else_is_reported(
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
