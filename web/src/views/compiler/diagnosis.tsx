/** A diagnosis: whether a compiled function is correct, which ops fail, and the repro script. */
import type { DiagnosisItem } from "../../page";
import { Badge } from "../../parts/badge";
import { CopyButton } from "../../parts/copy_button";
import { ModuleLink } from "../../parts/module_link";
import { Panel } from "../../parts/panel";
import { SourceLine } from "../../parts/source_line";
import { pluralize } from "../../parts/units";

export function Diagnosis({ item }: { item: DiagnosisItem }) {
  const stage = [item.stage, item.part].filter(Boolean).join(": ");
  return (
    <Panel
      title={`Is ${item.target} compiled correctly?`}
      note={`compiled by ${item.backend}, on rank ${item.rank}; ${pluralize(item.num_queries, "compilation")} tried`}
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
  const minimality = item.is_minimal ? "; without any one of them it does not fail" : "";
  return (
    <section class="stack">
      <h3 class="detail-head">Failing ops{item.suspects.length > 1 ? minimality : ""}</h3>
      {item.suspects.map((suspect, i) => (
        <div key={i} class="stack">
          <div class="suspect">
            <code>{suspect.op}</code>
            {suspect.module >= 0 && (
              <span>
                in <ModuleLink module={suspect.module} />
              </span>
            )}
          </div>
          <SourceLine source={suspect.source} />
        </div>
      ))}
    </section>
  );
}

function Script({ item }: { item: DiagnosisItem }) {
  if (!item.repro && !item.script) return null;
  const confirmation = item.is_verified
    ? "a fresh process fails in the same way"
    : "not confirmed by a fresh process";
  return (
    <details class="script" open={item.script.length < 4000}>
      <summary>
        <span>
          Repro script: <code>{item.repro || "repro.py"}</code>{" "}
          <span class="dim">({confirmation})</span>
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
