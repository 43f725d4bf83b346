"""The site's pages have what they promise; `make docs` builds it."""

from __future__ import annotations

import re
import runpy

import click
import pytest

import shardscope
from page_blocks import PAGES, ROOT
from shardscope import compat, errors
from shardscope.cli import main

yaml = pytest.importorskip("yaml")  # comes with mkdocs

DOCS = ROOT / "docs"
REFERENCE = "".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))


def test_every_public_name_has_its_place_in_the_reference() -> None:
    shown = set(re.findall(r"^::: shardscope\.(\w+)$", REFERENCE, re.MULTILINE))
    assert {*shardscope.__all__} - {"ShardscopeError", "__version__"} <= shown
    assert {"errors", "compat"} <= shown
    assert "`shardscope.__version__`" in REFERENCE
    assert "ShardscopeError" in errors.__all__


def test_every_name_for_users_of_torch_is_told() -> None:
    page = (DOCS / "coming-from-torch.md").read_text()
    assert [name for name in compat.__all__ if f"`{name}`" not in page] == []


def test_every_verb_and_option_is_on_the_page_of_the_command_line() -> None:
    page = runpy.run_path(str(DOCS / "_hooks" / "cli.py"))["render_page"]()
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        assert f"\n## {name}\n" in page
        options = [one for one in command.params if isinstance(one, click.Option)]
        assert all(one.opts[-1] in page for one in options)


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(DOCS) for path in sorted(DOCS.rglob("*.md"))]
    assert [
        str(one) for one in pages if str(one) not in menu and f"{one.parent}/*" not in menu
    ] == []
    config = yaml.safe_load(menu)
    assert config["strict"] is True
    assert config["theme"]["font"] is False


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    made = {(DOCS / "reference" / "cli.md").resolve()}  # when the site is built
    for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
        if "://" not in link:
            target = (path.parent / link).resolve()
            assert target in made or target.exists(), f"{page}: {link}"


def test_a_page_is_called_in_the_menu_as_it_calls_itself() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    (questions,) = [one["Questions"] for one in menu if "Questions" in one]
    for entry in questions:
        for title, page in entry.items() if isinstance(entry, dict) else ():
            assert (DOCS / page).read_text().startswith(f"# {title}\n")
