"""Groups findings that differ only in rank or layer, the gravest first."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from shardscope.record import Finding, Severity
from shardscope.record.layer_names import fold_layers_in_text

SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.INFO)
"""The gravest first."""


def group_findings(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Group findings that differ only in rank or in the layer numbers of their texts."""
    groups: dict[Hashable, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(_group_key(finding), []).append(finding)
    return sorted(groups.values(), key=lambda group: SEVERITIES.index(group[0].severity))


def _group_key(finding: Finding) -> Hashable:
    texts = tuple(map(fold_layers_in_text, (finding.subject, finding.fact, finding.remedy)))
    return finding.rule, finding.severity, texts, finding.source
