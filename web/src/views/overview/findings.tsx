/** Findings, the gravest first: the fact, what to do, and where. */
import { useState } from "preact/hooks";
import type { FindingItem } from "../../page";
import { Badge } from "../../parts/badge";
import { Choices } from "../../parts/choice";
import { Empty } from "../../parts/empty";
import { Highlight } from "../../parts/highlight";
import { ModuleLink } from "../../parts/module_link";
import { Panel } from "../../parts/panel";
import { SourceLine } from "../../parts/source_line";
import { countOf, formatNumber } from "../../parts/units";
import { isLikeSelection, nameOf, select, selected } from "../../store/modules";
import { page } from "../../store/page";
import { hasWords, words } from "../../store/search";

const SEVERITIES = ["error", "warning", "info"];
const FIRST = 25; // findings that are drawn until more are asked for

export function Findings() {
  const { findings } = page.value;
  const [severity, setSeverity] = useState("all");
  const [isComplete, setComplete] = useState(false);
  const found = findings.filter((one) => isWanted(one, severity));
  const shown = isComplete ? found : found.slice(0, FIRST);
  const numHidden = found.length - shown.length;
  return (
    <Panel
      title={`Findings (${formatNumber(findings.length)})`}
      note={
        <>
          <Narrowed numFound={found.length} numAll={findings.length} />
          {findings.length > 0 && <span class="dim">{page.value.run.checks}</span>}
        </>
      }
      controls={<Severities severity={severity} onChange={setSeverity} />}
    >
      {!findings.length && <Empty>No findings ({page.value.run.checks}).</Empty>}
      {findings.length > 0 && !found.length && <Empty>No finding matches the filter.</Empty>}
      <ul class="findings">
        {shown.map((one, i) => (
          <Finding key={i} finding={one} />
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

function isWanted(finding: FindingItem, severity: string): boolean {
  if (severity !== "all" && finding.severity !== severity) return false;
  if (!isLikeSelection(finding.module)) return false;
  return hasWords(
    [finding.rule, finding.subject, finding.fact, finding.remedy].join("\n"),
    words.value,
  );
}

function Narrowed({ numFound, numAll }: { numFound: number; numAll: number }) {
  if (numFound === numAll || selected.value < 0) return null;
  return (
    <>
      {numFound} of {numAll} in <b class="mono">{nameOf(selected.value)}</b>
      <button type="button" class="text-button" onClick={() => select(-1)}>
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
  const present = SEVERITIES.map((id) => ({
    id,
    count: findings.filter((one) => one.severity === id).length,
  })).filter(({ count }) => count > 0);
  if (present.length < 2) return null;
  const choices = [
    { id: "all", title: "all" },
    ...present.map(({ id, count }) => ({
      id,
      title: id === "info" ? `${formatNumber(count)} info` : countOf(count, id),
    })),
  ];
  return <Choices label="severity" choices={choices} value={severity} onChange={onChange} />;
}

function Finding({ finding }: { finding: FindingItem }) {
  return (
    <li class="finding">
      <div class="finding-head">
        <Badge word={finding.severity} />
        <span class="finding-rule">
          <Highlight text={finding.rule} />
        </span>
        <FindingSubject finding={finding} />
        {finding.count > 1 && (
          <span class="chip" title={`${finding.count} identical`}>
            ×{formatNumber(finding.count)}
          </span>
        )}
        {finding.ranks && <span class="finding-ranks">{finding.ranks}</span>}
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
    </li>
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
