/** Findings, most severe first: the fact, the remedy, the location. */
import { useState } from "preact/hooks";
import type { FindingItem } from "../../page";
import { Badge, toneOf } from "../../parts/badge";
import { Choices } from "../../parts/choices";
import { Empty } from "../../parts/empty_message";
import { Highlight } from "../../parts/highlight";
import { ModuleLink } from "../../parts/module_link";
import { Panel } from "../../parts/panel";
import { SourceLine } from "../../parts/source_line";
import { tip } from "../../parts/tooltip";
import { formatNumber, pluralize } from "../../parts/units";
import { hasModuleSelection, isInSelection, selectedName } from "../../store/modules";
import { page } from "../../store/page";
import { param, setParam } from "../../store/route";
import { containsWords, words } from "../../store/search";
import { clear, isRankSelected, isSourceSelected, selectedFacets } from "../../store/selection";

export const SEVERITIES = ["error", "warning", "info"];
const MAX_INITIAL = 25; // findings drawn before "show more" is clicked

export function Findings() {
  const { findings, run } = page.value;
  const note = run.findings_note;
  const severity = param("severity") ?? "all";
  const [isComplete, setComplete] = useState(false);
  const matching = findings.filter((finding) => matchesFilter(finding, severity));
  const shown = isComplete ? matching : matching.slice(0, MAX_INITIAL);
  const numHidden = matching.length - shown.length;
  return (
    <Panel
      title={`Findings (${formatNumber(findings.length)})`}
      follows={["module", "line", "rank"]}
      note={
        <>
          <FilterNote numMatching={matching.length} numAll={findings.length} />
          {findings.length > 0 && <span class="dim"> {page.value.run.checks}</span>}
          {note && <span class="findings-note"> {note}</span>}
        </>
      }
      controls={
        <Severities
          severity={severity}
          onChange={(id) => setParam("severity", id === "all" ? null : id)}
        />
      }
    >
      {!findings.length && <Empty>No findings ({page.value.run.checks}).</Empty>}
      {findings.length > 0 && !matching.length && (
        <Empty>
          {selectedFacets.value.length
            ? `None of ${pluralize(findings.length, "finding")} is in what is selected.`
            : "No finding matches the filter."}
        </Empty>
      )}
      <ul class="findings">
        {shown.map((finding, i) => (
          <Finding key={i} finding={finding} />
        ))}
      </ul>
      {numHidden > 0 && (
        <button type="button" class="more" onClick={() => setComplete(true)}>
          show {formatNumber(numHidden)} more
        </button>
      )}
    </Panel>
  );
}

function matchesFilter(finding: FindingItem, severity: string): boolean {
  if (severity !== "all" && finding.severity !== severity) return false;
  if (hasModuleSelection.value && !finding.modules.some(isInSelection)) return false;
  if (!isSourceSelected(finding.source) || !isRankSelected(finding.ranks)) return false;
  return containsWords(
    [finding.rule, finding.subject, finding.fact, finding.remedy].join("\n"),
    words.value,
  );
}

function FilterNote({ numMatching, numAll }: { numMatching: number; numAll: number }) {
  if (numMatching === numAll) return null;
  if (!hasModuleSelection.value) return <>{`${numMatching} of ${numAll};`}</>;
  return (
    <>
      {numMatching} of {numAll} in <b class="mono">{selectedName.value}</b>
      <button type="button" class="text-button" onClick={() => clear("module")}>
        show all modules
      </button>
    </>
  );
}

interface SeverityProps {
  readonly severity: string;
  readonly onChange: (severity: string) => void;
}

function Severities({ severity, onChange }: SeverityProps) {
  const { findings } = page.value;
  const countsBySeverity = SEVERITIES.map((id) => ({
    id,
    count: findings.filter((finding) => finding.severity === id).length,
  })).filter(({ count }) => count > 0);
  if (countsBySeverity.length < 2) return null;
  const choices = [
    { id: "all", title: "all" },
    ...countsBySeverity.map(({ id, count }) => ({
      id,
      title: id === "info" ? `${formatNumber(count)} info` : pluralize(count, id),
    })),
  ];
  return <Choices label="severity" choices={choices} value={severity} onChange={onChange} />;
}

function Finding({ finding }: { finding: FindingItem }) {
  return (
    <li class={`finding tone-${toneOf(finding.severity)}`}>
      <div class="finding-head">
        <Badge word={finding.severity} />
        <Rule finding={finding} />
        <FindingSubject finding={finding} />
        {finding.count > 1 && (
          <span class="chip" title={`${finding.count} identical`}>
            ×{formatNumber(finding.count)}
          </span>
        )}
        {finding.ranks && <span class="finding-ranks">{finding.ranks}</span>}
        {finding.cost && <span class="finding-cost">{finding.cost}</span>}
      </div>
      <p class="finding-fact">
        <Highlight text={finding.fact} />
      </p>
      {finding.remedy && (
        <p class="finding-remedy">
          <Highlight text={finding.remedy} />
        </p>
      )}
      <SourceLine source={finding.source} />
      {finding.documentation && (
        <p class="finding-page">
          An example and the fix: <code>{finding.documentation}</code>
        </p>
      )}
    </li>
  );
}

/** The rule's name, which explains itself on hover and on focus. */
function Rule({ finding }: { finding: FindingItem }) {
  const name = <Highlight text={finding.rule} />;
  if (!finding.explanation) return <span class="finding-rule">{name}</span>;
  return (
    <dfn
      class="finding-rule term"
      // biome-ignore lint/a11y/noNoninteractiveTabindex: focus shows the meaning, as hovering does
      tabIndex={0}
      aria-description={finding.explanation}
      {...tip(finding.explanation)}
    >
      {name}
    </dfn>
  );
}

function FindingSubject({ finding }: { finding: FindingItem }) {
  if (finding.module >= 0) return <ModuleLink module={finding.module} text={finding.subject} />;
  return (
    <span class="mono">
      <Highlight text={finding.subject} />
    </span>
  );
}
