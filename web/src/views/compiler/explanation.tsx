/** One compiled function: graphs, graph breaks, recompilations, compile times. */
import type { BreakRow, ExplanationItem, RecompileRow, SkippedRow, StageRow } from "../../page";
import { Bar } from "../../parts/bar";
import { Empty } from "../../parts/empty_message";
import { Panel } from "../../parts/panel";
import { SourceLine } from "../../parts/source_line";
import { formatDuration, pluralize } from "../../parts/units";
import { page } from "../../store/page";
import { type Facet, isSourceSelected } from "../../store/selection";
import { Graphs } from "./graphs";
import { Guards } from "./guards";

function NoGuards() {
  const empty = page.value.empty_views.find(({ view }) => view === "compiler");
  return (
    <p class="dim">
      Guards were not recorded:{" "}
      <code>{`${empty?.command ?? "shardscope explain TARGET"} --guards`}</code>
    </p>
  );
}

export function Explanation({ item }: { item: ExplanationItem }) {
  return (
    <>
      <Panel
        title={`Graphs of ${item.target}`}
        note={`${item.summary} (rank ${item.ranks})`}
        follows={["module", "line", "rank"]}
      >
        {item.failure && (
          <p class="failure">
            It raised an exception: <code>{item.failure}</code>
          </p>
        )}
        <Graphs graphs={item.graphs} breaks={item.break_sites} />
      </Panel>
      {item.break_sites.length > 0 && <BreakSites item={item} />}
      {item.recompiles.length > 0 && <Recompiles rows={item.recompiles} />}
      {item.guards.length > 0 ? <Guards frames={item.guards} /> : <NoGuards />}
      {item.skipped_frames.length > 0 && <Skipped rows={item.skipped_frames} />}
      {item.stages.length > 0 && <Stages rows={item.stages} />}
    </>
  );
}

/** What lists of lines are filtered by. */
const FOLLOWED: readonly Facet[] = ["line", "rank"];

function BreakSites({ item }: { item: ExplanationItem }) {
  const numShown = item.break_sites.filter(isOnLine).length;
  return (
    <Panel
      title={`Lines that break graphs (${countShown(numShown, item.break_sites.length)})`}
      note={`${pluralize(item.num_break_events, "graph break")}${numShown < item.break_sites.length ? " in the whole function" : ""}`}
      follows={FOLLOWED}
    >
      <ol class="breaks">
        {item.break_sites.map(
          (site, i) => isOnLine(site) && <Break key={i} site={site} number={i + 1} />,
        )}
      </ol>
    </Panel>
  );
}

/** `3`, or `1 of 3` if some are not on the selected line. */
function countShown(numShown: number, number: number): string {
  return numShown < number ? `${numShown} of ${number}` : String(number);
}

/** Whether a row is on the selected line, if a line is selected. */
function isOnLine({ source }: { readonly source: number }): boolean {
  return isSourceSelected(source);
}

function Break({ site, number }: { site: BreakRow; number: number }) {
  return (
    <li class="break" id={`break-${number}`}>
      <div class="break-head">
        <span class="break-number">{number}</span>
        <span class="break-reason">{site.reason}</span>
        {site.num_events > 1 && <span class="chip">×{site.num_events}</span>}
        {site.break_id && <span class="chip mono">{site.break_id}</span>}
      </div>
      <SourceLine source={site.source} />
      {site.explanation && <p class="dim wrap">{site.explanation}</p>}
      {site.hints.map((hint, i) => (
        <p key={i} class="remedy">
          {hint}
        </p>
      ))}
      {site.fix && <pre class="fix">{site.fix}</pre>}
    </li>
  );
}

/** Recompilations by the line where the code that was compiled again begins. */
function Recompiles({ rows }: { rows: readonly RecompileRow[] }) {
  const shown = rows.filter(isOnLine);
  return (
    <Panel
      title={`Recompilations (${countShown(shown.length, rows.length)})`}
      note="by line, with what had changed: the guard that failed"
      follows={FOLLOWED}
    >
      <ul class="breaks">
        {groupRecompiles(shown).map((group) => (
          <li key={`${group[0]!.function} ${group[0]!.source}`} class="break">
            <div class="break-head">
              <code>{group[0]!.function}</code>
              <span class="chip">×{group.length}</span>
            </div>
            <SourceLine source={group[0]!.source} />
            <ol class="recompiles">
              {group.map((row) => (
                <li key={row.number}>
                  <span class="dim">compilation {row.number + 1}</span>
                  <span class="wrap" title={row.guard}>
                    {row.description || row.guard}
                  </span>
                </li>
              ))}
            </ol>
          </li>
        ))}
      </ul>
    </Panel>
  );
}

function groupRecompiles(rows: readonly RecompileRow[]): RecompileRow[][] {
  const groups = new Map<string, RecompileRow[]>();
  for (const row of rows) {
    const key = `${row.source} ${row.function}`;
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  return [...groups.values()];
}

function Skipped({ rows }: { rows: readonly SkippedRow[] }) {
  const shown = rows.filter(isOnLine);
  return (
    <Panel
      title={`Not compiled (${countShown(shown.length, rows.length)})`}
      note="functions that ran eagerly"
      follows={FOLLOWED}
    >
      <ul class="breaks">
        {shown.map((row, i) => (
          <li key={i} class="break">
            <div class="break-head">
              <code>{row.function}</code>
              {row.is_rest && <span class="chip">the rest after a graph break</span>}
            </div>
            <p class="wrap">{row.reason}</p>
            <SourceLine source={row.source} />
          </li>
        ))}
      </ul>
    </Panel>
  );
}

function Stages({ rows }: { rows: readonly StageRow[] }) {
  if (rows.every((row) => row.total_ns === null)) {
    return (
      <Panel title="Compile time by stage" follows={["rank"]}>
        <Empty>Times were not recorded.</Empty>
      </Panel>
    );
  }
  const max = Math.max(...rows.map((row) => row.total_ns ?? 0));
  return (
    <Panel title="Compile time by stage" note="exclusive" follows={["rank"]}>
      <ul class="stages">
        {rows.map((row) => (
          <li key={row.stage}>
            <span>{row.stage}</span>
            <Bar
              value={row.total_ns ?? 0}
              max={max}
              text={row.total_ns === null ? "not known" : formatDuration(row.total_ns)}
            />
            <span class="dim">{pluralize(row.num_calls, "call")}</span>
          </li>
        ))}
      </ul>
    </Panel>
  );
}
