"""The site's pages have what they promise; `make docs` builds it."""

from __future__ import annotations

import inspect
import re
import runpy
import zlib
from pathlib import Path

import click
import pytest

from page_blocks import PAGES, ROOT
from shardscope import compat
from shardscope.cli import main

yaml = pytest.importorskip("yaml")  # comes with mkdocs

DOCS = ROOT / "docs"
INVENTORY = runpy.run_path(str(DOCS / "_hooks" / "inventory.py"))
FUNCTIONS = {
    f"{module}.{name}": value
    for module in INVENTORY["PUBLIC_MODULES"]
    for name, value in INVENTORY["list_public"](module).items()
    if inspect.isfunction(value)
}


def test_a_public_name_that_the_reference_lacks_is_found() -> None:
    documented = [
        f"{module}.{name}"
        for module in INVENTORY["PUBLIC_MODULES"]
        for name in INVENTORY["list_public"](module)
    ]
    assert INVENTORY["find_missing"](documented) == []
    assert INVENTORY["find_missing"]({*documented} - {"shardscope.trace"}) == ["shardscope.trace"]


def test_an_inventory_is_read(tmp_path: Path) -> None:
    body = zlib.compress(b"shardscope.trace py:function 1 reference/comm.html#$ -\n")
    (tmp_path / "objects.inv").write_bytes(b"# 1\n# 2\n# 3\n# 4\n" + body)
    assert INVENTORY["read_inventory"](tmp_path / "objects.inv") == {"shardscope.trace"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_describes_each_parameter(name: str) -> None:
    _, _, arguments = (inspect.getdoc(FUNCTIONS[name]) or "").partition("\nArgs:\n")
    described = re.findall(r"^    \*{0,2}(\w+): ", arguments.split("\n\n")[0], re.MULTILINE)
    assert described == list(inspect.signature(FUNCTIONS[name]).parameters)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_has_an_example(name: str) -> None:
    assert name.startswith("shardscope.plugins.pytest.") or "\nExamples:\n    >>> " in (
        inspect.getdoc(FUNCTIONS[name]) or ""
    )


@pytest.mark.parametrize("module", INVENTORY["PUBLIC_MODULES"])
def test_examples_are_in_sections_that_are_rendered_as_code(module: str) -> None:
    for name, value in INVENTORY["list_public"](module).items():
        text = inspect.getdoc(value) or "" if callable(value) else ""
        assert not re.search(r"^>>>", text, re.MULTILINE), name


def test_every_drop_in_name_is_documented() -> None:
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
        assert all(f"\n{example}\n" in page for example in getattr(command, "examples", ()))


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
    # Pages that exist when the site is built.
    made = {(DOCS / "reference" / "cli.md").resolve(), (DOCS / "gallery.md").resolve()}
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
