"""Which versions of torch were tested is said alike wherever people look."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from page_blocks import PAGES
from shardscope.version import TESTED_TORCH

REPOSITORY = Path(__file__).resolve().parents[2]
TESTED = f"Tested with torch {', '.join(TESTED_TORCH[:-1])} and {TESTED_TORCH[-1]}"


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md", "CHANGELOG.md"])
def test_a_page_names_the_tested_versions(page: str) -> None:
    assert TESTED in (REPOSITORY / page).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_no_page_installs_the_package_from_the_index_where_it_is_not(page: str) -> None:
    assert "pip install shardscope" not in PAGES[page].read_text()


def test_the_metadata_name_the_tested_versions_and_ask_for_the_oldest() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert TESTED in project["description"]
    assert f"torch>={TESTED_TORCH[0]}" in project["dependencies"]
