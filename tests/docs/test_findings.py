"""Every rule of findings has a page, and the page is about this rule."""

from __future__ import annotations

import pytest

from page_blocks import ROOT
from shardscope.record.finding_rules import FINDING_RULES, documentation_page

INDEX = (ROOT / "docs" / "findings" / "index.md").read_text()


@pytest.mark.parametrize("rule", FINDING_RULES)
def test_a_rule_has_a_page_with_its_meaning_an_example_and_the_fix(rule: str) -> None:
    page = (ROOT / documentation_page(rule)).read_text()
    info = FINDING_RULES[rule]
    assert page.startswith(f"# {rule}\n\nFound by `{info.instrument}`.")
    assert info.explanation in page
    _, example, fix = page.replace("## Fix", "## Example").split("## Example")
    assert len(example.split()) > 5
    assert len(fix.split()) > 2
    assert f"[{rule}]({rule}.md)" in INDEX


def test_there_is_no_page_without_a_rule() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "findings").glob("*.md")} - {"index"}
    assert pages == set(FINDING_RULES)
