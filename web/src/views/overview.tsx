/** The overview: key figures, findings, gaps and facts of the run. */
import "./overview.css";
import type { GapItem } from "../page";
import { CommandWords } from "../parts/command";
import { Panel } from "../parts/panel";
import { formatNumber, pluralize } from "../parts/units";
import { page } from "../store/page";
import { isRankSelected } from "../store/selection";
import { listMeasures } from "./modules/measures";
import { listPictureParams, ModulePicture } from "./modules/module_picture";
import { Facts } from "./overview/facts";
import { Findings, SEVERITIES } from "./overview/findings";
import { MatchingModules } from "./overview/matching_modules";
import { MemorySpark } from "./overview/memory_spark";
import { Checks, NextCommands } from "./overview/next_steps";
import { TrafficOverview } from "./overview/traffic";
import { Verdict } from "./overview/verdict";
import type { View } from "./view";

function Overview() {
  const { facts, gaps, modules } = page.value;
  return (
    <>
      <Verdict />
      {facts.length > 0 && <Facts facts={facts} />}
      {modules.path.length > 1 && listMeasures(page.value).length > 0 && (
        <ModulePicture maxDepth={5} />
      )}
      <div class="overview">
        <div class="overview-main">
          <MatchingModules />
          <div class="overview-pictures">
            <TrafficOverview />
            <MemorySpark />
          </div>
          <Findings />
          <Gaps gaps={gaps} />
        </div>
        <div class="overview-side">
          <NextCommands />
          <Checks />
          <Run />
        </div>
      </div>
    </>
  );
}

function Run() {
  const { run } = page.value;
  const rows: readonly [string, string][] = [
    ["file", run.file],
    ["ranks", run.ranks],
    ["mesh", run.mesh.map((axis) => `${axis.name}=${axis.size}`).join(" × ")],
    ["world", run.world],
    ["torch", run.torch_version],
    ["shardscope", run.shardscope_version],
    ["recorded by", run.instruments.join(", ")],
    ["forward passes", run.num_forwards === null ? "" : formatNumber(run.num_forwards)],
  ];
  return (
    <Panel title="What ran">
      <dl class="run">
        {rows
          .filter(([, value]) => value)
          .map(([label, value]) => (
            <div key={label}>
              <dt>{label}</dt>
              <dd>{value}</dd>
            </div>
          ))}
      </dl>
      {run.command && (
        <code class="run-command">
          <CommandWords text={run.command} />
        </code>
      )}
    </Panel>
  );
}

function Gaps({ gaps }: { gaps: readonly GapItem[] }) {
  if (!gaps.length) {
    return <p class="complete">{page.value.run.no_gaps}</p>;
  }
  const shown = gaps.filter(({ ranks }) => isRankSelected(ranks));
  const numLost = gaps.filter((gap) => gap.is_loss).length;
  const words = numLost
    ? `${pluralize(numLost, "gap")} with lost records: figures are incomplete.`
    : "Figures leave these out. Nothing else is known to be missing.";
  const part = shown.length < gaps.length ? `${shown.length} concern the selected rank. ` : "";
  return (
    <Panel title={`Gaps (${gaps.length})`} note={part + words} follows={["rank"]}>
      <ul class="gaps">
        {shown.map((gap, i) => (
          <li key={i} class="gap">
            <span class="gap-place mono">{gap.place}</span>
            <span class="gap-fact">{gap.fact}</span>
            <span class="gap-rank">
              {gap.is_loss && <span class="gap-loss">records lost</span>}
              {gap.ranks || "any rank"}
            </span>
          </li>
        ))}
      </ul>
    </Panel>
  );
}

export const view: View = {
  id: "overview",
  title: "Overview",
  hasData: () => true,
  empty: "",
  params: (page) => ({ severity: SEVERITIES, ...listPictureParams(page) }),
  Component: Overview,
};
