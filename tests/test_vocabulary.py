"""Names and docstrings use the words of docs/glossary.md: its last table lists words to avoid."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from source_trees import list_nodes

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "shardscope"
FILES = sorted(SOURCE.rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))
WEB_FILES = sorted(path for path in (ROOT / "web" / "src").rglob("*.ts*"))

# Public names that stay: Breach, BreachKind and BreachError.
# Lower a number when you remove some; none may be added.
REMAINING: dict[str, dict[str, int]] = {
    "name": {"breach": 3},
    "docstring": {},
    "test": {},
}


def words_to_avoid() -> dict[str, set[str]]:
    """The words of the glossary's last table, by where they are avoided."""
    table = (ROOT / "docs" / "glossary.md").read_text().split("## Words to avoid")[1]
    words: dict[str, set[str]] = {"name": set(), "docstring": set(), "test": set()}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and set(cells[2].split(", ")) <= set(words):
            for place in cells[2].split(", "):
                words[place] |= set(cells[0].split(", "))
    return words


def split_name(name: str) -> Iterator[str]:
    """The words of an identifier: `_RankClasses` has rank and classes."""
    for part in name.split("_"):
        yield from (word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part))


def names_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every name that a module binds, and its attributes where they are set."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def docstrings_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield ast.get_docstring(node) or ""


def typescript_names_in(text: str) -> Iterator[str]:
    """Every identifier of a TypeScript file, without comments, strings and the text of markup."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    for quote in ('"', "'", "`"):
        text = re.sub(rf"{quote}[^{quote}\n]*{quote}", " ", text)
    text = re.sub(r">[^<>{}()=;]*(?=[<{])", "> ", text)
    yield from re.findall(r"[A-Za-z_]\w*", text)


def count_words(kind: str) -> Counter[str]:
    """How often each word to avoid occurs in names, in docstrings, or in the names of tests."""
    avoided = words_to_avoid()[kind]
    counts: Counter[str] = Counter()
    for path in TEST_FILES if kind == "test" else FILES:
        nodes = list_nodes(path)
        if kind == "name":
            texts = [" ".join(split_name(name)) for name in (*names_in(nodes), path.stem)]
        elif kind == "test":
            texts = [name for name in names_in(nodes) if name.startswith("test_")]
        else:
            texts = [re.sub(r"`[^`]*`", "", text).lower() for text in docstrings_in(nodes)]
        for text in texts:
            counts.update(word for word in re.findall(r"[a-z]+", text) if word in avoided)
    return counts


def test_the_glossary_lists_words_to_avoid() -> None:
    words = words_to_avoid()
    assert {"one", "seat", "pen"} <= words["name"]
    assert {"addends", "told", "whole"} <= words["docstring"]


def test_an_identifier_is_split_into_words() -> None:
    assert list(split_name("_RankClasses")) == ["rank", "classes"]
    assert list(split_name("num_FSDPGroups")) == ["num", "fsdp", "groups"]


def test_no_name_uses_a_word_to_avoid() -> None:
    check_remaining("name")


def test_no_docstring_uses_a_word_to_avoid() -> None:
    check_remaining("docstring")


def test_no_test_name_uses_a_word_to_avoid() -> None:
    check_remaining("test")


def test_no_typescript_name_uses_a_word_to_avoid() -> None:
    avoided = words_to_avoid()["name"]
    uses = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in WEB_FILES
        for name in (*typescript_names_in(path.read_text()), path.name.split(".")[0])
        if avoided & set(split_name(name))
    }
    assert uses == set(), "words that docs/glossary.md says to avoid in a name"


def test_typescript_names_leave_out_comments_strings_and_markup() -> None:
    text = "const one = f(`told ${x}`, 'said'); // whole\n<p>the culprit {seat}</p> /* pen */"
    assert list(typescript_names_in(text)) == ["const", "one", "f", "p", "seat", "p"]


def check_remaining(kind: str) -> None:
    counts = count_words(kind)
    more = {
        word: f"{count}, was {REMAINING[kind].get(word, 0)}"
        for word, count in counts.items()
        if count > REMAINING[kind].get(word, 0)
    }
    assert more == {}, f"words that docs/glossary.md says to avoid in a {kind}"
    stale = {word: counts[word] for word, count in REMAINING[kind].items() if counts[word] < count}
    assert stale == {}, "fewer are left: lower REMAINING to these numbers"
