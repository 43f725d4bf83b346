"""The code blocks of a page of documentation.

Nothing that a reader needs is hidden: a comment in a page's source may only say how the tests treat
the block after it.

    <!-- not run: why -->           the next block is not run
    <!-- needs: lightning -->       the next block is run where that package is installed
    <!-- figures vary -->           decimals in the next output differ from machine to machine
    <!-- same as: plan.toml -->     the next block is the text of a file that the page has written
    <!-- killed at: 42 lines -->    ranks that the next block starts and that hang are killed once
                                    their streams have so many lines

README and tutorial have no comments at all. What a command's exit code is, if not 0, the block
itself says: `shardscope diff …  # exits with 1`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

__all__ = ["PAGES", "ROOT", "Block", "read_blocks", "read_comments"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (
        ROOT / "README.md",
        ROOT / "src" / "shardscope" / "skill" / "SKILL.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}

_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
_DIRECTIVE = re.compile(r"(not run|needs|figures vary|same as|killed at)(?::\s*|$)")
_FILE = re.compile(r"# ([\w-]+\.(?:py|toml))\n")


@dataclass(frozen=True)
class Block:
    """One block: `kind` is its language, "text" without one."""

    kind: str
    text: str
    line: int
    directives: dict[str, str] = field(default_factory=dict)  # in the comments before it
    file: str | None = None  # the file that the block is the text of


def read_comments(path: Path) -> list[str]:
    """The comments of a page that are not directives for the tests."""
    return [text for text in _COMMENT.findall(path.read_text()) if not _DIRECTIVE.match(text)]


def read_blocks(path: Path) -> list[Block]:
    """Every block of a page in order."""
    blocks: list[Block] = []
    directives: dict[str, str] = {}
    for token in MarkdownIt().parse(path.read_text()):
        line = token.map[0] + 1 if token.map else 0
        if token.type in ("html_block", "inline"):
            for comment in _COMMENT.findall(token.content):
                found = _DIRECTIVE.match(comment)
                if found is not None:
                    directives[found[1]] = comment[found.end() :]
        elif token.type == "code_block":
            blocks.append(Block("indented", token.content, line))
        elif token.type == "fence":
            blocks.append(_read_fence(token.info.strip(), token.content, line, directives))
            directives = {}
    return blocks


def _read_fence(kind: str, text: str, line: int, directives: dict[str, str]) -> Block:
    file = _FILE.match(text) if kind in ("python", "toml") else None
    return Block(kind or "text", text, line, directives, file[1] if file else None)
