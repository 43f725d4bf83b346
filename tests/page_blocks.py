"""The code blocks of a page of documentation, with what its source says about running them.

Comments in a page's source, which readers do not see, steer how the blocks after them are run:

    <!-- not run: why -->           the next block is not run
    <!-- needs: lightning -->       the next block is run where that package is installed
    <!-- exit: 1 -->                the next block's last command ends with 1; with several numbers,
                                    its last commands
    <!-- figures vary -->           decimals in the next output differ from machine to machine
    <!-- same as: plan.toml -->     the next block is the text of a file that the page has written
    <!-- first: code -->            Python that the page's reader is taken to have, run in its place
    <!-- file: train.py code -->    a file that the page's reader is taken to have
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

__all__ = ["PAGES", "ROOT", "Block", "read_blocks"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}

_COMMENT = re.compile(r"<!-- (.*?)\s*-->", re.DOTALL)
_DIRECTIVE = re.compile(r"(not run|needs|exit|figures vary|same as|first|file)(?::\s*|$)")
_FILE = re.compile(r"# ([\w-]+\.(?:py|toml))\n")


@dataclass(frozen=True)
class Block:
    """One block: `kind` is its language, text without one; first (unseen Python) or file."""

    kind: str
    text: str
    line: int
    said: dict[str, str] = field(default_factory=dict)  # by the comments before it
    file: str | None = None  # what it is the text of


def read_blocks(path: Path) -> list[Block]:
    """Every block of a page in order, unseen ones too."""
    blocks: list[Block] = []
    said: dict[str, str] = {}
    for token in MarkdownIt().parse(path.read_text()):
        line = token.map[0] + 1 if token.map else 0
        if token.type in ("html_block", "inline"):
            for comment in _COMMENT.findall(token.content):
                _hear(comment, line, said, blocks)
        elif token.type == "code_block":
            blocks.append(Block("indented", token.content, line))
        elif token.type == "fence":
            blocks.append(_read_fence(token.info.strip(), token.content, line, said))
            said = {}
    return blocks


def _hear(comment: str, line: int, said: dict[str, str], blocks: list[Block]) -> None:
    """Take a comment as said of the next block, or as a block that readers do not see."""
    found = _DIRECTIVE.match(comment)
    if found is None:
        return
    rest = comment[found.end() :]
    if found[1] == "first":
        blocks.append(Block("first", rest + "\n", line))
    elif found[1] == "file":
        name, _, text = rest.partition("\n")
        blocks.append(Block("file", text + "\n", line, file=name.strip()))
    else:
        said[found[1]] = rest


def _read_fence(kind: str, text: str, line: int, said: dict[str, str]) -> Block:
    file = _FILE.match(text) if kind in ("python", "toml") else None
    return Block(kind or "text", text, line, said, file[1] if file else None)
