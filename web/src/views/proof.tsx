/** Whether the parallel program computes the same results, and the collectives that were inserted. */
import "./proof.css";
import type { DivergenceItem, FallbackRow, InsertedRow, ParallelItem, ParityItem } from "../page";
import { Badge } from "../parts/badge";
import { Choices } from "../parts/choices";
import { ModuleLink } from "../parts/module_link";
import { Panel } from "../parts/panel";
import { SourceLine } from "../parts/source_line";
import { formatBytes, formatCount } from "../parts/units";
import { page } from "../store/page";
import { param, setParam } from "../store/route";
import { Verdicts } from "./proof/verdicts";
import type { View } from "./view";

function Proof() {
  const { parity, parallel } = page.value.proof!;
  return (
    <>
      {parity.map((item, i) => (
        <Parity key={`p${i}`} item={item} />
      ))}
      {parallel.map((item, i) => (
        <Parallel key={`c${i}`} item={item} />
      ))}
    </>
  );
}

function WhichTensors() {
  const value = param("only") ?? "all";
  return (
    <Choices
      label="which tensors"
      choices={[
        { id: "all", title: "All" },
        { id: "bad", title: "Those that differ" },
      ]}
      value={value}
      onChange={(id) => setParam("only", id === "all" ? null : id)}
    />
  );
}

function Summary({ isFine, summary }: { isFine: boolean; summary: string }) {
  return (
    <p class={isFine ? "proof-words" : "proof-words proof-wrong"}>
      <Badge word={isFine ? "the same" : "differs"} tone={isFine ? "good" : "bad"} />
      <span>{summary}</span>
    </p>
  );
}

function Parity({ item }: { item: ParityItem }) {
  return (
    <Panel
      title="Does the parallel model compute the same?"
      note={`on ${item.mesh}`}
      controls={<WhichTensors />}
    >
      <Summary isFine={item.is_fine} summary={item.summary} />
      {item.divergences.length > 0 && (
        <ol class="breaks">
          {item.divergences.map((divergence, i) => (
            <Divergence key={i} item={divergence} />
          ))}
        </ol>
      )}
      <Verdicts tensors={item.tensors} isBad={param("only") === "bad"} />
    </Panel>
  );
}

function Divergence({ item }: { item: DivergenceItem }) {
  return (
    <li class="break">
      <div class="break-head">
        <Badge word={item.suspect} tone="bad" />
        <span>
          first differs in <ModuleLink module={item.module} text={item.path || undefined} />, in{" "}
          {item.phase}
        </span>
        {item.op && <code>{item.op}</code>}
      </div>
      <p class="wrap">{item.detail}</p>
      <SourceLine source={item.source} />
      {item.remedy && <p class="remedy">{item.remedy}</p>}
    </li>
  );
}

function Parallel({ item }: { item: ParallelItem }) {
  return (
    <Panel
      title={`${item.program}, partitioned for ${item.mesh}`}
      controls={item.tensors.name.length > 0 && <WhichTensors />}
    >
      <Summary isFine={item.is_fine} summary={item.summary} />
      {item.fallbacks.length > 0 && <Fallbacks rows={item.fallbacks} />}
      {item.inserted.length > 0 && <Inserted rows={item.inserted} />}
      {item.tensors.name.length > 0 && (
        <Verdicts tensors={item.tensors} isBad={param("only") === "bad"} />
      )}
    </Panel>
  );
}

function Inserted({ rows }: { rows: readonly InsertedRow[] }) {
  return (
    <div class="proof-table">
      <h3 class="detail-head">Inserted collectives; ×n: in n identical layers</h3>
      <div class="scroll-x">
        <table class="plain-table">
          <thead>
            <tr>
              <th>what</th>
              <th>phase</th>
              <th class="end">count</th>
              <th class="end">input in all</th>
              <th>module</th>
              <th>cause</th>
              <th>line</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row, i) => (
              <tr key={i}>
                <td>{row.what}</td>
                <td>{row.phase}</td>
                <td class="end">{formatCount(row.count)}</td>
                <td class="end">{formatBytes(row.size_bytes)}</td>
                <td>
                  <ModuleLink module={row.module} />
                </td>
                <td class="proof-cause">{row.cause}</td>
                <td>
                  <SourceLine source={row.source} isShort />
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </div>
  );
}

function Fallbacks({ rows }: { rows: readonly FallbackRow[] }) {
  return (
    <ul class="breaks">
      {rows.map((row, i) => (
        <li key={i} class="break">
          <div class="break-head">
            <Badge word={row.kind} tone="warn" />
            <code>{row.op}</code>
            {row.count > 1 && <span class="chip">×{row.count}</span>}
            <span>
              in <ModuleLink module={row.module} /> along {row.axis}, {formatBytes(row.size_bytes)}{" "}
              moved
            </span>
          </div>
          <p class="mono wrap">{row.placements}</p>
          <SourceLine source={row.source} />
          <p class="remedy">{row.remedy}</p>
        </li>
      ))}
    </ul>
  );
}

export const view: View = {
  id: "proof",
  title: "Correctness",
  hasData: ({ proof }) => proof !== null && proof.parity.length + proof.parallel.length > 0,
  empty: "The parallel model was not compared with a single device.",
  command: "shardscope parity TARGET --mesh tp=2 -o recording.json",
  Component: Proof,
};
