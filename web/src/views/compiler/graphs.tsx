/** Graphs side by side, as wide as their number of ops, and the ops of the selected graph. */
import { useCallback, useMemo, useState } from "preact/hooks";
import type { BreakRow, GraphItem } from "../../page";
import { Choices } from "../../parts/choices";
import { Empty } from "../../parts/empty_message";
import { Highlight } from "../../parts/highlight";
import { ModuleLink } from "../../parts/module_link";
import { SourceLine } from "../../parts/source_line";
import { type Column, Table } from "../../parts/table";
import { tip } from "../../parts/tooltip";
import { formatNumber, pluralize } from "../../parts/units";
import { isInSelection, moduleName } from "../../store/modules";
import { page } from "../../store/page";
import { param, setParam } from "../../store/route";
import { containsWords, words } from "../../store/search";
import { formatLocation, isSourceSelected } from "../../store/selection";
import { groupByLine } from "./op_lines";

interface Props {
  readonly graphs: readonly GraphItem[];
  readonly breaks: readonly BreakRow[];
}

export function Graphs({ graphs, breaks }: Props) {
  const [selectedGraph, selectGraph] = useState(0);
  if (!graphs.length) return <p class="failure">No graph was made.</p>;
  return (
    <>
      <div class="graphs" role="group" aria-label="graphs">
        {graphs.map((graph, i) => (
          <button
            type="button"
            key={i}
            class="graph"
            style={{ flexGrow: Math.max(graph.num_ops, 1) }}
            aria-pressed={i === selectedGraph}
            onClick={() => selectGraph(i)}
            {...tip(() => <GraphTip graph={graph} />)}
          >
            <span class="graph-name">
              graph {graph.index}
              {graph.is_recompile && <span class="chip">again</span>}
            </span>
            <span class="graph-ops">{describeOps(graph)}</span>
            <span class="graph-end">{describeEnd(graph, breaks)}</span>
          </button>
        ))}
      </div>
      {graphs[selectedGraph] && <Ops key={selectedGraph} graph={graphs[selectedGraph]} />}
    </>
  );
}

/** `12 ops`, or `3 of 12 ops` if some are not of the selected module or line. */
function describeOps(graph: GraphItem): string {
  const numShown = graph.op.filter((_, op) => isOpSelected(graph, op)).length;
  const all = pluralize(graph.num_ops, "op");
  return numShown < graph.op.length ? `${formatNumber(numShown)} of ${all}` : all;
}

function isOpSelected(graph: GraphItem, op: number): boolean {
  return isInSelection(graph.module[op] ?? -1) && isSourceSelected(graph.line[op] ?? -1);
}

function describeEnd(graph: GraphItem, breaks: readonly BreakRow[]): string {
  const site = breaks[graph.break_site];
  if (!site) return graph.end === "return" ? "to the return" : `ends: ${graph.end}`;
  return `broken at line ${page.value.sources.line[site.source] ?? "?"}`;
}

function GraphTip({ graph }: { graph: GraphItem }) {
  return (
    <>
      <div class="tooltip-title">{graph.function}</div>
      <dl>
        <dt>compilation</dt>
        <dd>{graph.compile_id}</dd>
        <dt>inputs, outputs</dt>
        <dd>
          {graph.num_inputs}, {graph.num_outputs}
        </dd>
        <dt>fingerprint</dt>
        <dd class="mono">{graph.fingerprint.slice(0, 12)}</dd>
      </dl>
    </>
  );
}

const LAYOUTS = [
  { id: "lines", title: "By line", hint: "ops under the lines of code that they come from" },
  { id: "table", title: "Table", hint: "all ops, sortable" },
];

function Ops({ graph }: { graph: GraphItem }) {
  const columns = useMemo(() => makeColumns(graph), [graph]);
  const moduleOf = useCallback((row: number) => graph.module[row] ?? -1, [graph]);
  const layout = param("ops") ?? "lines";
  const sourceOf = useCallback((row: number) => graph.line[row] ?? -1, [graph]);
  return (
    <div class="graph-table">
      <p class="graph-title">
        <span>
          <code>{graph.function}</code> <SourceLine source={graph.source} isShort />{" "}
          <span class="dim">
            {pluralize(graph.num_inputs, "input")}, {pluralize(graph.num_outputs, "output")}
            {graph.left_out > 0 && `; ${pluralize(graph.left_out, "op")} more are not listed`}
          </span>
        </span>
        <Choices
          label="layout of ops"
          choices={LAYOUTS}
          value={layout}
          onChange={(id) => setParam("ops", id === "lines" ? null : id)}
        />
      </p>
      {layout === "lines" ? (
        <OpLines graph={graph} />
      ) : (
        <Table
          label={`ops of graph ${graph.index}`}
          numRows={graph.op.length}
          columns={columns}
          modules={moduleOf}
          sources={sourceOf}
          empty="It has no ops."
          height="26rem"
        />
      )}
    </div>
  );
}

/** Lines of code, and below each what the compiler made of it. */
function OpLines({ graph }: { graph: GraphItem }) {
  const searchWords = words.value;
  const groups = groupByLine(
    graph,
    (op) =>
      isOpSelected(graph, op) &&
      (!searchWords.length || containsWords(describeOp(graph, op), searchWords)),
  );
  if (!groups.length) return <Empty>{graph.op.length ? "No op matches." : "It has no ops."}</Empty>;
  return (
    <ol class="op-lines" aria-label={`ops of graph ${graph.index}`}>
      {groups.map(({ line, ops }, i) => (
        <li key={i}>
          {line < 0 ? (
            <p class="dim">without a line of the program</p>
          ) : (
            <SourceLine source={line} />
          )}
          <ul>
            {ops.map((op) => (
              <li key={op} class={graph.kind[op] === "bookkeeping" ? "op dim" : "op"}>
                <code>
                  <Highlight text={graph.op[op]!} />
                </code>
                {graph.result[op] && <code class="op-result">→ {graph.result[op]}</code>}
                {graph.within[op] && <span class="chip">in {graph.within[op]}</span>}
                {graph.module[op]! >= 0 && <ModuleLink module={graph.module[op]!} />}
              </li>
            ))}
          </ul>
        </li>
      ))}
    </ol>
  );
}

/** Everything about an op that a search may match. */
function describeOp(graph: GraphItem, op: number): string {
  const line = graph.line[op] ?? -1;
  const module = graph.module[op] ?? -1;
  return [
    graph.op[op],
    graph.kind[op],
    graph.result[op],
    module < 0 ? "" : moduleName(module),
    formatLocation(line),
    page.value.sources.text[line],
  ].join("\n");
}

function makeColumns(graph: GraphItem): Column[] {
  return [
    {
      id: "number",
      title: "#",
      width: 3.5,
      align: "end",
      value: (row) => row,
    },
    { id: "op", title: "Op", width: 12, grow: 2, isNeverCut: true, value: (row) => graph.op[row]! },
    { id: "kind", title: "Kind", width: 7, value: (row) => graph.kind[row]!.replaceAll("_", " ") },
    { id: "result", title: "Result", width: 11, grow: 1, value: (row) => graph.result[row]! },
    {
      id: "module",
      title: "Module",
      width: 10,
      grow: 2,
      value: (row) => (graph.module[row]! < 0 ? "" : moduleName(graph.module[row]!)),
      cell: (row) =>
        graph.module[row]! < 0 ? null : (
          <span class="clip">
            <ModuleLink module={graph.module[row]!} />
          </span>
        ),
    },
    {
      id: "line",
      title: "Line",
      width: 10,
      grow: 2,
      isNeverCut: true,
      value: (row) => formatLocation(graph.line[row] ?? -1),
      cell: (row) => <SourceLine source={graph.line[row] ?? -1} isShort />,
    },
  ];
}
