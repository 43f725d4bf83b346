/** Whether a compiled function is right; if not, what is to blame, and the script that shows it. */
import type { DiagnosisItem } from "../../page";
import { Badge } from "../../parts/badge";
import { CopyButton } from "../../parts/copy";
import { ModuleLink } from "../../parts/module_link";
import { Panel } from "../../parts/panel";
import { SourceLine } from "../../parts/source_line";
import { countOf } from "../../parts/units";

export function Diagnosis({ item }: { item: DiagnosisItem }) {
  const stage = [item.stage, item.part].filter(Boolean).join(": ");
  return (
    <Panel
      title={`Is ${item.target} compiled correctly?`}
      note={`compiled by ${item.backend}, on rank ${item.rank}; ${countOf(item.num_queries, "compilation")} tried`}
    >
      <div class="diagnosis">
        <p class="diagnosis-verdict">
          <Badge word={item.condition} tone={item.is_bad ? "bad" : "good"} />
          <span>{item.fact}</span>
        </p>
        <dl class="detail-list">
          <Entry label="stage" value={stage} />
          <Entry label="where" value={item.where} />
          <Entry label="error" value={item.deviation} />
          <Entry label="error" value={item.error} isCode />
          <Entry label="passes" value={item.passing} />
        </dl>
        <Suspects item={item} />
        {item.notes.map((note, i) => (
          <p key={i} class="dim">
            {note}
          </p>
        ))}
        <Script item={item} />
      </div>
    </Panel>
  );
}

function Entry({ label, value, isCode }: { label: string; value: string; isCode?: boolean }) {
  if (!value) return null;
  return (
    <div>
      <dt>{label}</dt>
      <dd class={isCode ? "mono wrap" : "wrap"}>{value}</dd>
    </div>
  );
}

function Suspects({ item }: { item: DiagnosisItem }) {
  if (!item.suspects.length) return null;
  const only = item.is_minimal ? "; without any one of them it does not fail" : "";
  return (
    <section class="stack">
      <h3 class="detail-head">To blame{item.suspects.length > 1 ? only : ""}</h3>
      {item.suspects.map((one, i) => (
        <div key={i} class="stack">
          <div class="suspect">
            <code>{one.op}</code>
            {one.module >= 0 && (
              <span>
                in <ModuleLink module={one.module} />
              </span>
            )}
          </div>
          <SourceLine source={one.source} />
        </div>
      ))}
    </section>
  );
}

function Script({ item }: { item: DiagnosisItem }) {
  if (!item.repro && !item.script) return null;
  const proof = item.is_verified
    ? "a fresh process fails in the same way"
    : "not confirmed by a fresh process";
  return (
    <details class="script" open={item.script.length < 4000}>
      <summary>
        <span>
          Script that shows it: <code>{item.repro || "repro.py"}</code>{" "}
          <span class="dim">({proof})</span>
        </span>
        {item.script && <CopyButton text={item.script} label="copy the script" />}
      </summary>
      {item.script ? (
        <pre>{item.script}</pre>
      ) : (
        <p class="dim">The recording names the script but does not contain it.</p>
      )}
    </details>
  );
}
