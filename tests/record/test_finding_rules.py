"""The table of rules: every finding's rule is in it, with a sentence and a page."""

from __future__ import annotations

import ast
from pathlib import Path

from shardscope.hang.hang_findings import RULES_OF_CAUSES
from shardscope.record import FINE, Agreement, Condition, Suspect
from shardscope.record.finding_rules import FINDING_RULES, documentation_page
from shardscope.report.runs.run_causes import REMEDIES
from source_trees import list_nodes

_ROOT = Path(__file__).parents[2]
_SOURCE = _ROOT / "src" / "shardscope"
_MAKERS = ("Finding", "Problem")
# What f-strings of rules begin with, and the names that may follow.
_FAMILIES = {
    "parity-": {*Suspect, *(set(Agreement) - FINE)},
    "run-": set(REMEDIES),
    "compiled-": {condition for condition in Condition if condition.is_bad},
}


def _read_rules(path: Path) -> set[str]:
    """The rules of findings that a module makes, as far as its code names them."""
    constants = {
        target.id: node.value.value
        for node in list_nodes(path)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }
    rules: set[str] = set()
    for call in list_nodes(path):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in _MAKERS:
            for keyword in call.keywords:
                if keyword.arg == "rule":
                    rules |= _read_texts(keyword.value, constants)
    return rules


def _read_texts(value: ast.expr, constants: dict[str, str]) -> set[str]:
    match value:
        case ast.Constant(value=text):
            return {str(text)} - {""}
        case ast.Name(id=name):
            return {constants[name]} if name in constants else set()
        case ast.IfExp(body=first, orelse=second):
            return _read_texts(first, constants) | _read_texts(second, constants)
        case ast.BoolOp(values=choices):
            return set().union(*(_read_texts(choice, constants) for choice in choices))
        case ast.JoinedStr(values=[ast.Constant(value=prefix), *_]):
            names = _FAMILIES[str(prefix)]
            return {f"{prefix}{name.replace('_', '-')}" for name in names}
    return set()


def test_every_rule_of_a_finding_is_in_the_table() -> None:
    made = set().union(*map(_read_rules, _SOURCE.rglob("*.py")))
    # The rules of collectives are looked up by kind, which the walk above does not see.
    made |= {"implicit-gather", "implicit-all-to-all"}
    assert len(made) > 50
    assert made - set(FINDING_RULES) == set()
    passed_on = {"rank-mismatch", "rank-behind", "deadlock"}  # constants of another module
    passed_on |= {"compiled-collective-order", "compiled-graphs-differ"}
    passed_on |= set(RULES_OF_CAUSES.values())
    assert set(FINDING_RULES) - made <= passed_on


def test_rules_have_a_sentence_and_a_page() -> None:
    for name, rule in FINDING_RULES.items():
        assert rule.name == name
        assert rule.explanation[0].isupper(), name
        assert rule.explanation.endswith("."), name
        assert documentation_page(name) == f"docs/findings/{name}.md"


def test_the_reference_lists_the_same_rules_with_the_same_words() -> None:
    text = (_ROOT / "docs" / "reference" / "recording.md").read_text()
    section = text.partition("### Rules\n")[2].partition("\n## ")[0]
    rows = [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")
    ]
    assert rows == [
        [f"`{rule.name}`", f"`{rule.instrument}`", rule.explanation]
        for rule in FINDING_RULES.values()
    ]
